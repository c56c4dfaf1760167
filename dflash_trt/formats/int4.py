"""INT4: integers -8 .. 7 in blocks of 32 along `in`, weight-only.

    nibble = integer + 8; byte j of a row holds column 2j in bits 0-3 and column 2j + 1 in bits 4-7
    W[n, k] = (nibble[n, k] - 8) * block_scale[n, k // 32]         block_scale in bfloat16, as published

The bytes equal compressed-tensors' little-endian int32 words, and the codes equal its compressor's, bit for bit, from
bfloat16 weights: the scale is amax / 7.5 of a block, rounded to bfloat16, and both divisions are in
the weight's own dtype. Integers round to nearest, ties to even. Kimi's checkpoints have these weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dflash_trt.formats.base import QuantizedWeight, T, TensorLayout, WeightFormat

BLOCK_SIZE: Final = 32

_ZERO: Final = 8  # nibble of the integer 0
_ROWS_AT_ONCE = 4096  # keeps the float32 intermediates of a large weight small


@dataclass(frozen=True, kw_only=True, slots=True)
class Int4Weight(QuantizedWeight[T]):
    """All scales are in blocks: no `weight_scale`. `in` is a multiple of 32."""

    codes: T  # uint8 [..., out, in / 2], two codes per byte, the even column in the low nibble
    block_scale: T  # bfloat16 [..., out, in / 32]


class Int4(WeightFormat):
    name = "int4"
    weight_type = Int4Weight
    columns_per_block = BLOCK_SIZE

    def layout(self, shape: tuple[int, ...], segments: Sequence[int]) -> dict[str, TensorLayout]:
        *leading, columns = shape
        return {
            "codes": TensorLayout("uint8", (*leading, columns // 2)),
            "block_scale": TensorLayout("bfloat16", (*leading, columns // BLOCK_SIZE)),
        }

    def quantize_matrix(
        self, weight: Tensor, *, segments: Sequence[int], weight_amax: Tensor, input_amax: Tensor | None
    ) -> QuantizedWeight[Tensor]:
        parts = [_quantized(part) for part in torch.split(weight, _ROWS_AT_ONCE)]
        codes, block_scale = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return Int4Weight(segments=tuple(segments), codes=codes, block_scale=block_scale)

    def unscaled(self, weight: QuantizedWeight[Tensor], dtype: torch.dtype) -> Tensor:
        """Exact in float32; a code times a scale has up to 11 significant bits, which bfloat16 rounds."""
        assert isinstance(weight, Int4Weight)
        codes, block_scale = weight.codes.flatten(0, -2), weight.block_scale.flatten(0, -2)
        rows, packed_columns = codes.shape
        values = torch.empty(rows, packed_columns * 2, dtype=dtype, device=codes.device)
        for start in range(0, rows, _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            scale = block_scale[part].float()
            blocks = _integers(codes[part]).view(*scale.shape, BLOCK_SIZE).float()
            values[part] = (blocks * scale[:, :, None]).flatten(1).to(dtype)
        return values.view(*weight.codes.shape[:-1], -1)


def _integers(codes: Tensor) -> Tensor:  # uint8 [N, in / 2] -> int8 [N, in]
    return torch.stack((codes & 0x0F, codes >> 4), dim=-1).flatten(-2).to(torch.int8) - _ZERO


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [rows, in / 2] and block scales [rows, in / 32]."""
    blocks = weight.view(len(weight), -1, BLOCK_SIZE)
    wanted = blocks.abs().amax(dim=-1) / 7.5  # half of the range of the integers
    block_scale = torch.where(wanted == 0, torch.finfo(torch.bfloat16).eps, wanted).to(torch.bfloat16)
    integers = (blocks / block_scale.to(blocks.dtype)[..., None]).round().clamp(-8, 7).flatten(1)
    nibbles = (integers + _ZERO).to(torch.uint8)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4, block_scale


FORMATS = (Int4(),)
