"""The best engine of a pair for a goal: layout, format, batch and K, by the steady state of a closed load.

Of B requests on a replica with prompts of P and answers of O tokens, a round is B prompts and O / A steps of B
requests, A the acceptance length of K. It gives B x O tokens, and each request its O tokens meanwhile. `sweep` steps
through the same load; a test compares both. With replicas that only compute prompts, the others take blocks of K/V
in place of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Final

import numpy as np

from dflash_trt.checkpoint.specs import PairSpecs
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import DFlashError
from dflash_trt.core.expert_exchange import exchange_costs
from dflash_trt.core.quantization import QuantizationConfig
from dflash_trt.plan.computed_rows import ComputedRows
from dflash_trt.plan.gpus import GPUS_PER_NODE
from dflash_trt.plan.planning import EnginePlan, plan_engine
from dflash_trt.plan.step_costs import StepClock
from dflash_trt.plan.step_work import EngineWork
from dflash_trt.simulation.acceptance import AcceptanceByPosition
from dflash_trt.simulation.load import Lengths
from dflash_trt.simulation.sweep import layout_name, ranks_name

_BATCH_SIZES: Final = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
_FORMATS: Final = ("fp8", "nvfp4")  # that a checkpoint without a format may take
_WORTH: Final = 1.02  # another K is named where it gives this much more
_PREFILL_MIN_TOKENS: Final = 512  # as `serve --prefill-min-tokens`
_MAX_BUSY: Final = 0.9  # part of the time that prefill workers compute, at most
_MARGIN: Final = 1.1  # what layouts that no GPU has run must gain to be the choice
# Bytes per second of blocks of K/V between host and GPU (PCIe 5.0: 16 lanes of 32 GT/s), and into files in memory and
# out of them: threads of a worker on a large host, each as fast as one of an AMD EPYC (`scripts/block_rates.py`).
_LINK_RATE: Final = 64e9
_NUM_THREADS: Final = 8
_WRITE_RATE: Final = _NUM_THREADS * 1.6e9
_READ_RATE: Final = _NUM_THREADS * 2.1e9
TRANSFER_NOTE: Final = (
    f"K/V go from prefill workers through files, which {_NUM_THREADS} threads of a worker write at "
    f"{_WRITE_RATE / 1e9:.1f} GB/s and read at {_READ_RATE / 1e9:.1f}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Of `num_gpus`: the most tok/s with this speed for each user and this time to the first token at least.

    With a `throughput` in tok/s of all GPUs: the highest speed for each user at which they make as much.
    """

    num_gpus: int
    lengths: Lengths
    per_user: float | None = None
    time_to_first_token_s: float | None = None
    throughput: float | None = None

    def is_met(self, speed: Speed) -> bool:
        return (
            (self.per_user is None or speed.tok_per_s_per_user >= self.per_user)
            and (self.time_to_first_token_s is None or speed.time_to_first_token_s <= self.time_to_first_token_s)
            and (self.throughput is None or speed.output_tok_per_s >= self.throughput)
        )

    def value(self, speed: Speed) -> float:
        """What is the most of the best one."""
        return speed.output_tok_per_s if self.throughput is None else speed.tok_per_s_per_user


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Of `num_requests` on each replica. `output_tok_per_s` is the sum over replicas."""

    num_requests: int
    num_draft_tokens: int
    acceptance_length: float
    output_tok_per_s: float
    tok_per_s_per_user: float
    time_to_first_token_s: float


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks, groups of experts, replicas and format of an engine. Without `has_drafter` it decodes autoregressively.

    `num_prefill_workers` of the replicas compute prompts for the others.
    """

    made: EnginePlan
    clock: StepClock
    acceptance: AcceptanceByPosition | None
    lengths: Lengths
    num_replicas: int
    format: str | None
    num_prefill_workers: int = 0
    _seconds: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return layout_name(self.made.pretrained_config.mapping, self.num_replicas)

    @property
    def is_untried(self) -> bool:
        """No GPU has run prefill workers, or ranks with requests of their own."""
        return self.num_prefill_workers > 0 or self._groups_per_replica > 1

    @property
    def prompt_bytes(self) -> int:
        """K/V of a prompt on one rank."""
        pages = self.made.pages
        return 0 if pages is None else self.lengths.num_prompt_tokens * pages.bytes_per_token

    @property
    def has_drafter(self) -> bool:
        return self.acceptance is not None

    @cached_property
    def max_draft_len(self) -> int:
        return min(self.made.build_config.max_draft_len, len(self.acceptance.fractions)) if self.acceptance else 0

    @cached_property
    def max_requests(self) -> int:
        """At once in a group of requests, with room for whole answers."""
        return self.made.max_requests(self.lengths.total) // self._groups_per_replica

    @property
    def _groups_per_replica(self) -> int:
        """Its ranks with requests of their own."""
        return self.made.pretrained_config.mapping.dp_size

    def batch_sizes(self) -> list[int]:
        most = self.max_requests
        return sorted({most, *(size for size in _BATCH_SIZES if size <= most)} - {0})

    def best_k(self, num_requests: int, before: int = 0) -> Speed:
        """With the smallest K that gives nearly the most, or with `before` where that does."""
        most_rows = self.made.build_config.max_num_tokens // num_requests - 1
        speeds = [self.speed(num_requests, k) for k in range(min(self.max_draft_len, most_rows) + 1)]
        most = max(speed.output_tok_per_s for speed in speeds)
        near = [speed for speed in speeds if speed.output_tok_per_s * _WORTH >= most]
        return next((speed for speed in near if speed.num_draft_tokens == before), near[0])

    @cached_property
    def by_batch_size(self) -> dict[int, Speed]:
        """The best K of each batch size, changed from one size to the next where it is worth it."""
        found: dict[int, Speed] = {}
        before = 0
        for size in self.batch_sizes():
            found[size] = self.best_k(size, before)
            before = found[size].num_draft_tokens
        return found

    def draft_lengths(self) -> dict[int, int]:
        """K by the number of requests from which it holds, as `--draft-length` takes it."""
        found: dict[int, int] = {}
        for size, speed in self.by_batch_size.items():
            if not found or speed.num_draft_tokens != next(reversed(found.values())):
                found[size] = speed.num_draft_tokens
        return found

    def speed(self, num_requests: int, num_draft_tokens: int) -> Speed:
        """Of as many requests in each group of a replica that answers."""
        prompt, output = self.lengths.num_prompt_tokens, self.lengths.num_output_tokens
        length = 1.0 if self.acceptance is None else self.acceptance.acceptance_length(num_draft_tokens)
        step_s = self._step_s(num_requests, num_draft_tokens + 1, prompt + output // 2, num_draft_tokens)
        decoding_s = output / min(length, output) * step_s
        if self.num_prefill_workers:
            coming_s, requests_per_s, first_s = self._prompts_apart(num_requests, decoding_s, num_draft_tokens)
        else:
            part = num_requests * min(length, output) / output
            coming_s, requests_per_s, first_s = self._prompts_between(num_requests, decoding_s, num_draft_tokens, part)
        return Speed(
            num_requests=num_requests,
            num_draft_tokens=num_draft_tokens,
            acceptance_length=length,
            output_tok_per_s=requests_per_s * output,
            tok_per_s_per_user=output / ((num_requests - 1) * coming_s + decoding_s),
            time_to_first_token_s=first_s + step_s,
        )

    def _prompts_between(
        self, num_requests: int, decoding_s: float, num_draft_tokens: int, part: float
    ) -> tuple[float, float, float]:
        """Seconds that a prompt takes from other requests, requests per second in all, seconds of a prompt alone.

        `part` of a rank's steps have a prompt. Ranks with requests of their own wait for the prompts of all of them,
        but for those in one step.
        """
        prompt_s = self._prompt_s(min(num_requests, self._prompts_of_a_step), num_draft_tokens)
        part = min(1.0, part)
        prompt_s *= (1 - (1 - part) ** self._groups_per_replica) / part
        num_groups = self.num_replicas * self._groups_per_replica
        per_s = num_groups * num_requests / (num_requests * prompt_s + decoding_s)
        return prompt_s, per_s, self._prompt_s(1, num_draft_tokens)

    def _prompts_apart(self, num_requests: int, decoding_s: float, num_draft_tokens: int) -> tuple[float, float, float]:
        """The same with prefill workers, which write blocks while they compute the next prompt."""
        num_workers = self.num_prefill_workers
        num_answering = self.num_replicas - num_workers
        num_bytes = self.prompt_bytes * self.made.pretrained_config.mapping.world_size  # all ranks share a file
        copy_s, write_s, read_s = self.prompt_bytes / _LINK_RATE, num_bytes / _WRITE_RATE, num_bytes / _READ_RATE
        together = max(1, min(num_requests * num_answering // num_workers, self._prompts_of_a_step))
        most_per_s = num_workers / max(self._prompt_s(together, num_draft_tokens) + copy_s, write_s)
        per_s = min(num_answering * num_requests / (num_requests * copy_s + decoding_s), _MAX_BUSY * most_per_s)
        last_part = min(1.0, self.made.build_config.max_num_tokens / self.lengths.num_prompt_tokens)
        first_s = self._prompt_s(1, num_draft_tokens) + last_part * write_s + read_s + 2 * copy_s
        return copy_s, per_s, first_s

    @property
    def _prompts_of_a_step(self) -> int:
        return max(1, self.made.build_config.max_num_tokens // self.lengths.num_prompt_tokens)

    def _prompt_s(self, num_prompts: int, num_draft_tokens: int) -> float:
        """Of each of so many prompts that are computed together, chunk by chunk where one fills a step."""
        prompt, most = self.lengths.num_prompt_tokens, self.made.build_config.max_num_tokens
        starts = range(0, prompt, most)
        chunks = [self._step_s(num_prompts, min(most, prompt - start), start, num_draft_tokens) for start in starts]
        return sum(chunks) / num_prompts

    def _step_s(self, num_requests: int, num_tokens: int, context: int, num_draft_tokens: int) -> float:
        key = (num_requests, num_tokens, context, num_draft_tokens)
        if key not in self._seconds:
            rows = ComputedRows(
                num_tokens=np.full(num_requests, num_tokens),
                context_lens=np.full(num_requests, context),
                num_draft_tokens=num_draft_tokens,
            )
            is_prompt = num_tokens > num_draft_tokens + 1  # of which other ranks seldom have one in the same step
            shared_tokens = num_requests * num_tokens if is_prompt else None
            self._seconds[key] = self.clock.time(self._work.of(rows, shared_tokens=shared_tokens)).total_s
        return self._seconds[key]

    @cached_property
    def _work(self) -> EngineWork:
        costs = exchange_costs(self.clock.gpu.capability)
        return EngineWork(self.made.pretrained_config, has_drafter=self.has_drafter, exchange_costs=costs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An engine at the batch and K that serve the goal best."""

    layout: Layout
    speed: Speed


def layouts(
    config: BuildConfig, pairs: Iterable[tuple[PairSpecs, AcceptanceByPosition | None]], clock: StepClock, goal: Goal
) -> tuple[list[Layout], list[str]]:
    """Every engine that fits the goal's GPUs, for each pair (with and without its drafter); and why others do not."""
    found: list[Layout] = []
    reasons: dict[str, list[str]] = {}
    combinations = (
        (pair, acceptance, name, ranks)
        for pair, acceptance in pairs
        for name, ranks in product(_formats(config, clock), _ranks(goal, pair, config))
    )
    for pair, acceptance, name, ranks in combinations:
        changes: dict[str, object] = {**ranks, **_format(config, name)}
        if acceptance is None:
            changes |= {"drafter": None, "max_draft_len": None, "drafter_overrides": {}}
        try:
            made = _largest_batch(config.model_copy(update=changes), pair, clock)
        except DFlashError as error:
            reason = next(reversed(str(error).splitlines()[:2])).strip(" -")
        else:
            if made is not None and made.max_requests(goal.lengths.total):
                layout = Layout(
                    made=made,
                    clock=clock,
                    acceptance=acceptance,
                    lengths=goal.lengths,
                    num_replicas=goal.num_gpus // made.pretrained_config.mapping.world_size,
                    format=name,
                )
                is_apart = goal.lengths.num_prompt_tokens >= _PREFILL_MIN_TOKENS and not ranks["attention_dp"]
                most = layout.num_replicas if is_apart else 1
                found += [replace(layout, num_prefill_workers=count) for count in range(most)]
                continue
            reason = "no room for a request"
        layout_words = ranks_name(config.model_copy(update=ranks).mapping)
        reasons.setdefault(reason, []).append(f"{layout_words}, {name or 'as stored'}")
    if goal.num_gpus > GPUS_PER_NODE:
        reasons["sums over nodes take their network, which is not planned"] = [f"more than {GPUS_PER_NODE} ranks"]
    return found, [f"{'; '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]


def choices(found: Sequence[Layout], goal: Goal) -> list[Choice]:
    """The best batch of each layout that meets the goal, the best layout first; what no GPU has run less a margin."""
    best = []
    for layout in found:
        met = [speed for speed in layout.by_batch_size.values() if goal.is_met(speed)]
        if met:
            best.append(Choice(layout=layout, speed=max(met, key=goal.value)))

    def rank(choice: Choice) -> float:
        return goal.value(choice.speed) / (_MARGIN if choice.layout.is_untried else 1.0)

    return sorted(best, key=rank, reverse=True)


def other_acceptance(choice: Choice, factor: float) -> Choice:
    """The same engine at the same batch where each draft is accepted `factor` times as often: its best K and speed."""
    layout = choice.layout
    assert layout.acceptance is not None
    changed = replace(layout, acceptance=_scaled(layout.acceptance, factor))
    speed = choice.speed
    return Choice(layout=changed, speed=changed.best_k(speed.num_requests, speed.num_draft_tokens))


def _scaled(acceptance: AcceptanceByPosition, factor: float) -> AcceptanceByPosition:
    fractions, before, reached = [], 1.0, 1.0
    for fraction in acceptance.fractions:
        reached *= min(1.0, factor * fraction / before) if before else 0.0
        fractions.append(reached)
        before = fraction
    return AcceptanceByPosition(tuple(fractions))


def _ranks(goal: Goal, pair: PairSpecs, config: BuildConfig) -> list[dict[str, int]]:
    """Ranks and groups of experts that the GPUs can be divided into, each within a node, as fields of BuildConfig."""
    sizes = [
        size
        for size in range(1, min(goal.num_gpus, GPUS_PER_NODE) + 1)
        if goal.num_gpus % size == 0 and size & (size - 1) == 0
    ]
    divided = [
        {"tp_size": size, "ep_size": ep_size, "attention_dp": False}
        for size in sizes
        for ep_size in dict.fromkeys((1, size))
    ]
    if config.backend != "torch":
        return divided
    if pair.target.moes:
        own_requests = [{"tp_size": size, "ep_size": size, "attention_dp": True} for size in sizes if size > 1]
    else:
        own_requests = []
    own_positions = [
        ranks | {"dcp_size": ranks["tp_size"]}
        for ranks in divided
        if pair.target.latents and ranks["tp_size"] > 1 and config.page_size % ranks["tp_size"] == 0
    ]
    return [*divided, *own_requests, *own_positions]


def _formats(config: BuildConfig, clock: StepClock) -> list[str | None]:
    """The checkpoint's or the one that was asked for, and others where neither is quantized."""
    quantization = config.quantization or QuantizationConfig()
    if quantization.target != "none":
        return [quantization.target]
    return [None, *(name for name in _FORMATS if clock.gpu.operand_bits(name) < 16)]


def _format(config: BuildConfig, name: str | None) -> dict[str, object]:
    if name is None:
        return {}
    quantization = config.quantization or QuantizationConfig()
    return {"quantization": quantization.model_copy(update={"target": name})}


def _largest_batch(config: BuildConfig, pair: PairSpecs, clock: StepClock) -> EnginePlan | None:
    """The plan with the largest power of two of requests, at most the config's, that fits."""
    size = 1 << (config.max_batch_size.bit_length() - 1)
    while size:
        made = plan_engine(config.model_copy(update={"max_batch_size": size}), pair, clock.gpu)
        if made.fits:
            return made
        if made.free_bytes < 0:  # the weights alone are too large
            return None
        size //= 2
    return None
