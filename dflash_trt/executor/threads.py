"""How many threads PyTorch computes with, on one rank and on several."""

import torch

from dflash_trt.core.host_resources import available_cores


def default_num_threads(num_ranks: int = 1) -> int:
    """An even share of the cores this process may use, but no more than PyTorch was set to (OMP_NUM_THREADS)."""
    return max(1, min(torch.get_num_threads(), available_cores() // num_ranks))
