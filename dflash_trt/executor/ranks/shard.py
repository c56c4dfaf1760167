"""One rank's shard of an engine, as rank 0 and its workers open it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.base import EngineExecutor, backend_name, backend_of
from dflash_trt.backends.torch.process_group import ProcessRanks
from dflash_trt.core.array import Array
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.step_plan import StepResult
from dflash_trt.executor.threads import run_in_thread

if TYPE_CHECKING:
    from dflash_trt.engine_dir import EngineDir


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardOptions:
    """Options that are equal on all ranks. `config` has its device and threads resolved."""

    num_ranks: int
    store_path: Path  # a new file for the rendezvous
    config: RuntimeConfig
    timeout_s: float  # for one collective
    load_timeout_s: float  # until all ranks have loaded their weights
    draft_lens: tuple[int, ...] | None


class ShardExecutor(EngineExecutor, Protocol):
    """The executor of one rank, which can also return logits, unless it is TensorRT's."""

    def target_logits(self, token_ids: Sequence[int]) -> Tensor: ...

    @property
    def place_files(self) -> dict[bool, int]:
        """Descriptors of the host tier's memory, which rank 0 maps: of pages, and with True of snapshots."""
        ...


def join(options: ShardOptions, rank: int) -> ProcessRanks:
    """Join the process group, on the rank's GPU. Raises ExchangeError if other ranks do not join."""
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


def open_shard(engine: EngineDir, rank: int, ranks: ProcessRanks, options: ShardOptions) -> ShardExecutor:
    """Load the rank's weights and agree on the pages; every rank calls it.

    Raises:
        ConfigError, CapacityError: see the executors' `open`.
        ExchangeError: another rank failed.
    """

    def open_rank() -> EngineExecutor:
        return backend.open(engine, options.config, rank=rank, ranks=ranks, draft_lens=options.draft_lens)

    backend = backend_of(backend_name(engine, options.config.device))
    executor = open_rank() if options.config.device == "cuda" else run_in_thread(open_rank)
    return cast(ShardExecutor, executor)


def fingerprint(outcome: StepResult | Tensor) -> bytes:
    """Hash an outcome; equal on ranks that computed the same bits."""
    if isinstance(outcome, Tensor):
        return hashlib.sha256(outcome.cpu().contiguous().view(torch.uint8).numpy().data).digest()
    columns = np.arange(outcome.emitted_tokens.shape[1])
    is_valid = columns <= outcome.num_accepted[:, None]
    is_valid &= ~np.logical_or.accumulate(np.isnan(outcome.emitted_logprobs) & is_valid, axis=1)
    num_valid = is_valid.sum(1)
    has_drafts = num_valid > outcome.num_accepted  # all logits gave a token
    parts = (
        num_valid,
        outcome.next_context_lens,
        np.where(is_valid, outcome.emitted_tokens, 0),
        np.where(is_valid, outcome.emitted_logprobs, 0),
        np.where(has_drafts[:, None], outcome.draft_tokens, 0),
        *_logprobs(outcome, is_valid),
    )
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).digest()


def _logprobs(outcome: StepResult, is_valid: Array) -> Iterator[Array]:
    """Log probabilities other than the emitted tokens'."""
    if outcome.top is not None:
        yield from (np.where(is_valid[:, :, None], part, 0) for part in (outcome.top.token_ids, outcome.top.logprobs))
    if outcome.prompt is not None:
        yield from (outcome.prompt.logprobs, outcome.prompt.top.token_ids, outcome.prompt.top.logprobs)
