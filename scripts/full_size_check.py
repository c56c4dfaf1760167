"""A pair of published size on a CPU: random weights in the published layout, built, opened and run.

    scripts/full_size_check gpt-oss-20b [WORK_DIR]

The configs are those of openai/gpt-oss-20b and z-lab/gpt-oss-20b-DFlash. Every tensor has its published name, shape and
dtype; codes are random bytes, written shard by shard. Each part runs in a process of its own, whose peak of resident
memory is what the kernel counts, pages of mapped files included. WORK_DIR (default: build/full_size) needs 30 GB, and
keeps the checkpoints for the next time.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from dflash_trt.checkpoint.draft_config import parse_draft
from dflash_trt.checkpoint.expert_tensors import part_shapes
from dflash_trt.checkpoint.foreign_names import ForeignTable
from dflash_trt.checkpoint.names import draft_names, target_names
from dflash_trt.checkpoint.target_config import parse_target
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, segment_specs

CONFIGS = Path(__file__).parent / "full_size"
PAIRS = {"gpt-oss-20b": "gpt-oss-20b-DFlash"}
NUM_TOKENS = 16
PROMPT = [200006, 17360, 200008, 3575, 553, 17554, 162016, 11]
MAX_OVER_SHARD_BYTES, MAX_OPEN_BYTES = 2e9, 18e9  # peaks of the build, above its largest shard, and of the open engine

_SHARD_BYTES = 1e9
_E8M0_SCALES = (116, 122)  # 2 ** -11 .. 2 ** -6: outputs of the size of the inputs


def write_checkpoint(directory: Path, config: Path) -> None:
    """Random weights for a config, in shards."""
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shutil.copy(config, partial / "config.json")
    files: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in _random_tensors(partial):
        if sum(held.nbytes for held in shard.values()) + tensor.nbytes > _SHARD_BYTES:
            _save(partial, shard, files)
        shard[name] = tensor
    _save(partial, shard, files)
    (partial / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    partial.rename(directory)


def _save(directory: Path, shard: dict[str, torch.Tensor], files: dict[str, str]) -> None:
    file = f"model-{len(set(files.values())):05d}.safetensors"
    save_file(shard, directory / file, {"format": "pt"})
    files |= dict.fromkeys(shard, file)
    shard.clear()


def _random_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """By published name, in the order of the layers."""
    generator = torch.Generator().manual_seed(0)
    table, names = _tables(directory)
    for canonical, foreign in names.items():
        spec = table[canonical]
        for name, shape in zip(foreign.parts, _shapes(spec, foreign.layout, len(foreign.parts)), strict=True):
            if name.endswith("_blocks"):
                yield name, torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            elif name.endswith("_scales"):
                yield name, torch.randint(*_E8M0_SCALES, shape, dtype=torch.uint8, generator=generator)
            elif len(shape) == 1 and not name.endswith(("bias", "sinks")):
                yield name, torch.ones(shape, dtype=torch.bfloat16)  # a norm
            else:
                scale = shape[-1] ** -0.5 if len(shape) == 2 and "embed" not in name else 0.1
                yield name, _noise(shape, generator).mul_(scale)


def _tables(directory: Path) -> tuple[WeightTable, ForeignTable]:
    problems: list[str] = []
    if "DFlashDraftModel" in (directory / "config.json").read_text():
        draft = parse_draft(directory, (), problems, notes=[])
        assert draft is not None, problems
        return draft.weights(), draft_names(draft, ())
    target = parse_target(directory, problems, notes=[])
    assert target is not None, problems
    return target.weights(), target_names(target)


def _shapes(spec: WeightSpec, layout: object, num_parts: int) -> list[tuple[int, ...]]:
    if layout is not None:
        return part_shapes(layout, spec.shape, num_parts)  # type: ignore[arg-type]
    return [part.shape for part in segment_specs(spec)] if num_parts > 1 else [spec.shape]


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Normal numbers; a million of them, repeated, as drawing billions takes minutes."""
    noise = torch.randn((1 << 20) - 1, generator=generator).bfloat16()
    count = math.prod(shape)
    return noise.repeat(count // len(noise) + 1)[:count].view(shape)


def generate(engine: Path) -> None:
    """Texts with and without drafts, deterministic so that rounding cannot tell them apart, as JSON on stdout."""
    from dflash_trt.core.request import SamplingParams
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.executor.opening import max_draft_len
    from dflash_trt.serving.llm import LLM

    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    result = {}
    for name, num_draft_tokens in (("autoregressive", 0), ("speculative", None)):
        started = time.monotonic()
        options = {
            "draft_length": max_draft_len(EngineDir.open(engine)) if num_draft_tokens is None else num_draft_tokens
        }
        with LLM(engine, device="cpu", kv_cache_bytes=1 << 28, deterministic=True, **options) as llm:
            opened = time.monotonic()
            (output,) = llm.generate([PROMPT], sampling)
        seconds = {"open_s": round(opened - started, 1), "generate_s": round(time.monotonic() - opened, 1)}
        result[name] = {"token_ids": output.token_ids, **seconds}
    print(json.dumps(result))


def _measured(words: list[str]) -> tuple[str, int, float]:
    """What a command printed, its peak of resident memory in bytes, and its seconds; ends this process if it fails."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(words)}: exit code {process.returncode}\n{printed}")
    return printed, usage.ru_maxrss * 1024, time.monotonic() - started


def main(pair: str, work: Path) -> None:
    directories = {"target": pair, "drafter": PAIRS[pair]}
    for role, name in directories.items():
        if not (work / name).is_dir():
            print(f"writing a {role} in the layout of {name}", flush=True)
            write_checkpoint(work / name, CONFIGS / f"{name}.json")
    shards = [file.stat().st_size for name in directories.values() for file in (work / name).glob("*.safetensors")]
    checkpoints = [word for role, name in directories.items() for word in (f"--{role}", str(work / name))]
    engine = work / f"{pair}-engine"
    words = ["dflash_trt.cli.main", "build", *checkpoints, "-o", str(engine), "--overwrite", "--max-seq-len", "4096"]
    _, build_bytes, build_s = _measured(words)
    engine_bytes = sum(file.stat().st_size for file in engine.rglob("*") if file.is_file())
    printed, open_bytes, _ = _measured(["scripts.full_size_check", "--generate", str(engine)])
    result = json.loads(printed)
    texts = {tuple(text["token_ids"]) for text in result.values()}
    print(f"checkpoints {sum(shards) / 1e9:.1f} GB in {len(shards)} shards, the largest {max(shards) / 1e9:.2f} GB")
    print(f"build: {build_s:.0f} s, peak {build_bytes / 1e9:.2f} GB; the engine takes {engine_bytes / 1e9:.1f} GB")
    print(f"open and {2 * NUM_TOKENS} tokens: peak {open_bytes / 1e9:.2f} GB")
    for name, text in result.items():
        print(f"{name}: opened in {text['open_s']} s, {NUM_TOKENS} tokens in {text['generate_s']} s")
    print("texts are equal" if len(texts) == 1 else f"texts differ: {texts}")
    is_small = build_bytes - max(shards) <= MAX_OVER_SHARD_BYTES and open_bytes <= MAX_OPEN_BYTES
    sys.exit(0 if is_small and len(texts) == 1 else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--generate"]:
        generate(Path(sys.argv[2]))
    elif len(sys.argv) < 2 or sys.argv[1] not in PAIRS:
        sys.exit(__doc__)
    else:
        main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "build/full_size"))
