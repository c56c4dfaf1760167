"""Linear layers of integers in PyTorch (`formats/int8.py`): codes stay in 8 bits, sums are exact on any device.

`torch._int_mm` is several times as fast as a float32 GEMM on a CPU with VNNI. Without it oneDNN's sums saturate in 16
bits, so that its results are compared with exact ones before it is used. Exact elsewhere are float32 products of few
enough columns for 24 bits, added up as integers.
"""

from functools import cache
from typing import Final

import torch
from torch import Tensor

from dflash_trt.formats.int8 import Int8Weight, token_codes

_COLUMNS: Final = 1024  # times 127 * 128 is below 2**24


def apply_int8(x: Tensor, weight: Int8Weight[Tensor], bias: Tensor | None) -> Tensor:
    """x [N, in] -> [N, out] in x's dtype, as the format defines it."""
    codes, scale = token_codes(x)
    out = int32_product(codes, weight.codes).float().mul_(weight.weight_scale).mul_(scale)
    return (out if bias is None else out.add_(bias.float())).to(x.dtype)


def int32_product(x: Tensor, weight: Tensor) -> Tensor:  # int8 [N, in], int8 [out, in] -> int32 [N, out]
    """x @ weight.T, exact for up to MAX_COLUMNS columns."""
    if x.device.type == "cpu" and _is_int_mm_exact():
        return torch._int_mm(x, weight.t())
    return _product_in_parts(x, weight)


def _product_in_parts(x: Tensor, weight: Tensor) -> Tensor:
    sums = torch.zeros(len(x), len(weight), dtype=torch.int32, device=x.device)
    for a, b in zip(torch.split(x, _COLUMNS, dim=1), torch.split(weight, _COLUMNS, dim=1), strict=True):
        sums += (a.float() @ b.float().t()).to(torch.int32)
    return sums


@cache
def _is_int_mm_exact() -> bool:
    """True if sums of large codes, whose pairs do not fit 16 bits, are right for one row and for several."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-127, 128, (64, 256), generator=generator).to(torch.int8) for _ in range(2))
    return all(torch.equal(torch._int_mm(x[:n], weight.t()), _product_in_parts(x[:n], weight)) for n in (1, 64))
