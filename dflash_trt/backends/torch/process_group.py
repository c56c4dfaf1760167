"""Collectives of ranks, over `torch.distributed`: sums, vocabulary shards, and rows for experts that all ranks share.

Every rank makes the same calls in the same order and gets the same bits.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, distributed

from dflash_trt.core.tcp import LOOPBACK, interface_of, limit_new_connections

_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_DIST: Any = distributed  # its groups and stores are untyped in PyTorch


class ExchangeError(RuntimeError):
    """Another rank has ended, or is late."""


class StoreAddress(NamedTuple):
    """Where a TCPStore of rank 0 listens."""

    host: str
    port: int


class RankGroup(Protocol):
    """The ranks that share one network."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def rank(self) -> int:
        """This one's number."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks; may be written into `x`."""
        ...

    def all_gather_columns(self, x: Tensor) -> Tensor:
        """[N, C] of each rank -> [N, ranks * C], rank 0's first."""
        ...

    def all_gather_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        """`num_rows[r]` rows of each rank r, [n, C] -> [sum, C], rank 0's first."""
        ...

    def reduce_scatter_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        """The sum over the ranks of [sum, C] -> the `num_rows[r]` rows of this one; may be written into `x`."""
        ...

    def all_to_all_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        """Columns [sum, C] of each rank for all rows -> all columns [n, ranks * C] of the `num_rows[r]` of this one."""
        ...

    def all_to_all_by_counts(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """[sum, C], `sent[r]` rows for each rank r -> the `received[r]` rows of each, [sum, C]; rank 0's first."""
        ...

    def smallest(self, number: int) -> int:
        """Minimum over the ranks' numbers."""
        ...

    def shared_bytes(self, make: Callable[[], bytes], num_bytes: int) -> bytes:
        """The `num_bytes` that rank 0 makes, on every rank."""
        ...


class OneRank:
    """Implements RankGroup without anybody else."""

    num_ranks, rank = 1, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return x

    def all_gather_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        return x

    def reduce_scatter_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        return x

    def all_to_all_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        return x

    def all_to_all_by_counts(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return x

    def smallest(self, number: int) -> int:
        return number

    def shared_bytes(self, make: Callable[[], bytes], num_bytes: int) -> bytes:
        return make()


ONE_RANK = OneRank()


def summed_in_order(ranks: RankGroup, x: Tensor, rows: slice | None = None) -> Tensor:
    """`all_reduce` of [N, C] in float32 and in the order of the ranks, or some rows of it.

    A ring adds each part of a tensor from another rank on, so that its bits depend on where a row stands.
    """
    gathered = ranks.all_gather_columns(x)
    parts = (gathered if rows is None else gathered[rows]).float().chunk(ranks.num_ranks, dim=1)
    return reduce(add, parts).to(x.dtype)


class ProcessRanks:
    """Implements RankGroup over processes: gloo for tensors on the CPU, NCCL for those on a GPU.

    The group is this object's own, so that a program's default group, and other engines, are left alone.
    `num_calls` counts what was exchanged: ranks with the same count are at the same place. `on_abort` ends exchanges
    that go another way.
    """

    def __init__(
        self, group: Any, store: Any, rank: int, num_ranks: int, device: torch.device, *, opening_timeout: timedelta
    ) -> None:
        self.num_ranks = num_ranks
        self.rank = rank
        self.store = store
        self.on_abort: list[Callable[[], None]] = []
        self.device = device
        self.num_calls = 0
        self._group = group
        self._opening_timeout = opening_timeout

    @classmethod
    def join(
        cls,
        rendezvous: Path | StoreAddress,
        *,
        rank: int,
        num_ranks: int,
        device: torch.device,
        timeout_s: float,
        opening_timeout_s: float | None = None,
        address: str = LOOPBACK,
    ) -> "ProcessRanks":
        """Join the ranks through a file that must not exist yet, or a store; returns when all have joined.

        `address` is this machine's, to which the other ranks connect. `opening_timeout_s` is the limit of `smallest`,
        before which a rank loads its weights. Raises ExchangeError when the ranks do not come; so does every exchange
        when one is gone or late.
        """
        if device.type == "cuda":
            make_group = _DIST.ProcessGroupNCCL
            options = _DIST.ProcessGroupNCCL.Options()
        else:
            make_group = _DIST.ProcessGroupGloo
            options = _DIST.ProcessGroupGloo._Options()
            options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        is_remote = isinstance(rendezvous, StoreAddress)
        with _named_errors(), limit_new_connections(is_remote), _nccl_interface(address if is_remote else None):
            store = _store(rendezvous, num_ranks, options._timeout)
            group = make_group(store, rank, num_ranks, options)
            ranks = cls(
                group, store, rank, num_ranks, device, opening_timeout=timedelta(seconds=opening_timeout_s or timeout_s)
            )
            ranks.smallest(0)  # NCCL connects with the first exchange, which must not be captured
        return ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        self._exchange(self._group.allreduce, [x])
        return x

    def all_gather_columns(self, x: Tensor) -> Tensor:
        num_rows, num_columns = x.shape
        gathered = x.new_empty(self.num_ranks * num_rows, num_columns)
        self._exchange(self._group._allgather_base, gathered, x.contiguous())
        return self._columns_of_ranks(gathered)

    def all_gather_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        most = max(num_rows)
        padded = x if len(x) == most else torch.cat((x, x.new_zeros(most - len(x), x.shape[1])))
        gathered = x.new_empty(self.num_ranks * most, x.shape[1])
        self._exchange(self._group._allgather_base, gathered, padded.contiguous())
        if sum(num_rows) == len(gathered):
            return gathered
        parts = zip(gathered.chunk(self.num_ranks), num_rows, strict=True)
        return torch.cat([part[:count] for part, count in parts])

    def reduce_scatter_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        count = num_rows[self.rank]
        if self.device.type == "cuda" and count * self.num_ranks == len(x):
            own = x.new_empty(count, x.shape[1])
            self._exchange(self._group._reduce_scatter_base, own, x.contiguous())
            return own
        start = sum(num_rows[: self.rank])
        return self.all_reduce(x)[start : start + count]

    def all_to_all_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        count = num_rows[self.rank]
        by_rank = x.new_empty(self.num_ranks * count, x.shape[1])
        sizes = ([count] * self.num_ranks, list(num_rows)) if len(set(num_rows)) > 1 else ([], [])
        self._exchange(self._group.alltoall_base, by_rank, x.contiguous(), *sizes)
        return self._columns_of_ranks(by_rank)

    def all_to_all_by_counts(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        found = x.new_empty(sum(received), x.shape[1])
        self._exchange(self._group.alltoall_base, found, x.contiguous(), list(received), list(sent))
        return found

    def _columns_of_ranks(self, x: Tensor) -> Tensor:
        """[ranks * N, C], rank 0's rows first -> [N, ranks * C]."""
        num_rows, num_columns = len(x) // self.num_ranks, x.shape[1]
        by_rank = x.view(self.num_ranks, num_rows, num_columns)
        return by_rank.transpose(0, 1).reshape(num_rows, self.num_ranks * num_columns)

    def smallest(self, number: int) -> int:
        tensor = torch.tensor([number], device=self.device)
        options = _DIST.AllreduceOptions()
        options.reduceOp = _DIST.ReduceOp.MIN
        options.timeout = self._opening_timeout
        self._exchange(self._group.allreduce, [tensor], options)
        return int(tensor.item())

    def shared_bytes(self, make: Callable[[], bytes], num_bytes: int) -> bytes:
        content = make() if self.rank == 0 else bytes(num_bytes)
        summed = self.all_reduce(torch.tensor(list(content), dtype=torch.int32, device=self.device))
        return bytes(summed.tolist())

    def abort(self) -> None:
        """From another thread, end exchanges that wait for a lost rank. No exchange is possible afterwards."""
        if (group := self._group) is not None:
            group.abort()
        for end in self.on_abort:
            end()

    def close(self) -> None:
        """End the group, before the directory of its store is removed: NCCL's threads poll that file.

        Graphs with its exchanges must be gone. Calling it again does nothing.
        """
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # unlike `shutdown`, it waits for no rank

    def _exchange(self, start: Callable[..., Any], *arguments: Any) -> None:
        """Start it and wait for it: on a GPU, only the stream does."""
        self.num_calls += 1
        with _named_errors():
            start(*arguments).wait()


def _store(rendezvous: Path | StoreAddress, num_ranks: int, timeout: timedelta) -> Any:
    if isinstance(rendezvous, StoreAddress):
        host, port = rendezvous
        return _DIST.TCPStore(host, port, num_ranks, is_master=False, timeout=timeout, wait_for_workers=False)
    return _DIST.FileStore(str(rendezvous), num_ranks)


@contextmanager
def _nccl_interface(address: str | None) -> Iterator[None]:
    """Let NCCL connect through the interface that has `address`, unless the user has named one."""
    interface = None if address is None or _NCCL_INTERFACE in os.environ else interface_of(address)
    if interface is None:
        yield
        return
    os.environ[_NCCL_INTERFACE] = f"={interface}"
    try:
        yield
    finally:
        del os.environ[_NCCL_INTERFACE]


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(str(error).splitlines()[0]) from error
