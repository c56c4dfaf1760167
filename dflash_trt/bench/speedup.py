"""Engines of one target with their drafters, against each other and no drafter, in alternating runs of one process.

Ratios are taken within a round, so that a machine that slows down for a while slows all sides of it.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from dflash_trt.bench.acceptance import (
    Acceptance,
    Counts,
    acceptance,
    accepted_by_category,
    accepted_by_group,
    counts_of_texts,
    ratio_interval,
)
from dflash_trt.bench.conversation import Conversation
from dflash_trt.bench.intervals import Interval, speedup_interval
from dflash_trt.bench.progress import Progress
from dflash_trt.core.acceptance import specdec_bench_acceptance_length
from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.request import GenerationOutput, SamplingParams, TokenEvent
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import resolved_config, with_one_draft_length
from dflash_trt.serving.llm import LLM

_MIN_PROMPTS = 10
_MAX_ERROR = 0.05  # of an acceptance length: half of its interval, relative

Answers = Sequence[GenerationOutput]  # of a conversation, turn by turn


@dataclass(frozen=True, kw_only=True, slots=True)
class SideReport:
    """One side at one temperature. `algorithm` None is autoregressive decoding, the reference for speed and texts.

    Medians over rounds; `speedup` is the median of the rounds' ratios of tokens per second. Intervals are over prompts,
    that of the speedup over rounds, too. `acceptance_ratio` is the acceptance length over that
    of the first drafter. `by_context_len` has the tokens before a step as LOW-HIGH. Sampled texts, which are of all
    rounds, have no `num_equal_texts`. `specdec_bench_acceptance_length` counts as that harness does.
    `distinct_4gram_fraction` is over each text's own 4-grams of token ids, mean over texts: near 0 is a loop, 1 repeats
    nothing.
    """

    name: str
    algorithm: str | None
    engine_dir: str
    num_draft_tokens: int
    temperature: float
    num_prompts: int
    mean_prompt_tokens: float
    output_tok_per_s: float
    speedup: float
    speedup_interval: Interval
    speedup_by_round: tuple[float, ...]
    acceptance: Acceptance | None
    acceptance_ratio: float | None
    acceptance_ratio_interval: Interval | None
    acceptance_by_category: Mapping[str, Acceptance]
    acceptance_by_context_len: Mapping[str, Acceptance]
    specdec_bench_acceptance_length: float | None
    num_texts: int
    num_equal_texts: int | None
    distinct_4gram_fraction: float

    @property
    def label(self) -> str:
        """The side's name with its settings."""
        side = self.name if self.algorithm is None else f"{self.algorithm}, K = {self.num_draft_tokens} ({self.name})"
        return f"{side}, T = {self.temperature:g}" if self.temperature else side


def compare(
    engine_dirs: Mapping[str, Path],
    conversations: Sequence[Conversation],
    sampling: SamplingParams,
    *,
    temperatures: Sequence[float],
    config: RuntimeConfig,
    concurrency: int,
    num_rounds: int,
    progress: Progress,
) -> list[SideReport]:
    """Run every prompt on every side, `num_rounds` times each, after one round that is not counted.

    `engine_dirs` are by name. Sampled texts of a round have seeds of that round. A side is opened for its turn alone,
    so that the others' idle threads cannot disturb it. Prefix caching is off: nothing may be cheaper for having been
    asked before.

    Raises:
        ConfigError: an engine has no drafter, or another target than the first; it cannot run with `config`; or a
            prompt cannot run.
    """
    engines = {name: EngineDir.open(path) for name, path in engine_dirs.items()}
    raise_all(ConfigError, "bench speedup", _problems(list(engines.values())))
    drafted = config.replaced(enable_prefix_caching=False)
    for engine in engines.values():
        resolved_config(engine, drafted)  # refuses before any side has run
    sides = [_Side("autoregressive", next(iter(engines.values())), drafted.without_drafter())]
    sides += [_Side(name, engine, with_one_draft_length(drafted, engine)) for name, engine in engines.items()]
    runs = list(product(range(num_rounds + 1), sides, temperatures))
    for index, (round_index, side, temperature) in enumerate(runs, start=1):
        run = side.run(conversations, replace(sampling, temperature=temperature), concurrency, seed=round_index)
        if round_index:
            side.runs.setdefault(temperature, []).append(run)
        name = f"{side.name}, T = {temperature:g}" if temperature else side.name
        progress(index, len(runs), f"round {round_index}, {name}: {run.tok_per_s:.0f} tok/s")
    return [
        _report(side, temperature, conversations, plain=sides[0], first=sides[1])
        for temperature in temperatures
        for side in sides
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All conversations once. `seconds` are those of each group that ran together."""

    answers: tuple[Answers, ...]
    seconds: tuple[float, ...]

    @property
    def outputs(self) -> list[GenerationOutput]:
        return [output for answers in self.answers for output in answers]

    @property
    def tok_per_s(self) -> float:
        return sum(len(output.token_ids) for output in self.outputs) / sum(self.seconds)


class _Side:
    """An engine under one config, and its counted runs by temperature."""

    def __init__(self, name: str, engine: EngineDir, config: RuntimeConfig) -> None:
        self.name = name
        self.engine = engine
        self.config = config
        self.runs: dict[float, list[Run]] = {}

    @property
    def num_draft_tokens(self) -> int:
        return resolved_config(self.engine, self.config).max_draft_tokens

    @property
    def algorithm(self) -> str | None:
        draft = self.engine.manifest.draft
        return draft.algorithm if draft is not None and self.config.use_drafter else None

    def run(
        self, conversations: Sequence[Conversation], sampling: SamplingParams, concurrency: int, *, seed: int
    ) -> Run:
        with LLM(self.engine.path, self.config.replaced(seed=seed)) as llm:
            return run_conversations(llm, conversations, sampling, concurrency)

    def texts(self, temperature: float) -> Sequence[Run]:
        """Runs that differ: greedy ones are the same."""
        return self.runs[temperature] if temperature else self.runs[temperature][-1:]

    def outputs(self, temperature: float) -> list[GenerationOutput]:
        return [output for run in self.texts(temperature) for output in run.outputs]

    def steps(self, temperature: float) -> list[list[TokenEvent]]:
        """Those of each conversation, in all its texts."""
        texts = zip(*(run.answers for run in self.texts(temperature)), strict=True)
        return [[step for turns in answers for output in turns for step in output.steps] for answers in texts]

    def counts(self, temperature: float) -> list[Counts]:
        """A row of each conversation."""
        return counts_of_texts(self.steps(temperature))


def _report(
    side: _Side, temperature: float, conversations: Sequence[Conversation], *, plain: _Side, first: _Side
) -> SideReport:
    runs, plain_runs = side.runs[temperature], plain.runs[temperature]
    ratios = tuple(ours.tok_per_s / theirs.tok_per_s for ours, theirs in zip(runs, plain_runs, strict=True))
    outputs, plain_outputs = side.outputs(temperature), plain.outputs(temperature)
    equal = [ours.token_ids == theirs.token_ids for ours, theirs in zip(outputs, plain_outputs, strict=True)]
    is_drafted, categories = side is not plain, [conversation.category for conversation in conversations]
    counts = side.counts(temperature) if is_drafted else []
    first_counts = first.counts(temperature) if is_drafted else []
    found, reference = acceptance(counts), acceptance(first_counts)
    return SideReport(
        name=side.name,
        algorithm=side.algorithm,
        engine_dir=str(side.engine.path),
        num_draft_tokens=side.num_draft_tokens if is_drafted else 0,
        temperature=temperature,
        num_prompts=len(conversations),
        mean_prompt_tokens=statistics.fmean(output.num_prompt_tokens for output in outputs),
        output_tok_per_s=statistics.median(run.tok_per_s for run in runs),
        speedup=statistics.median(ratios),
        speedup_interval=speedup_interval([run.seconds for run in plain_runs], [run.seconds for run in runs]),
        speedup_by_round=ratios,
        acceptance=found,
        acceptance_ratio=found.length / reference.length if found and reference else None,
        acceptance_ratio_interval=ratio_interval(counts, first_counts) if found and reference else None,
        acceptance_by_category=accepted_by_category(categories, counts) if is_drafted else {},
        acceptance_by_context_len=_by_context_len(side, temperature) if is_drafted else {},
        specdec_bench_acceptance_length=specdec_bench_acceptance_length(outputs) if is_drafted else None,
        num_texts=len(outputs),
        num_equal_texts=None if temperature else sum(equal),
        distinct_4gram_fraction=statistics.fmean(distinct_fraction(output.token_ids) for output in outputs),
    )


def _by_context_len(side: _Side, temperature: float) -> dict[str, Acceptance]:
    """By the number of tokens before a step: from a power of 2 to below the next."""
    texts = side.steps(temperature)
    sizes = sorted({step.context_len.bit_length() for steps in texts for step in steps if step.num_candidates})
    groups = {
        f"{1 << size - 1}-{(1 << size) - 1}": counts_of_texts(
            [[step for step in steps if step.context_len.bit_length() == size] for steps in texts]
        )
        for size in sizes
    }
    return accepted_by_group(groups)


def sample_warnings(reports: Sequence[SideReport]) -> list[str]:
    """Where there are too few prompts to say."""
    num_prompts = reports[0].num_prompts
    if num_prompts < _MIN_PROMPTS:
        return [f"{num_prompts} prompts are too few for intervals over prompts: use {_MIN_PROMPTS} or more"]
    found = []
    for report in reports:
        if report.acceptance is None:
            continue
        interval = report.acceptance.length_interval
        error = (interval.high - interval.low) / 2 / report.acceptance.length
        if error > _MAX_ERROR:
            needed = math.ceil(num_prompts * (error / _MAX_ERROR) ** 2)  # it falls with the root of their number
            found.append(
                f"{report.label}: the acceptance length is known within {error:.0%}; "
                f"about {needed} prompts would give {_MAX_ERROR:.0%}"
            )
        ratio = report.acceptance_ratio_interval
        if ratio is not None and report.acceptance_ratio != 1 and ratio.contains(1):
            found.append(
                f"{report.label}: these prompts do not tell its acceptance length from the first drafter's "
                f"(ratio {ratio})"
            )
    return found


def run_conversations(
    llm: LLM, conversations: Sequence[Conversation], sampling: SamplingParams, concurrency: int
) -> Run:
    """All conversations, `concurrency` at a time, prefill included. Warms up first. Raises ConfigError."""
    warm_up = replace(sampling, max_new_tokens=min(8, sampling.max_new_tokens))
    _answers(llm, conversations[:concurrency], warm_up)
    answers: list[Answers] = []
    seconds = []
    for start in range(0, len(conversations), concurrency):
        started = time.perf_counter()
        answers += _answers(llm, conversations[start : start + concurrency], sampling)
        seconds.append(time.perf_counter() - started)
    return Run(answers=tuple(answers), seconds=tuple(seconds))


def _answers(llm: LLM, conversations: Sequence[Conversation], sampling: SamplingParams) -> list[list[GenerationOutput]]:
    """Turn by turn, those of all conversations together. Raises ConfigError for a prompt that cannot run."""
    answers: list[list[GenerationOutput]] = [[] for _ in conversations]
    for turn in range(max(conversation.num_requests for conversation in conversations)):
        left = [index for index, conversation in enumerate(conversations) if turn < conversation.num_requests]
        told = [[answer.text or "" for answer in answers[index]] for index in left]
        prompts = [conversations[index].prompt_after(said) for index, said in zip(left, told, strict=True)]
        outputs = llm.generate(prompts, sampling)
        for index, output in zip(left, outputs, strict=True):
            if output.error is not None:
                raise ConfigError(f"a prompt cannot run: {output.error}")
            answers[index].append(output)
    return answers


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
