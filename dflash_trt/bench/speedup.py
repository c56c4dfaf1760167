"""Engines of one target with their drafters, against each other and no drafter, in alternating runs of one process.

Ratios are taken within a round, so that a machine that slows down for a while slows all sides of it.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.core.acceptance import (
    acceptance_length,
    acceptance_length_interval,
    accepted_fractions,
    specdec_bench_acceptance_length,
)
from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import resolved_config, with_one_draft_length
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.prompts import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class SideReport:
    """One side. `algorithm` None is autoregressive decoding, the reference for speed and texts.

    Medians over rounds; `speedup` is the median of the rounds' ratios of tokens per second. `acceptance_length` counts
    the bonus, `acceptance_length_interval` is its 95% interval over prompts; `specdec_bench` counts as that harness
    does. `distinct_4gram_fraction` is over each text's own 4-grams of token ids, mean over texts: near 0 is a loop, 1
    repeats nothing.
    """

    algorithm: str | None
    engine_dir: str
    num_draft_tokens: int
    num_prompts: int
    output_tok_per_s: float
    speedup: float
    speedup_by_round: tuple[float, ...]
    acceptance_length: float | None
    acceptance_length_interval: tuple[float, float] | None
    acceptance_length_by_category: dict[str, float]
    specdec_bench_acceptance_length: float | None
    accepted_fraction_by_position: tuple[float, ...]
    num_equal_texts: int
    distinct_4gram_fraction: float


def compare(
    engine_dirs: Sequence[Path],
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    config: RuntimeConfig,
    concurrency: int,
    num_rounds: int,
    categories: Sequence[str | None] = (),
    progress: Callable[[str], None],
) -> list[SideReport]:
    """Run every prompt on every side, `num_rounds` times each, after one round that is not counted.

    `categories` are those of the prompts. A side is opened for its turn alone, so that the others' idle threads cannot
    disturb it. Prefix caching is off: nothing may be cheaper for having been asked before.

    Raises:
        ConfigError: an engine has no drafter, or another target than the first; or it cannot run with `config`.
    """
    engines = [EngineDir.open(path) for path in engine_dirs]
    raise_all(ConfigError, "bench speedup", _problems(engines))
    drafted = config.replaced(enable_prefix_caching=False)
    for engine in engines:
        resolved_config(engine, drafted)  # refuses before any side has run
    sides = [_Side(engines[0], drafted.without_drafter(), algorithm=None)]
    sides += [
        _Side(engine, with_one_draft_length(drafted, engine), algorithm=engine.manifest.draft.algorithm)
        for engine in engines
        if engine.manifest.draft is not None
    ]
    for round_index in range(num_rounds + 1):
        for side in sides:
            side.run(prompts, sampling, concurrency, is_counted=round_index > 0)
            progress(f"round {round_index}: {side.algorithm or 'autoregressive'} {side.last_tok_per_s:.0f} tok/s")
    return [side.report(sides[0], categories) for side in sides]


class _Side:
    """An engine under one config, and what came of its runs."""

    def __init__(self, engine: EngineDir, config: RuntimeConfig, *, algorithm: str | None) -> None:
        self.algorithm = algorithm
        self.last_tok_per_s = 0.0
        self._path, self._config = engine.path, config
        self._num_draft_tokens = 0
        self._outputs: list[GenerationOutput] = []
        self._tok_per_s: list[float] = []

    def run(self, prompts: Sequence[Prompt], sampling: SamplingParams, concurrency: int, *, is_counted: bool) -> None:
        with LLM(self._path, self._config) as llm:
            self._num_draft_tokens = llm.config.max_draft_tokens
            self._outputs, self.last_tok_per_s = run_prompts(llm, prompts, sampling, concurrency)
        if is_counted:
            self._tok_per_s.append(self.last_tok_per_s)

    def report(self, first: "_Side", categories: Sequence[str | None]) -> SideReport:
        ratios = tuple(ours / theirs for ours, theirs in zip(self._tok_per_s, first._tok_per_s, strict=True))
        pairs = zip(self._outputs, first._outputs, strict=True)
        is_drafted = self.algorithm is not None
        return SideReport(
            algorithm=self.algorithm,
            engine_dir=str(self._path),
            num_draft_tokens=self._num_draft_tokens if is_drafted else 0,
            num_prompts=len(self._outputs),
            output_tok_per_s=statistics.median(self._tok_per_s),
            speedup=statistics.median(ratios),
            speedup_by_round=ratios,
            acceptance_length=acceptance_length(self._outputs) if is_drafted else None,
            acceptance_length_interval=acceptance_length_interval(self._outputs) if is_drafted else None,
            acceptance_length_by_category=self._by_category(categories) if is_drafted else {},
            specdec_bench_acceptance_length=specdec_bench_acceptance_length(self._outputs) if is_drafted else None,
            accepted_fraction_by_position=accepted_fractions(self._outputs) if is_drafted else (),
            num_equal_texts=sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs),
            distinct_4gram_fraction=statistics.fmean(distinct_fraction(output.token_ids) for output in self._outputs),
        )

    def _by_category(self, categories: Sequence[str | None]) -> dict[str, float]:
        outputs: dict[str, list[GenerationOutput]] = {}
        for category, output in zip(categories, self._outputs, strict=False):
            if category is not None:
                outputs.setdefault(category, []).append(output)
        lengths = {name: acceptance_length(outputs[name]) for name in sorted(outputs)}
        return {name: length for name, length in lengths.items() if length is not None}


def run_prompts(
    llm: LLM, prompts: Sequence[Prompt], sampling: SamplingParams, concurrency: int
) -> tuple[list[GenerationOutput], float]:
    """All prompts, `concurrency` at a time; output tokens per second, prefill included. Warms up first."""
    llm.generate(list(prompts[:concurrency]), replace(sampling, max_new_tokens=min(8, sampling.max_new_tokens)))
    outputs: list[GenerationOutput] = []
    started = time.perf_counter()
    for start in range(0, len(prompts), concurrency):
        outputs += llm.generate(list(prompts[start : start + concurrency]), sampling)
    elapsed_s = time.perf_counter() - started
    return outputs, sum(len(output.token_ids) for output in outputs) / elapsed_s


def distinct_fraction(token_ids: Sequence[int], *, length: int = 4) -> float:
    """Different n-grams of a text over all its n-grams; 1 for a text too short to have any."""
    grams = [tuple(token_ids[i : i + length]) for i in range(len(token_ids) - length + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _problems(engines: Sequence[EngineDir]) -> list[str]:
    first, found = engines[0].manifest, []
    for engine in engines:
        manifest = engine.manifest
        if manifest.draft is None:
            hint = "Leave it out: the first engine also runs without its drafter."
            found.append(problem(str(engine.path), expected="an engine with a drafter", found="none", hint=hint))
        hint = f"Build it as {engines[0].path} was."
        for name, own, expected in (
            ("backend", manifest.backend, first.backend),
            ("dtype", manifest.pretrained_config.dtype, first.pretrained_config.dtype),
        ):
            if own != expected:
                found.append(problem(f"{engine.path} {name}", expected=expected, found=own, hint=hint))
        if manifest.target != first.target:
            found.append(
                problem(
                    f"{engine.path} target", expected=f"the target of {engines[0].path}", found="another", hint=hint
                )
            )
    return found
