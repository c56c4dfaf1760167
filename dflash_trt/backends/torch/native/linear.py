"""Linear layers of the CPU kernels: float32 activations and sums, bfloat16 weights if that is exact.

A row's sums are made in the order of the inputs, however many rows a call has (`src/product.h`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dflash_trt.backends.torch.native import library
from dflash_trt.backends.torch.native.library import CpuKernels
from dflash_trt.network.ops import Linear

_PANEL: Final = 32  # kPanel of src/product.h


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelLinear(Linear[Tensor]):
    """A float32 layer whose weight is kept in bfloat16; `weight` is on the meta device, for its shape."""

    kernels: CpuKernels
    packed: Tensor  # bfloat16 [panels, in, _PANEL]

    def __call__(self, x: Tensor) -> Tensor:  # [N, in] -> [N, out]
        num_out, panels = len(self.weight), self.packed  # type: ignore[arg-type]
        num_in = panels.shape[1]
        assert x.dtype == torch.float32 and x.shape[1] == num_in
        x = x.contiguous()
        num_rows = len(x)
        out = torch.empty((num_rows, num_out))
        self.kernels.call(
            library.Linear(
                x.data_ptr(),
                num_rows,
                panels.data_ptr(),
                num_out,
                num_in,
                None if self.bias is None else self.bias.data_ptr(),
                out.data_ptr(),
                torch.get_num_threads(),
            )
        )
        return out


def panel_linear(linear: Linear[Tensor], kernels: CpuKernels) -> PanelLinear | None:
    """None where bfloat16 does not hold every weight."""
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor)
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or 0 in weight.shape:
        return None
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        return None
    num_out, num_in = weight.shape
    packed = torch.empty((-(-num_out // _PANEL), num_in, _PANEL), dtype=torch.bfloat16)
    if not kernels.pack(weight.contiguous().data_ptr(), num_out, num_in, packed.data_ptr()):
        return None
    return PanelLinear(weight=weight.to("meta"), bias=bias, name=linear.name, kernels=kernels, packed=packed)
