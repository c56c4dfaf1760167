"""The demo pair as a user could run it instead: this engine, transformers, PyPI dflash and llama.cpp, in alternation.

One request at a time, greedy, float32. For each prompt the sides run one after the other, so that a machine that slows
down for a while slows all of them; ratios are taken within a prompt. Beside the time that passes there is the CPU time
of the process, which other processes disturb less. Every side in float32 must give the same token ids; those whose
products are rounded, llama.cpp but for f32 and the engines of `--rounded`, have their equal texts counted.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_DEMO: Final = Path(__file__).resolve().parents[1] / "dflash_trt" / "demo"
_DRAFT_LENGTH: Final = 7  # all that the demo's drafter makes, as its peers do
_OURS: Final = ("autoregressive", "speculative")
_REFERENCE: Final = "transformers"
LLAMA_CPP: Final = {f"llama.cpp {kind}": kind for kind in ("f32", "f16", "q8_0", "q4_0")}
_ROUNDED: Final = tuple(name for name, kind in LLAMA_CPP.items() if kind != "f32")  # other products than float32's


class Answer(NamedTuple):
    """New tokens of one prompt, and what they took."""

    tokens: list[int]
    wall_s: float
    cpu_s: float


Side = Callable[[Sequence[int]], Answer]  # of a prompt
Answers = dict[str, list[Answer]]  # of every prompt, by side


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True), default=Path("build/demo"))
@click.option("--num-prompts", default=16, show_default=True, help="Held-out prompts.")
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Runs of every prompt on every side, all counted.")
@click.option("--threads", default=1, show_default=True, help="Intra-op threads of every side.")
@click.option(
    "--draft-length", default=_DRAFT_LENGTH, show_default=True, help="Drafts in a step of the speculative side."
)
@click.option(
    "--rounded",
    "rounded_engines",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="An engine of the pair in bfloat16 or fewer bits, to be timed with and without drafts; repeatable.",
)
@click.option(
    "--llama-cpp",
    "llama_cpp_python",
    type=click.Path(path_type=Path, exists=True),
    help="A Python that has llama-cpp-python.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def main(
    engine: Path,
    num_prompts: int,
    max_new_tokens: int,
    rounds: int,
    threads: int,
    draft_length: int,
    rounded_engines: tuple[Path, ...],
    llama_cpp_python: Path | None,
    as_json: bool,
) -> None:
    """Time the demo pair on every side; ENGINE is built from it in float32."""
    os.environ.update(dict.fromkeys(_THREADS, str(threads)))  # before PyTorch starts its threads
    import torch

    torch.set_num_threads(threads)
    with ExitStack() as stack:
        sides, tokenize = stack.enter_context(_sides((engine, *rounded_engines), max_new_tokens, threads, draft_length))
        for name, kind in LLAMA_CPP.items() if llama_cpp_python else ():
            peer = llama_cpp(llama_cpp_python, _DEMO / "target", kind, max_new_tokens, threads)
            sides[name] = stack.enter_context(peer)
        prompts = [tokenize(prompt) for prompt in _held_out(num_prompts)]
        for side in sides.values():  # warm-up
            side(prompts[0])
        answers = _alternating(sides, prompts * rounds, rounded=[name for name in sides if ": " in name])
    report = _report(answers, max_new_tokens) | {
        "num_prompts": num_prompts,
        "max_new_tokens": max_new_tokens,
        "num_rounds": rounds,
        "num_threads": threads,
        "draft_length": draft_length,
        "versions": {name: version(name) for name in ("torch", "transformers", "dflash", "dflash-trt")},
        "python": platform.python_version(),
    }
    click.echo(json.dumps(report) if as_json else _table(report))


def _alternating(sides: dict[str, Side], prompts: Sequence[Sequence[int]], *, rounded: Sequence[str] = ()) -> Answers:
    """Every prompt on every side. Exits when the texts of float32 differ."""
    answers: Answers = {name: [] for name in sides}
    for index, prompt in enumerate(prompts):
        for name, side in sides.items():
            answers[name].append(side(prompt))
        expected = answers[_REFERENCE][-1].tokens
        exact = [name for name in sides if name not in (*_ROUNDED, *rounded)]
        different = [name for name in exact if answers[name][-1].tokens != expected]
        if different:
            sys.exit(f"prompt {index}: {', '.join(different)} gave other tokens than transformers")
    return answers


def _report(answers: Answers, max_new_tokens: int) -> dict[str, Any]:
    """Medians over prompts and rounds; a ratio is the median of the ratios within one prompt and round."""
    peers = [name for name in answers if name not in _OURS]

    def ratios(ours: str, clock: str) -> dict[str, float]:
        def ratio(peer: str) -> float:
            pairs = zip(answers[ours], answers[peer], strict=True)
            return statistics.median(getattr(b, clock) / getattr(a, clock) for a, b in pairs)

        return {peer: ratio(peer) for peer in peers}

    expected = [answer.tokens for answer in answers[_REFERENCE]]
    return {
        "tok_per_s": {
            name: max_new_tokens / statistics.median(answer.wall_s for answer in of_side)
            for name, of_side in answers.items()
        },
        "equal_texts": {
            name: sum(answer.tokens == tokens for answer, tokens in zip(of_side, expected, strict=True))
            for name, of_side in answers.items()
        },
        "num_texts": len(expected),
        "speedup": {ours: ratios(ours, "wall_s") for ours in _OURS},
        "cpu_time_speedup": {ours: ratios(ours, "cpu_s") for ours in _OURS},
    }


def _table(report: dict[str, Any]) -> str:
    """A row for each side; ratios of ours to it, by the clock and by CPU time."""
    columns = ("tok/s", "equal texts", *(f"{ours} / it{by}" for by in ("", ", CPU time") for ours in _OURS))
    rows = [f"| | {' | '.join(columns)} |", "|---" + "|---:" * len(columns) + "|"]
    for name, speed in report["tok_per_s"].items():
        ratios = [report[kind][ours].get(name) for kind in ("speedup", "cpu_time_speedup") for ours in _OURS]
        cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        equal = f"{report['equal_texts'][name]} of {report['num_texts']}"
        rows.append(f"| {name} | {speed:.0f} | {equal} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _held_out(num_prompts: int) -> list[str]:
    from scripts.train_demo.prompts import held_out_prompts

    return held_out_prompts(num_prompts)


@contextmanager
def _sides(
    engines: Sequence[Path], max_new_tokens: int, threads: int, draft_length: int
) -> Iterator[tuple[dict[str, Side], Callable[[str], list[int]]]]:
    """Every side in this process by name, a later engine's with its name before it, and the tokenizer of all."""
    from transformers import AutoTokenizer

    from dflash_trt import LLM, SamplingParams

    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)

    def ours(llm: LLM) -> Side:
        return _timed(lambda prompt: list(llm.generate([list(prompt)], sampling)[0].token_ids))

    options: dict[str, Any] = {"num_threads": threads, "enable_prefix_caching": False, "kv_cache_bytes": 1 << 28}
    drafting: list[dict[str, Any]] = [{"use_drafter": False}, {"draft_length": draft_length}]
    with ExitStack() as stack:
        sides = _peers(max_new_tokens)
        for engine in engines:
            prefix = "" if engine == engines[0] else f"{engine.name}: "
            for name, choice in zip(_OURS, drafting, strict=True):
                sides[prefix + name] = ours(stack.enter_context(LLM(engine, **choice, **options)))
        tokenizer = AutoTokenizer.from_pretrained(_DEMO / "target")
        yield sides, lambda text: list(tokenizer(text)["input_ids"])


def _timed(generate: Callable[[Sequence[int]], list[int]]) -> Side:
    def answer(prompt: Sequence[int]) -> Answer:
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        tokens = generate(prompt)
        return Answer(tokens, time.perf_counter() - started_s, time.process_time() - started_cpu_s)

    return answer


@contextmanager
def llama_cpp(python: Path, checkpoint: Path, kind: str, max_new_tokens: int, threads: int) -> Iterator[Side]:
    """llama.cpp on a Qwen3 target, in a process of its own, which sleeps while the other sides run."""
    peer = Path(__file__).with_name("llama_cpp_peer.py")
    command = [str(python), str(peer), str(checkpoint), kind, str(threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        requests, replies = process.stdin, process.stdout

        def reply() -> dict[str, Any]:
            if not (line := replies.readline()):
                sys.exit(f"llama.cpp ended; run {' '.join(command)} to see why")
            found: dict[str, Any] = json.loads(line)
            return found

        def answer(prompt: Sequence[int]) -> Answer:
            requests.write(json.dumps({"prompt": list(prompt), "max_new_tokens": max_new_tokens}) + "\n")
            requests.flush()
            return Answer(**reply())

        reply()  # its version, when it has loaded the model
        yield answer


def _peers(max_new_tokens: int) -> dict[str, Side]:
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

    return {"transformers": _timed(transformers_tokens), "dflash": _timed(dflash_tokens)}


if __name__ == "__main__":
    main()
