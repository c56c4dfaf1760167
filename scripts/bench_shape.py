"""A pair of Qwen3-0.6B's shape with random weights on a CPU, and llama.cpp: a table of docs/benchmarks.md.

    OMP_NUM_THREADS=1 python -m scripts.bench_shape LLAMA_CPP_PYTHON [--rounds 5]

The weights say nothing of acceptance, so drafts are costs here: milliseconds of a plain step and of one that verifies K
drafts and makes K new ones, each with the drafter there or not, and what they give if 4 tokens a step are emitted.
Sides take turns within a round; CPU time, medians over rounds.
"""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.engine_dir import EngineDir
from scripts.bench_peers import LLAMA_CPP, llama_cpp
from scripts.bench_steps import opened, step_of
from scripts.full_size_check import CONFIGS, write_checkpoint

_DIRECTORY = Path("build/shape")
_PARTS = {"target": "Qwen3-0.6B", "drafter": "Qwen3-0.6B-DFlash"}
_KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 with the head": {"dtype": "bfloat16", "quantization": {"target": "int8", "lm_head": "int8"}},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int4, the head int8": {"dtype": "bfloat16", "quantization": {"target": "int4", "lm_head": "int8"}},
}
_CONTEXT_LEN, _NUM_TOKENS, _ACCEPTANCE_LENGTH = 32, 8, 4
_PROMPT = [17 * i % 151000 for i in range(_CONTEXT_LEN)]


def engine_of(kind: str) -> EngineDir:
    path = _DIRECTORY / kind
    if not path.exists():
        for name in _PARTS.values():
            if not (_DIRECTORY / name).exists():
                write_checkpoint(_DIRECTORY / name, CONFIGS / f"{name}.json")
        config = BuildConfig.model_validate(_PARTS | _KINDS[kind] | {"max_seq_len": 1024})
        build_engine(
            config, path, base_dir=_DIRECTORY, overwrite=False, command=(__file__,), progress=lambda progress: None
        )
    return EngineDir.open(path)


def sides_of(engine: EngineDir) -> dict[str, Callable[[], float]]:
    """Steps of one request, which give their CPU time in milliseconds."""
    executors = {
        has_drafter: opened(engine, has_kernels=True, use_drafter=has_drafter) for has_drafter in (False, True)
    }
    return {
        "plain step": step_of(executors[False], 1, _CONTEXT_LEN),
        "verify step": step_of(executors[True], None, _CONTEXT_LEN),
        "the target's part of it": step_of(executors[False], executors[True].limits.max_draft_len + 1, _CONTEXT_LEN),
    }


@click.command()
@click.argument("python", type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", default=5, show_default=True)
def main(python: Path, rounds: int) -> None:
    """PYTHON has llama-cpp-python: see scripts/install_llama_cpp."""
    ours = {kind: sides_of(engine_of(kind)) for kind in _KINDS}
    times: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        peers = {
            name: stack.enter_context(llama_cpp(python, _DIRECTORY / _PARTS["target"], kind, _NUM_TOKENS, 1))
            for name, kind in LLAMA_CPP.items()
        }
        for index in range(rounds + 2):  # the second time is recorded, and none of the two counts
            found = {(kind, step): run() for kind, steps in ours.items() for step, run in steps.items()}
            found |= {(name, "plain step"): 1e3 * side(_PROMPT).cpu_s / _NUM_TOKENS for name, side in peers.items()}
            for key, taken_ms in found.items() if index > 1 else ():
                times.setdefault(key, []).append(taken_ms)
    medians = {key: statistics.median(taken) for key, taken in times.items()}
    columns = ("plain step", "tok/s", "verify step", "the target's part of it", "tok/s at 4 a step")
    print(f"| | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for kind in ours:
        plain, verify, part = (medians[kind, step] for step in ours[kind])
        cells = (plain, 1e3 / plain, verify, part, 1e3 * _ACCEPTANCE_LENGTH / verify)
        print(f"| {kind} | {' | '.join(f'{value:.1f}' for value in cells)} |")
    for name in peers:
        plain = medians[name, "plain step"]
        print(f"| {name} | {plain:.1f} | {1e3 / plain:.1f} | | | |")


if __name__ == "__main__":
    main()
