"""Verifies the kernels of an engine as a program; `scripts/verify_kernels` starts it on a GPU made of software.

    python -m software_gpu.verification.verify ENGINE [--json FILE]

A few layers of the engine (`cut`), at their full sizes and with their weights, compute prompts and verify steps on the
CPU and from the PTX of the kernels that its GPU would be given: once with the asynchronous work of kernels done at the
last moment that their waits allow, once at the first. Both sides get the same tokens and drafts in every step.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch

from dflash_trt.backends.sequence_batch import sequence_batch, sequence_batches
from dflash_trt.core.batch import RequestResult, StepBatch, run_batch
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import open_executor
from software_gpu.runtime.library import software_cuda
from software_gpu.verification.cut import write_cut

PROMPT_LENS: Final = (3, 70, 200)
NUM_VERIFY_STEPS: Final = 4  # behind each prompt
PAGE_BYTES: Final = 1 << 28
# Of the largest logit, by the engine's dtype: sums in another order, rounded to the dtype at every layer.
MAX_DIFFERENCES: Final = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}


@dataclass(kw_only=True)
class Agreement:
    """Tokens and drafts of both sides in equal steps; the difference of their logits is of the largest one."""

    tokens: int = 0
    equal_tokens: int = 0
    drafts: int = 0
    equal_drafts: int = 0
    largest_logit_difference: float = 0.0

    def add_step(self, expected: RequestResult, found: RequestResult) -> None:
        self.tokens += len(expected.emitted_tokens)
        self.equal_tokens += _num_equal(expected.emitted_tokens, found.emitted_tokens)
        self.drafts += len(expected.draft_tokens)
        self.equal_drafts += _num_equal(expected.draft_tokens, found.draft_tokens)

    def add_logits(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        difference = (expected - found).abs().max() / expected.abs().max()
        worst = float(difference.nan_to_num(torch.inf))
        self.largest_logit_difference = max(self.largest_logit_difference, worst)


def _num_equal(expected: Sequence[int], found: Sequence[int]) -> int:
    return sum(a == b for a, b in zip(expected, found, strict=False))


class Sides:
    """Two executors of one engine that run the same steps of one sequence."""

    def __init__(self, expecting: Any, finding: Any) -> None:
        self._executors = (expecting, finding)
        self.limits = expecting.limits
        self.agreement = Agreement()

    def compare(self, prompt: Sequence[int]) -> None:
        """A prompt in chunks, and verify steps of what the first side has emitted and drafted."""
        logits = [executor.target_logits(prompt).float().cpu() for executor in self._executors]
        self.agreement.add_logits(*logits)
        for batch in sequence_batches(prompt, self.limits):
            results = self._run(replace(batch, num_draft_tokens=self.limits.max_draft_len))
        self.agreement.add_step(*results)
        num_tokens = len(prompt)
        for _ in range(NUM_VERIFY_STEPS):
            last = results[0]
            num_tokens += len(last.emitted_tokens)
            results = self._run(self._verify_batch(last, context_len=num_tokens - 1))
            self.agreement.add_step(*results)

    def _verify_batch(self, last: RequestResult, *, context_len: int) -> StepBatch:
        batch = sequence_batch(
            (last.emitted_tokens[-1], *last.draft_tokens),
            page_size=self.limits.page_size,
            context_len=context_len,
            num_draft_tokens=self.limits.max_draft_len,
            page_windows=self.limits.page_windows,
        )
        (row,) = batch.requests
        return replace(batch, requests=(replace(row, num_candidates=len(last.draft_tokens)),))

    def _run(self, batch: StepBatch) -> list[RequestResult]:
        return [run_batch(executor, batch)[0] for executor in self._executors]


def verified(path: Path) -> dict[str, Any]:
    """The report of an engine directory of backend torch."""
    cuda = software_cuda()
    with TemporaryDirectory(prefix="verify-kernels-") as directory, ExitStack() as stack:
        engine, cut = write_cut(EngineDir.open(path), Path(directory))
        executors = []
        for device in ("cpu", "cuda"):
            executors.append(open_executor(engine, RuntimeConfig(device=device, kv_cache_bytes=PAGE_BYTES)))
            stack.callback(executors[-1].close)
        sides = Sides(*executors)
        for is_late in (True, False):
            os.environ["SOFTWARE_GPU_LATE"] = str(int(is_late))  # software_gpu/runtime/kernels.cpp reads it at a launch
            for prompt in _prompts(engine):
                sides.compare(prompt)
        dtype = engine.manifest.pretrained_config.dtype
        return {
            "engine": str(path),
            "gpu": torch.cuda.get_device_name(),
            "layers": {"target": cut.target, "draft": cut.draft},
            "dtype": dtype,
            **vars(sides.agreement),
            "max_logit_difference": MAX_DIFFERENCES[dtype],
            "launches": _launches(cuda.counts()),
            "problems": cuda.problems,
        }


def _prompts(engine: EngineDir) -> Iterator[list[int]]:
    random, limits = np.random.default_rng(0), engine.manifest.build_config
    most = limits.max_seq_len - (NUM_VERIFY_STEPS + 1) * (limits.max_draft_len + 1)
    for length in PROMPT_LENS:
        yield random.integers(0, engine.manifest.target.vocab_size, max(1, min(length, most))).tolist()


def _launches(counts: Mapping[str, int]) -> dict[str, int]:
    """Of each kernel, in graphs and without."""
    found: dict[str, int] = {}
    for name, count in counts.items():
        kind, _, kernel = name.removeprefix("in graphs: ").partition(" ")
        if kind == "kernel":
            found[kernel] = found.get(kernel, 0) + count
    return dict(sorted(found.items()))


def missed(report: Mapping[str, Any]) -> list[str]:
    """What an engine is held to and does not reach."""
    found = [f"{len(report['problems'])} problems"] if report["problems"] else []
    if report["largest_logit_difference"] > report["max_logit_difference"]:
        found.append(f"logits differ by {report['largest_logit_difference']:.2g} of the largest")
    if report["dtype"] == "float32":
        found += [
            f"{report[what] - report[f'equal_{what}']} of {report[what]} {what} differ"
            for what in ("tokens", "drafts")
            if report[what] != report[f"equal_{what}"]
        ]
    return found


def _reported(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines for people."""
    target, draft = (", ".join(map(str, report["layers"][role])) or "none" for role in ("target", "draft"))
    yield f"{report['engine']} on {report['gpu']}: layers {target} of the target, {draft} of the drafter"
    yield f"kernels: {len(report['launches'])}, {sum(report['launches'].values())} launches"
    yield (
        f"equal to the CPU's: {report['equal_tokens']} of {report['tokens']} tokens, {report['equal_drafts']} of "
        f"{report['drafts']} drafts; logits within {report['largest_logit_difference']:.2g} of the largest"
    )
    yield from report["problems"]
    found = missed(report)
    yield "verified" if not found else f"NOT verified: {', '.join(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/verify_kernels")
    parser.add_argument("engine", type=Path, metavar="ENGINE", help="an engine directory of backend torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here, too")
    options = parser.parse_args()
    report = verified(options.engine)
    sys.stdout.write("\n".join([*_reported(report), ""]))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(bool(missed(report)))


if __name__ == "__main__":
    main()
