"""One rank's shard of an engine, as rank 0 and its workers open it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch
from torch import Tensor, distributed

from dflash_trt.backends.base import EngineExecutor, backend_name, backend_of
from dflash_trt.backends.torch.process_group import ProcessRanks, StoreAddress
from dflash_trt.core.array import Array
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.runtime_config import Device, RuntimeConfig
from dflash_trt.core.step_plan import StepResult
from dflash_trt.executor.threads import run_in_thread

if TYPE_CHECKING:
    from dflash_trt.engine_dir import EngineDir


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardOptions:
    """Options that are equal on all ranks. `config` has its device and threads resolved."""

    num_ranks: int
    rendezvous: Path | StoreAddress  # a new file, or a store for several nodes
    config: RuntimeConfig
    timeout_s: float  # for one collective
    load_timeout_s: float  # until all ranks have loaded their weights
    draft_lens: tuple[int, ...] | None
    has_own_requests: bool = False  # each rank: see `Mapping.dp_size`

    @property
    def num_local_ranks(self) -> int:
        """Ranks of each node, whose numbers are adjacent."""
        return self.num_ranks // self.config.nnodes


class ShardExecutor(EngineExecutor, Protocol):
    """The executor of one rank, which can also return logits, unless it is TensorRT's."""

    def target_logits(self, token_ids: Sequence[int]) -> Tensor: ...

    @property
    def place_files(self) -> dict[bool, int]:
        """Descriptors of the host tier's memory, which rank 0 maps: of pages, and with True of snapshots."""
        ...


def join(options: ShardOptions, rank: int, address: str) -> ProcessRanks:
    """Join the process group, on the rank's GPU of its node, which the others reach at `address`.

    Raises ExchangeError if other ranks do not join.
    """
    device = torch.device("cpu")
    if options.config.device == "cuda":
        device = torch.device("cuda", rank % options.num_local_ranks)
        torch.cuda.set_device(device)
    return ProcessRanks.join(
        options.rendezvous,
        rank=rank,
        num_ranks=options.num_ranks,
        device=device,
        timeout_s=options.timeout_s,
        opening_timeout_s=options.load_timeout_s,
        address=address,
    )


def check_devices(num_ranks: int, device: Device) -> None:
    """Raises ConfigError: this machine has fewer GPUs than ranks, or a PyTorch without gloo or NCCL."""
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and num_gpus < num_ranks:
        hint = f'Build the engine with tp_size {num_gpus} or less, use more nodes, or use device "cpu".'
        expected = f"at most {num_gpus}, the number of GPUs"
        raise ConfigError.about("ranks", expected=expected, found=str(num_ranks), hint=hint)
    can_join = distributed.is_available() and (device == "cpu" or distributed.is_nccl_available())
    if not can_join:
        library = "NCCL" if device == "cuda" else "gloo"
        hint = "Install a PyTorch that has it, or build the engine with tp_size 1."
        raise ConfigError.about("PyTorch", expected=f"torch.distributed with {library}", found="none", hint=hint)


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
