"""What every linear layer of the CPU kernels holds to: a row's bits depend on the row alone."""

import torch
from torch import Tensor

from dflash_trt.backends.torch.native.linear import NativeLinear


def assert_rows_are_independent(layer: NativeLinear, x: Tensor) -> None:
    """Over parts of x [75, in], and over numbers of threads."""
    together = layer(x)
    for start, stop in ((0, 1), (5, 7), (9, 12), (20, 24), (33, 46), (10, 75)):
        assert torch.equal(layer(x[start:stop]), together[start:stop])
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(layer(x), together)
    finally:
        torch.set_num_threads(num_threads)
