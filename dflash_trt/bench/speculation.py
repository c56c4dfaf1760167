"""Speculative against plain autoregressive decoding: same engine, same code, same process, alternating runs.

Ratios are taken within a round, so that a machine that slows down for a while slows both sides of it.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.bench.distinct import distinct_fraction
from dflash_trt.core.acceptance import acceptance_length, accepted_fractions, specdec_bench_acceptance_length
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.prompts import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationReport:
    """Medians over rounds. `speedup` is the median of the rounds' ratios of tokens per second.

    `acceptance_length` counts the bonus; that of specdec_bench is by the harness's counting. `distinct_4gram_fraction`
    is over each text's own 4-grams of token ids, mean over texts: near 0 is a loop, 1 repeats nothing.
    """

    num_prompts: int
    max_new_tokens: int
    concurrency: int
    num_rounds: int
    num_draft_tokens: int
    autoregressive_tok_per_s: float
    speculative_tok_per_s: float
    speedup: float
    speedup_by_round: tuple[float, ...]
    acceptance_length: float | None
    specdec_bench_acceptance_length: float | None
    accepted_fraction_by_position: tuple[float, ...]
    has_equal_tokens: bool
    num_equal_texts: int
    distinct_4gram_fraction: float


def compare(
    engine_dir: Path,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    config: RuntimeConfig,
    concurrency: int,
    num_rounds: int,
    progress: Callable[[str], None],
) -> SpeculationReport:
    """Run every prompt with and without the drafter, `num_rounds` times each, after one round that is not counted.

    Each side is opened for its turn alone, so that neither has idle threads of the other beside it. Prefix caching is
    off: nothing may be cheaper for having been asked before.
    """
    drafted = config.replaced(enable_prefix_caching=False)
    undrafted = drafted.without_drafter()
    speeds: list[tuple[float, float]] = []
    for round_index in range(num_rounds + 1):
        with LLM(engine_dir, undrafted) as plain:
            expected, plain_speed = run_prompts(plain, prompts, sampling, concurrency)
        with LLM(engine_dir, drafted) as speculative:
            num_drafts = speculative.config.max_draft_tokens
            outputs, speculative_speed = run_prompts(speculative, prompts, sampling, concurrency)
        progress(f"round {round_index}: {plain_speed:.0f} tok/s plain, {speculative_speed:.0f} tok/s speculative")
        if round_index:
            speeds.append((plain_speed, speculative_speed))
    num_equal = sum(a.token_ids == b.token_ids for a, b in zip(expected, outputs, strict=True))
    ratios = tuple(speculative_speed / plain_speed for plain_speed, speculative_speed in speeds)
    return SpeculationReport(
        num_prompts=len(prompts),
        max_new_tokens=sampling.max_new_tokens,
        concurrency=concurrency,
        num_rounds=num_rounds,
        num_draft_tokens=num_drafts,
        autoregressive_tok_per_s=statistics.median(speed for speed, _ in speeds),
        speculative_tok_per_s=statistics.median(speed for _, speed in speeds),
        speedup=statistics.median(ratios),
        speedup_by_round=ratios,
        acceptance_length=acceptance_length(outputs),
        specdec_bench_acceptance_length=specdec_bench_acceptance_length(outputs),
        accepted_fraction_by_position=accepted_fractions(outputs),
        has_equal_tokens=num_equal == len(prompts),
        num_equal_texts=num_equal,
        distinct_4gram_fraction=statistics.fmean(distinct_fraction(output.token_ids) for output in outputs),
    )


def run_prompts(
    llm: LLM, prompts: Sequence[Prompt], sampling: SamplingParams, concurrency: int
) -> tuple[list[GenerationOutput], float]:
    """All prompts, `concurrency` at a time; output tokens per second, prefill included. A warm-up goes first."""
    llm.generate(list(prompts[:concurrency]), replace(sampling, max_new_tokens=min(8, sampling.max_new_tokens)))
    outputs: list[GenerationOutput] = []
    started = time.perf_counter()
    for start in range(0, len(prompts), concurrency):
        outputs += llm.generate(list(prompts[start : start + concurrency]), sampling)
    elapsed_s = time.perf_counter() - started
    return outputs, sum(len(output.token_ids) for output in outputs) / elapsed_s
