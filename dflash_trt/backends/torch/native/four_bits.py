"""Linear layers of the CPU kernels with weights of four bits, which stay four bits in memory.

A code has a value, times the scale of its block of inputs. With float32 activations each weight is exact and sums are
made in the order of the inputs. Activations that may be rounded become integers of eight bits with a scale for each
block, whose sums are exact (`src/four_bits.h`). Experts are multiplied where they are stored, with integers of 16 bits
(`src/stored_codes.cpp`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeGuard

import torch
from torch import Tensor

from dflash_trt.backends.torch.native.library import CpuKernels, FourBitLinear
from dflash_trt.backends.torch.native.linear import PANEL, NativeLinear
from dflash_trt.formats.base import row_scale
from dflash_trt.formats.int4 import Int4Weight
from dflash_trt.formats.mxfp4 import Mxfp4Weight, powers_of_two
from dflash_trt.formats.nvfp4 import E2M1_VALUES, Nvfp4Weight
from dflash_trt.network.ops import Linear

_FourBits: TypeAlias = Int4Weight[Tensor] | Mxfp4Weight[Tensor] | Nvfp4Weight[Tensor]
_STORED_INPUTS: Final = 32  # kInputs of src/stored_codes.cpp


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBits(NativeLinear):
    """Codes in the order of the kernel, or with `block_scale` as they are stored; computed in float32.

    `weight` is on the meta device, for its shape; scales and bias are float32 [out].
    """

    kernels: CpuKernels
    codes: Tensor  # uint8 [panels, bytes of a panel], or [out, in / 2]
    block_scale: Tensor | None  # bfloat16 [out, in / block], or uint8 exponents of two
    block: int
    values: Tensor  # float32 [16]
    scales: Tensor | None
    rounds_inputs: bool

    def __call__(self, x: Tensor) -> Tensor:  # [N, in] -> [N, out]
        assert isinstance(self.weight, Tensor)
        num_out, num_in = self.weight.shape
        assert x.shape[1] == num_in
        dtype, x = x.dtype, x.float().contiguous()
        out = torch.empty((len(x), num_out))
        self.kernels.call(
            FourBitLinear(
                x.data_ptr(),
                len(x),
                self.codes.data_ptr(),
                None if self.block_scale is None else self.block_scale.data_ptr(),
                num_out,
                num_in,
                self.block,
                self.values.data_ptr(),
                None if self.scales is None else self.scales.data_ptr(),
                None if self.bias is None else self.bias.data_ptr(),
                out.data_ptr(),
                torch.get_num_threads(),
                self.rounds_inputs,
                self.block_scale is not None and self.block_scale.dtype == torch.uint8,
            )
        )
        return out.to(dtype)


def four_bit_linear(linear: Linear[Tensor], kernels: CpuKernels, *, rounds_inputs: bool) -> FourBits | None:
    """None for other weights, and for those of several experts."""
    weight = linear.weight
    if not _is_taken(weight) or weight.codes.dim() != 2:
        return None
    block_scale = _bfloat16_scales(weight)
    packed = _packed(weight.codes, block_scale, kernels)
    return _layer(linear, weight, packed, None, kernels=kernels, rounds_inputs=rounds_inputs)


def stored_linear(linear: Linear[Tensor], kernels: CpuKernels, *, rounds_inputs: bool) -> FourBits | None:
    """A layer over the memory of its codes; None for other weights, and for inputs that do not fill vectors."""
    weight = linear.weight
    if not _is_taken(weight) or 2 * weight.codes.shape[1] % _STORED_INPUTS:
        return None
    block_scale = weight.block_scale if isinstance(weight, Mxfp4Weight) else _bfloat16_scales(weight)
    return _layer(
        linear,
        weight,
        weight.codes.contiguous(),
        block_scale.contiguous(),
        kernels=kernels,
        rounds_inputs=rounds_inputs,
    )


def _is_taken(weight: object) -> TypeGuard[_FourBits]:
    if not isinstance(weight, Int4Weight | Mxfp4Weight | Nvfp4Weight):
        return False
    return weight.input_scale is None and weight.codes.device.type == "cpu"


def _layer(
    linear: Linear[Tensor], weight: _FourBits, codes: Tensor, block_scale: Tensor | None, **options: Any
) -> FourBits:
    num_out, num_in = weight.codes.shape[0], 2 * weight.codes.shape[1]
    return FourBits(
        weight=torch.empty((num_out, num_in), device="meta"),
        bias=None if linear.bias is None else linear.bias.float().contiguous(),
        name=linear.name,
        codes=codes,
        block_scale=block_scale,
        block=num_in // weight.block_scale.shape[1],
        values=_values(weight),
        scales=None if weight.weight_scale is None else row_scale(weight).contiguous(),
        **options,
    )


def _values(weight: _FourBits) -> Tensor:  # float32 [16], of the codes
    if isinstance(weight, Int4Weight):
        return torch.arange(-8.0, 8.0)
    return torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])


def _bfloat16_scales(weight: _FourBits) -> Tensor:  # [out, blocks], which bfloat16 holds exactly
    if isinstance(weight, Mxfp4Weight):
        return powers_of_two(weight.block_scale, torch.bfloat16)
    return weight.block_scale.to(torch.bfloat16)


def _packed(
    codes: Tensor, block_scale: Tensor, kernels: CpuKernels
) -> Tensor:  # uint8 [out, in / 2], bfloat16 [out, blocks]
    """As `src/four_bits.h` reads them."""
    num_out, num_blocks = block_scale.shape
    num_in = 2 * codes.shape[1]
    packed = torch.empty((-(-num_out // PANEL), PANEL * (num_in // 2 + 2 * num_blocks)), dtype=torch.uint8)
    codes, block_scale = codes.contiguous(), block_scale.contiguous()
    kernels.pack_four_bits(
        codes.data_ptr(), block_scale.data_ptr(), num_out, num_in, num_in // num_blocks, packed.data_ptr()
    )
    return packed
