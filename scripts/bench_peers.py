"""The demo pair as a user could run it instead: this engine, transformers and PyPI dflash, in alternation.

One request at a time, greedy, float32. For each prompt the sides run one after the other, so that a machine that slows
down for a while slows all of them; ratios are taken within a prompt. Beside the time that passes there is the CPU time
of the process, which other processes disturb less. Every side must give the same token ids.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import click

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_DEMO: Final = Path(__file__).resolve().parents[1] / "dflash_trt" / "demo"
_DRAFT_LENGTH: Final = 7  # all that the demo's drafter makes, as its peers do
_PEERS: Final = ("transformers", "dflash")
_OURS: Final = ("autoregressive", "speculative")

Generate = Callable[[Sequence[int]], list[int]]  # prompt -> new tokens
Seconds = dict[str, list[tuple[float, float]]]  # wall time, CPU time of every prompt, by side


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True), default=Path("build/demo"))
@click.option("--num-prompts", default=16, show_default=True, help="Held-out prompts.")
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Runs of every prompt on every side, all counted.")
@click.option("--threads", default=1, show_default=True, help="Intra-op threads of every side.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def main(engine: Path, num_prompts: int, max_new_tokens: int, rounds: int, threads: int, as_json: bool) -> None:
    """Time the demo pair on every side; ENGINE is built from it in float32."""
    os.environ.update(dict.fromkeys(_THREADS, str(threads)))  # before PyTorch starts its threads
    import torch

    torch.set_num_threads(threads)
    with _sides(engine, max_new_tokens, threads) as (sides, tokenize):
        prompts = [tokenize(prompt) for prompt in _held_out(num_prompts)]
        for generate in sides.values():  # warm-up
            generate(prompts[0])
        seconds = _alternating(sides, prompts * rounds)
    report = _report(seconds, max_new_tokens) | {
        "num_prompts": num_prompts,
        "max_new_tokens": max_new_tokens,
        "num_rounds": rounds,
        "num_threads": threads,
        "versions": {name: version(name) for name in ("torch", "transformers", "dflash", "dflash-trt")},
        "python": platform.python_version(),
    }
    click.echo(json.dumps(report) if as_json else _table(report))


def _alternating(sides: dict[str, Generate], prompts: Sequence[Sequence[int]]) -> Seconds:
    """Every prompt on every side. Exits when the texts differ."""
    seconds: Seconds = {name: [] for name in sides}
    for index, prompt in enumerate(prompts):
        texts: dict[str, list[int]] = {}
        for name, generate in sides.items():
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            texts[name] = generate(prompt)
            seconds[name].append((time.perf_counter() - started_s, time.process_time() - started_cpu_s))
        different = [name for name in sides if texts[name] != texts["transformers"]]
        if different:
            sys.exit(f"prompt {index}: {', '.join(different)} gave other tokens than transformers")
    return seconds


def _report(seconds: Seconds, max_new_tokens: int) -> dict[str, Any]:
    """Medians over prompts and rounds; a ratio is the median of the ratios within one prompt and round."""

    def ratios(ours: str, clock: int) -> dict[str, float]:
        return {
            peer: statistics.median(b[clock] / a[clock] for a, b in zip(seconds[ours], seconds[peer], strict=True))
            for peer in _PEERS
        }

    return {
        "tok_per_s": {
            name: max_new_tokens / statistics.median(wall_s for wall_s, _ in times) for name, times in seconds.items()
        },
        "speedup": {ours: ratios(ours, 0) for ours in _OURS},
        "cpu_time_speedup": {ours: ratios(ours, 1) for ours in _OURS},
    }


def _table(report: dict[str, Any]) -> str:
    columns = ("tok/s", "times transformers", "times dflash", "by CPU time: transformers", "dflash")
    rows = [f"| | {' | '.join(columns)} |", "|---" + "|---:" * len(columns) + "|"]
    for name, speed in report["tok_per_s"].items():
        kinds = [report[kind].get(name, {}) for kind in ("speedup", "cpu_time_speedup")]
        cells = [f"{ratios[peer]:.2f}" if ratios else "" for ratios in kinds for peer in _PEERS]
        rows.append(f"| {name} | {speed:.0f} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _held_out(num_prompts: int) -> list[str]:
    from scripts.train_demo.prompts import held_out_prompts

    return held_out_prompts(num_prompts)


@contextmanager
def _sides(
    engine: Path, max_new_tokens: int, threads: int
) -> Iterator[tuple[dict[str, Generate], Callable[[str], list[int]]]]:
    """Every side by name, and the tokenizer of all of them."""
    from transformers import AutoTokenizer

    from dflash_trt import LLM, SamplingParams

    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)

    def ours(llm: LLM) -> Generate:
        return lambda prompt: list(llm.generate([list(prompt)], sampling)[0].token_ids)

    options: dict[str, Any] = {"num_threads": threads, "enable_prefix_caching": False, "kv_cache_bytes": 1 << 28}
    with (
        LLM(engine, use_drafter=False, **options) as plain,
        LLM(engine, draft_length=_DRAFT_LENGTH, **options) as speculative,
    ):
        sides = _peers(max_new_tokens) | {"autoregressive": ours(plain), "speculative": ours(speculative)}
        tokenizer = AutoTokenizer.from_pretrained(_DEMO / "target")
        yield sides, lambda text: list(tokenizer(text)["input_ids"])


def _peers(max_new_tokens: int) -> dict[str, Generate]:
    """`generate` of transformers and the loop of PyPI dflash, on the demo's own checkpoints."""
    import torch
    from dflash.model import DFlash2DraftModel, dflash_generate
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(_DEMO / "target", dtype=torch.float32).eval()
    draft = DFlash2DraftModel.from_pretrained(_DEMO / "drafter", dtype=torch.float32).eval()

    def transformers_tokens(prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=None,
            )
        return list(output[0, len(prompt) :].tolist())

    def dflash_tokens(prompt: Sequence[int]) -> list[int]:
        with torch.inference_mode():
            output = dflash_generate(draft, target, torch.tensor([prompt]), max_new_tokens, None)
        return list(output[0, len(prompt) :].tolist())

    return {"transformers": transformers_tokens, "dflash": dflash_tokens}


if __name__ == "__main__":
    main()
