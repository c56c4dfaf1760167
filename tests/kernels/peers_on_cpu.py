"""Ranks as processes that share a file, for kernels that read one another's memory. As a program: RANK RANKS FILE.

Rank 0 writes what it has computed beside the file.
"""

import subprocess
import sys
from pathlib import Path

import torch

from dflash_trt.backends.cuda.peers import MAX_BYTES, flag_bytes, peer_buffers
from dflash_trt.kernels.one_shot_launch import PeerBuffers, one_shot_add_rms_norm, one_shot_sum
from tests.kernels_on import set_up_kernels

HIDDEN = 96
ROWS = (3, 1, 4, 4, 2)  # of the sums, one after the other


def map_peers(path: Path, rank: int, num_ranks: int, *, hidden_size: int = HIDDEN) -> PeerBuffers:
    """A region of the file for each rank, at other addresses in each process."""
    num_bytes = flag_bytes(MAX_BYTES // (hidden_size * 4), num_ranks) + MAX_BYTES
    shared = torch.from_file(str(path), shared=True, size=num_bytes * num_ranks, dtype=torch.uint8)
    _mapped.append(shared)
    addresses = [shared.data_ptr() + i * num_bytes for i in range(num_ranks)]
    cpu = torch.device("cpu")
    return peer_buffers(addresses, rank, hidden_size=hidden_size, dtype=torch.float32, device=cpu)


_mapped: list[torch.Tensor] = []


def addend(rank: int, call: int) -> torch.Tensor:
    return torch.randn(ROWS[call], HIDDEN, generator=torch.Generator().manual_seed(100 * rank + call))


def run(rank: int, num_ranks: int, path: Path) -> list[torch.Tensor]:
    """Sums, every other one with a residual and its norm."""
    peers = map_peers(path, rank, num_ranks)
    found = []
    for call in range(len(ROWS)):
        x = addend(rank, call)
        if call % 2:
            found += one_shot_add_rms_norm(x, torch.ones_like(x), torch.arange(HIDDEN).float(), 1e-6, peers)
        else:
            found.append(one_shot_sum(x, peers))
    return found


def start(rank: int, num_ranks: int, path: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "tests.kernels.peers_on_cpu", str(rank), str(num_ranks), str(path)]
    return subprocess.Popen(words, cwd=Path(__file__).parents[2])


if __name__ == "__main__":
    set_up_kernels()
    torch.save(run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])), f"{sys.argv[3]}.{sys.argv[1]}")
