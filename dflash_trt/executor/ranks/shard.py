"""One rank's share of an engine, opened: what rank 0 and its workers have in common.

Knows which device and how many threads a rank gets; refuses to know who starts the ranks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dflash_trt.backends.page_budget import PagePlan
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.backends.torch.process_group import ProcessRanks
from dflash_trt.core.batch import StepBatch, StepResult
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.executor.threads import run_in_thread

if TYPE_CHECKING:
    from dflash_trt.core.batch import ExecutorLimits
    from dflash_trt.engine_dir import EngineDir


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareOptions:
    """What every rank is told alike. `config` has its device and threads resolved."""

    num_ranks: int
    store_path: Path  # a file that does not exist yet, through which the ranks meet
    config: RuntimeConfig
    timeout_s: float  # of one exchange between ranks
    load_timeout_s: float  # in which all of them have loaded their weights
    draft_lens: tuple[int, ...] | None


class ShareExecutor(Protocol):
    """What a rank runs: the torch executor of its device."""

    limits: ExecutorLimits
    page_plan: PagePlan

    def step(self, batch: StepBatch) -> StepResult: ...

    def target_logits(self, token_ids: Sequence[int]) -> Tensor: ...

    def close(self) -> None: ...


def join(options: ShareOptions, rank: int) -> ProcessRanks:
    """Meet the others; a rank has the GPU of its number. Raises ExchangeError when they do not come."""
    device = torch.device("cuda", rank) if options.config.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return ProcessRanks.join(
        options.store_path,
        rank=rank,
        num_ranks=options.num_ranks,
        device=device,
        timeout_s=options.timeout_s,
        opening_timeout_s=options.load_timeout_s,
    )


def open_shard(engine: EngineDir, rank: int, ranks: ProcessRanks, options: ShareOptions) -> ShareExecutor:
    """Load the rank's weights and agree on the pages; every rank calls it.

    Raises:
        ConfigError, CapacityError: see the executors' `open`.
        ExchangeError: another rank failed.
    """
    if options.config.device == "cuda":
        from dflash_trt.backends.cuda.executor import TorchGpuExecutor

        return TorchGpuExecutor.open(
            engine, options.config, rank=rank, ranks=ranks, draft_lens=options.draft_lens, device=ranks.device
        )
    return run_in_thread(lambda: TorchExecutor.open(engine, options.config, rank=rank, ranks=ranks))


def fingerprint(outcome: StepResult | Tensor) -> bytes:
    """Equal for ranks that computed the same bits, in practice for no others."""
    if isinstance(outcome, Tensor):
        return hashlib.sha256(outcome.cpu().contiguous().view(torch.uint8).numpy().data).digest()
    integers, logprobs = array("q"), array("d")
    for row in outcome.requests:
        integers.extend((*row.emitted_tokens, row.num_accepted, *row.draft_tokens, row.next_context_len))
        integers.append(-1 if row.non_finite_position is None else row.non_finite_position)
        logprobs.extend(row.logprobs)
    return hashlib.sha256(integers.tobytes() + logprobs.tobytes()).digest()
