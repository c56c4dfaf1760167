"""The plan of an engine on equal GPUs: each rank's memory, the pages that fit, and memory lacking.

Weights, pages and limits come from the functions of a build and of an opened engine, so that they are the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_trt.backends.base import backend_of
from dflash_trt.backends.page_budget import (
    GPU_FREE_MEMORY_FRACTION,
    TENSORRT_FREE_MEMORY_FRACTION,
    PagePlan,
    plan_engine_pages,
    step_sizes,
)
from dflash_trt.backends.page_groups import PageNeeds
from dflash_trt.backends.tensorrt.sizes import rank_sizes
from dflash_trt.checkpoint.specs import PairSpecs
from dflash_trt.compile.description import EngineDescription, describe_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import CapacityError, ConfigError
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig
from dflash_trt.engine_dir.manifest import rank_weight_bytes
from dflash_trt.plan.gpus import GPUS_PER_NODE, Gpu
from dflash_trt.plan.rank_memory import RankMemory, rank_memory
from dflash_trt.plan.step_floor import Step, StepFloor, step_floor


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """A described engine with a GPU for each rank.

    `pages` is None if one max_seq_len sequence does not fit.
    """

    engine: EngineDescription
    gpu: Gpu
    memory: RankMemory
    pages: PagePlan | None
    free_fraction: float  # share of `free_bytes` for pages
    notes: tuple[str, ...]

    @property
    def pretrained_config(self) -> PretrainedConfig:
        return self.engine.pretrained_config

    @property
    def build_config(self) -> EngineLimits:
        return self.engine.build_config

    @property
    def free_bytes(self) -> int:
        """Memory that is free when the pages are planned; negative where the weights alone are too large."""
        return self.gpu.memory_bytes - self.memory.before_pages_bytes

    @property
    def left_bytes(self) -> int:
        """Memory that nothing takes; negative where something has no room."""
        pages = self.pages
        pages_bytes = 0 if pages is None else pages.total_bytes + pages.slot_bytes + pages.snapshot_bytes
        return self.free_bytes - pages_bytes - self.memory.after_pages_bytes

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0

    @property
    def missing_bytes(self) -> int:
        """Memory that each GPU lacks, for the pages of one max_seq_len sequence or for the largest step.

        The former come in addition to all slots; the latter in addition to the pages, which take their fraction of the
        free memory, and no more than full batches need.
        """
        after = self.memory.after_pages_bytes
        full_bytes = self.full_batch_bytes + self.slot_bytes + self._max_snapshot_bytes
        beside_pages = min(after / (1 - self.free_fraction), after + full_bytes)
        needed_bytes = (self.sequence_bytes + self.slot_bytes) / self.free_fraction
        return max(0, math.ceil(max(needed_bytes, beside_pages)) - self.free_bytes)

    @property
    def slot_bytes(self) -> int:
        """Recurrent states of all slots, including the padding slot, on each rank."""
        return self.pretrained_config.states().bytes_per_slot * (self.build_config.max_batch_size + 1)

    @property
    def _max_snapshot_bytes(self) -> int:
        """Snapshots of recurrent states that an engine of the back end `torch` takes by default at most."""
        return self.pretrained_config.states().bytes_per_slot * self.build_config.max_batch_size

    @property
    def sequence_bytes(self) -> int:
        """Pages of one sequence of max_seq_len, on each rank."""
        return self._page_needs.bytes_of(1)

    @property
    def full_batch_bytes(self) -> int:
        """Pages of max_batch_size sequences of max_seq_len, on each rank."""
        return self._page_needs.bytes_of(self.build_config.max_batch_size)

    @property
    def _page_needs(self) -> PageNeeds:
        limits = self.build_config
        return PageNeeds(
            states=self.pretrained_config.states(),
            page_size=limits.page_size,
            max_batch_size=limits.max_batch_size,
            max_seq_len=limits.max_seq_len,
            steps=step_sizes(limits),
        )

    def num_pages(self, num_tokens: int) -> int:
        """Pages of a sequence."""
        return -(-num_tokens // self.build_config.page_size)

    def max_requests(self, context_len: int) -> int:
        """Requests of `context_len` tokens that can run together, on all ranks."""
        pages = self.pages
        if pages is None:
            return 0
        most = min(self.build_config.max_batch_size, pages.num_pages // self.num_pages(context_len))
        most = min(most, pages.num_windows) if pages.page_windows else most
        return most * self.pretrained_config.mapping.dp_size

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of all requests that the pages hold; 0 where one sequence has no room."""
        num_tokens = 0 if self.pages is None else self.pages.num_tokens
        return num_tokens * self.pretrained_config.mapping.dp_size

    def floor(self, step: Step, *, has_drafter: bool) -> StepFloor:
        return step_floor(self.pretrained_config, self.gpu, step, has_drafter=has_drafter)


def plan_engine(config: BuildConfig, pair: PairSpecs, gpu: Gpu) -> EnginePlan:
    """Plan the engine that `config` describes, with a GPU like this for each rank.

    Raises:
        ConfigError: a limit, a format or the number of ranks is wrong, or the GPU does not compute in a format.
        BuildError: the back end cannot run the pair.
    """
    if config.backend == "tensorrt_llm":
        hint = "Plan the engine of backend torch or tensorrt; TensorRT-LLM takes its memory by rules of its own."
        raise ConfigError.about("plan", expected="backend torch or tensorrt", found=config.backend, hint=hint)
    backend, is_torch = backend_of(config.backend), config.backend == "torch"
    described = describe_engine(
        config, pair, unsupported=backend.unsupported, subject=backend.subject, capability=gpu.capability
    )
    pretrained, limits = described.pretrained_config, described.build_config
    memory = rank_memory(
        pretrained,
        limits,
        weights_bytes=_weights_bytes(pretrained) if is_torch else rank_sizes(pretrained, limits).plan_bytes,
        multiprocessors=gpu.num_multiprocessors,
        has_pages_last=not is_torch,
    )
    fraction = GPU_FREE_MEMORY_FRACTION if is_torch else TENSORRT_FREE_MEMORY_FRACTION
    free_bytes = max(0, gpu.memory_bytes - memory.before_pages_bytes)
    return EnginePlan(
        engine=described,
        gpu=gpu,
        memory=memory,
        pages=_pages(described, free_bytes, fraction),
        free_fraction=fraction,
        notes=(
            *described.notes,
            *pair.notes,
            *_latent_notes(pretrained),
            *_node_notes(pretrained),
            *(_refusals(pretrained) if is_torch else ()),
        ),
    )


def _latent_notes(config: PretrainedConfig) -> Iterator[str]:
    """Cost of pages that every rank holds in full."""
    states, num_ranks = config.states(), config.mapping.tp_size
    if states.replicated_bytes_per_token and num_ranks > 1:
        other = "ranks with requests of their own (--attention-dp)" if config.target.moes else "replicas on fewer ranks"
        other = f"{other}, or ranks that divide positions (--dcp-size {num_ranks}),"
        copied, whole = states.replicated_bytes_per_token / 1024, states.bytes_per_token / 1024
        yield (
            f"latent pages are whole on every rank: {copied:.1f} KiB of each token's {whole:.1f} KiB a rank, "
            f"{num_ranks * copied:.1f} KiB on {num_ranks} ranks; {other} hold more tokens"
        )


def _node_notes(config: PretrainedConfig) -> Iterator[str]:
    """More ranks than a node has GPUs."""
    num_ranks = config.mapping.world_size
    if num_ranks > GPUS_PER_NODE:
        yield (
            f"{num_ranks} ranks are more than the {GPUS_PER_NODE} GPUs of a node. Sums over nodes take their network, "
            "which is not planned: times are those of one NVLink domain. Where an engine fits one, replicas give more"
        )


def _refusals(config: PretrainedConfig) -> Iterator[str]:
    """Errors that opening the engine on a GPU would raise."""
    from dflash_trt.backends.cuda.backend import model_problems

    for problem in model_problems(config.target, config.draft):
        yield f"opened on a GPU, this engine is refused: {problem}"


def _weights_bytes(config: PretrainedConfig) -> int:
    return sum(sum(by_format.values()) for by_format in rank_weight_bytes(config).values())


def _pages(engine: EngineDescription, free_bytes: int, fraction: float) -> PagePlan | None:
    try:
        return plan_engine_pages(engine, RuntimeConfig(), free_bytes=lambda: free_bytes, default_fraction=fraction)
    except CapacityError:
        return None
