"""Memory that all ranks' GPUs read directly, for sums of a few rows: PyTorch's symmetric memory.

Used where PyTorch has it and the GPUs reach one another (NVLink); elsewhere, and for longer sums, NCCL does the work.
No machine with two GPUs has run it yet: tests run the kernel and its flags in processes that share a file.
"""

import logging
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from dflash_trt.backends.torch.process_group import ProcessRanks, RankGroup
from dflash_trt.kernels.one_shot_launch import PeerBuffers

MAX_BYTES: Final = 1 << 19  # of a sum; a ring moves less in all, one shot has fewer hops

_GROUP_NAME: Final = "dflash_trt.one_shot"
_held: WeakKeyDictionary[ProcessRanks, Any] = WeakKeyDictionary()  # the memory lives as long as the ranks
_log = logging.getLogger(__name__)


def open_peers(ranks: RankGroup, *, hidden_size: int, dtype: torch.dtype) -> PeerBuffers | None:
    """The same answer on every rank; None where there is no such memory, with the reason in the log."""
    if not isinstance(ranks, ProcessRanks) or ranks.device.type != "cuda":
        return None
    num_rows = MAX_BYTES // (hidden_size * dtype.itemsize)
    try:
        addresses = _symmetric_addresses(ranks, flag_bytes(num_rows, ranks.num_ranks) + MAX_BYTES)
    except (ImportError, AttributeError, RuntimeError) as error:  # PyTorch without it, or GPUs that do not reach others
        _log.info("sums of ranks go through NCCL: %s", str(error).splitlines()[0])
        addresses = []
    if not ranks.smallest(int(bool(addresses))):
        return None
    peers = peer_buffers(addresses, ranks.rank, hidden_size=hidden_size, dtype=dtype, device=ranks.device)
    ranks.smallest(0)  # all flags are as they begin before any rank's kernel looks at another's
    ranks.on_abort.append(partial(_abort, peers))
    return peers


def _abort(peers: PeerBuffers) -> None:
    """On a stream of its own, for kernels that wait occupy the others."""
    with torch.cuda.stream(torch.cuda.Stream(peers.abort.device)):  # type: ignore[no-untyped-call]
        peers.abort.fill_(1)


def flag_bytes(num_rows: int, num_ranks: int) -> int:
    return 2 * num_rows * num_ranks * 4


def peer_buffers(
    addresses: list[int], rank: int, *, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> PeerBuffers:
    """Of memory at these addresses, zeros at first: flags, then rows of numbers."""
    num_rows = MAX_BYTES // (hidden_size * dtype.itemsize)
    flags = torch.tensor(addresses, device=device)
    return PeerBuffers(
        rank=rank,
        num_rows=num_rows,
        hidden_size=hidden_size,
        dtype=dtype,
        buffers=flags + flag_bytes(num_rows, len(addresses)),
        flags=flags,
        abort=torch.zeros(1, dtype=torch.int32, device=device),
    )


def _symmetric_addresses(ranks: ProcessRanks, num_bytes: int) -> list[int]:
    """Where this rank sees each rank's memory, zeroed."""
    from torch._C import _distributed_c10d

    memory: Any = _distributed_c10d._SymmetricMemory
    memory.set_group_info(_GROUP_NAME, ranks.rank, ranks.num_ranks, ranks.store)
    shared = memory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, ranks.device, _GROUP_NAME)
    shared.zero_()
    handle = memory.rendezvous(shared)
    _held[ranks] = (shared, handle)
    return [int(address) for address in handle.buffer_ptrs]
