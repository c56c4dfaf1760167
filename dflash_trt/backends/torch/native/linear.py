"""Linear layers of the CPU kernels: bfloat16 weights where that is exact, sums in float32; or integers of eight bits.

Activations are float32, or bfloat16 where the CPU multiplies it (AVX-512 BF16). For integers they become integers in
the kernel, whose products and sums are exact (`src/codes.h`).

A row's sums are made in the order of the inputs, however many rows a call has (`src/product.h`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dflash_trt.backends.torch.native import library
from dflash_trt.backends.torch.native.build import has_bfloat16_tiles
from dflash_trt.backends.torch.native.library import CpuKernels
from dflash_trt.formats.base import row_scale
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.network.ops import Linear

PANEL: Final = 32  # kPanel of src/product.h
_CODES_AT_ONCE: Final = 4  # most of kCodes in src/simd.h
_FLOAT32, _BFLOAT16, _ROUNDED, _CODED = range(4)  # forms of activations, as in src/kernels.h


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeLinear(Linear[Tensor], ABC):
    """A layer that a kernel computes, a row's sums in an order that no other row changes."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelLinear(NativeLinear):
    """A layer in the order of the kernel; `weight` is on the meta device, for its shape. A bias is float32."""

    kernels: CpuKernels
    packed: Tensor  # bfloat16 [panels, pairs of inputs, PANEL, 2], or uint8 [panels, bytes of a panel]
    scales: Tensor | None = None  # float32 [out], of integers
    dtype: torch.dtype  # of activations
    form: int  # how the kernel reads them: DflashTrtLinear

    def __call__(self, x: Tensor) -> Tensor:  # [N, in] -> [N, out]
        assert isinstance(self.weight, Tensor)
        num_out, num_in = self.weight.shape
        assert x.dtype == self.dtype and x.shape[1] == num_in
        x = x.contiguous()
        num_rows = len(x)
        out = torch.empty((num_rows, num_out), dtype=torch.float32)
        self.kernels.call(
            library.Linear(
                x.data_ptr(),
                num_rows,
                self.packed.data_ptr(),
                num_out,
                num_in,
                None if self.scales is None else self.scales.data_ptr(),
                None if self.bias is None else self.bias.data_ptr(),
                out.data_ptr(),
                torch.get_num_threads(),
                self.form,
            )
        )
        return out if x.dtype == torch.float32 else out.to(x.dtype)


def panel_linear(linear: Linear[Tensor], kernels: CpuKernels, *, rounds_inputs: bool = False) -> PanelLinear | None:
    """None where bfloat16 does not hold every weight, or the kernels do not take the activations.

    With `rounds_inputs`, float32 activations are rounded to bfloat16 where the CPU multiplies that faster.
    """
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor)
    if not _is_taken(weight, kernels) or weight.device.type != "cpu" or 0 in weight.shape:
        return None
    num_out, num_in = weight.shape
    wide = weight.float().contiguous()
    packed = torch.empty((-(-num_out // PANEL), -(-num_in // 2), PANEL, 2), dtype=torch.bfloat16)
    if not kernels.pack(wide.data_ptr(), num_out, num_in, packed.data_ptr()):
        return None
    return PanelLinear(
        weight=weight.to("meta"),
        bias=None if bias is None else bias.float().contiguous(),
        name=linear.name,
        kernels=kernels,
        packed=packed,
        dtype=weight.dtype,
        form=_form(weight, kernels, rounds_inputs=rounds_inputs),
    )


def integer_linear(linear: Linear[Tensor], kernels: CpuKernels) -> PanelLinear | None:
    """None for weights that are no integers of eight bits. Activations are float32."""
    weight = linear.weight
    if not isinstance(weight, Int8Weight) or weight.codes.dim() != 2 or weight.codes.device.type != "cpu":
        return None
    num_out, num_in = weight.codes.shape
    packed = torch.empty(
        (-(-num_out // PANEL), -(-num_in // _CODES_AT_ONCE) * _CODES_AT_ONCE * PANEL), dtype=torch.uint8
    )
    kernels.pack_codes(weight.codes.contiguous().data_ptr(), num_out, num_in, packed.data_ptr())
    return PanelLinear(
        weight=torch.empty((num_out, num_in), device="meta"),
        bias=None if linear.bias is None else linear.bias.float().contiguous(),
        name=linear.name,
        kernels=kernels,
        packed=packed,
        scales=row_scale(weight).contiguous(),
        dtype=torch.float32,
        form=_CODED,
    )


def _form(weight: Tensor, kernels: CpuKernels, *, rounds_inputs: bool) -> int:
    if weight.dtype == torch.bfloat16:
        return _BFLOAT16
    return _ROUNDED if rounds_inputs and kernels.has_bfloat16 and weight.shape[1] % 2 == 0 else _FLOAT32


def _is_taken(weight: Tensor, kernels: CpuKernels) -> bool:
    if weight.dtype == torch.bfloat16:
        return kernels.has_bfloat16 and weight.shape[1] % 2 == 0 and not has_bfloat16_tiles()
    return weight.dtype == torch.float32
