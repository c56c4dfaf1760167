"""Linear layers of the CPU kernels with weights of four bits, which stay four bits in memory.

A code has a value, times the scale of its block of inputs. With float32 activations each weight is exact and sums are
made in the order of the inputs; with activations that may be rounded to bfloat16, products of codes are added up by
block, where the CPU multiplies bfloat16 (`src/four_bits.h`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_trt.backends.torch.native.library import CpuKernels, FourBitLinear
from dflash_trt.backends.torch.native.linear import PANEL, NativeLinear
from dflash_trt.formats.base import row_scale
from dflash_trt.formats.int4 import Int4Weight
from dflash_trt.formats.mxfp4 import Mxfp4Weight, powers_of_two
from dflash_trt.formats.nvfp4 import E2M1_VALUES, Nvfp4Weight
from dflash_trt.network.ops import Linear

_GROUP = 4  # kGroup of src/four_bits.h


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedFourBits(NativeLinear):
    """`weight` is on the meta device, for its shape; scales and bias are float32 [out]."""

    kernels: CpuKernels
    packed: Tensor  # uint8 [panels, blocks, bytes of a block]
    block: int
    values: Tensor  # float32 [16]
    scales: Tensor | None
    rounds_inputs: bool

    def __call__(self, x: Tensor) -> Tensor:  # float32 [N, in] -> [N, out]
        assert isinstance(self.weight, Tensor)
        num_out, num_in = self.weight.shape
        assert x.dtype == torch.float32 and x.shape[1] == num_in
        x = x.contiguous()
        out = torch.empty((len(x), num_out))
        self.kernels.call(
            FourBitLinear(
                x.data_ptr(),
                len(x),
                self.packed.data_ptr(),
                num_out,
                num_in,
                self.block,
                self.values.data_ptr(),
                None if self.scales is None else self.scales.data_ptr(),
                None if self.bias is None else self.bias.data_ptr(),
                out.data_ptr(),
                torch.get_num_threads(),
                self.rounds_inputs,
            )
        )
        return out


def four_bit_linear(linear: Linear[Tensor], kernels: CpuKernels, *, rounds_inputs: bool) -> PackedFourBits | None:
    """None for other weights, and for those whose activations are quantized, too."""
    weight = linear.weight
    if not isinstance(weight, Int4Weight | Mxfp4Weight | Nvfp4Weight) or weight.input_scale is not None:
        return None
    if weight.codes.dim() != 2 or weight.codes.device.type != "cpu":
        return None
    values, block_scale = _values_and_scales(weight)
    num_out, num_in = weight.codes.shape[0], 2 * weight.codes.shape[1]
    return PackedFourBits(
        weight=torch.empty((num_out, num_in), device="meta"),
        bias=None if linear.bias is None else linear.bias.float().contiguous(),
        name=linear.name,
        kernels=kernels,
        packed=_packed(weight.codes, block_scale),
        block=num_in // block_scale.shape[1],
        values=values,
        scales=None if weight.weight_scale is None else row_scale(weight).contiguous(),
        rounds_inputs=rounds_inputs and kernels.has_bfloat16,
    )


def _values_and_scales(weight: Int4Weight[Tensor] | Mxfp4Weight[Tensor] | Nvfp4Weight[Tensor]) -> tuple[Tensor, Tensor]:
    """float32 [16], of the codes, and the scales of blocks, which bfloat16 [out, blocks] holds."""
    if isinstance(weight, Int4Weight):
        return torch.arange(-8.0, 8.0), weight.block_scale
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    if isinstance(weight, Mxfp4Weight):
        return values, powers_of_two(weight.block_scale, torch.bfloat16)
    return values, weight.block_scale.to(torch.bfloat16)


def _packed(codes: Tensor, block_scale: Tensor) -> Tensor:  # uint8 [out, in / 2], bfloat16 [out, blocks]
    """As `src/four_bits.h` reads them; outputs that fill the last panel are zeros."""
    num_out, num_blocks = block_scale.shape
    missing = -num_out % PANEL
    codes, block_scale = (
        torch.nn.functional.pad(x, (0, 0, 0, missing)).view(-1, PANEL, x.shape[1]) for x in (codes, block_scale)
    )
    pairs = codes.view(len(codes), PANEL, num_blocks, -1, 2)  # bytes of inputs 4g, 4g + 1 and of 4g + 2, 4g + 3
    first, second = pairs.unbind(-1)
    groups = torch.stack(((first & 0x0F) | second << 4, first >> 4 | (second & 0xF0)), dim=-1)  # [P, PANEL, NB, G, 2]
    of_blocks = groups.permute(0, 2, 3, 1, 4).reshape(len(codes), num_blocks, -1)
    scales = block_scale.transpose(1, 2).contiguous().view(torch.uint8)  # [P, NB, 2 * PANEL]
    return torch.cat((scales, of_blocks), dim=-1).contiguous()
