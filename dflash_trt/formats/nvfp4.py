"""NVFP4: E2M1 values (0 .5 1 1.5 2 3 4 6, signed) in blocks of 16 along `in`; W4A4, or W4A16.

    code c = sign << 3 | magnitude index; byte j of a row holds column 2j in bits 0-3 and column 2j + 1 in bits 4-7
    W_s[n, k] = e2m1(code[n, k]) * block_scale[n, k // 16] * weight_scale[s]   block_scale in E4M3, never negative
    x_s: per row and block b of 16, g = input_scale[s]:
        scale_b = e4m3(clamp(max|x_b| / (6 g), 2**-9, 448))   (1 for a block of zeros)
        x_s = e2m1(x_b / (scale_b g)) * scale_b * g                            block scales dynamic, g static

`weight_scale` is amax / (6 * 448) (ModelOpt's `weight_scale_2`), likewise `input_scale`. E2M1 rounds to nearest, ties
to the even code (0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4) and saturates at 6. The codes
equal ModelOpt 0.47's exports, bit for bit, when given the same ranges; it divides in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Final

import torch
from torch import Tensor

from dflash_trt.formats.base import E4M3_MAX, QuantizedWeight, T, TensorLayout, WeightFormat

E2M1_MAX: Final = 6.0
E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by magnitude index; the sign is bit 3
E2M1_BOUNDS: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints between magnitudes
BLOCK_SIZE: Final = 16

_MIN_BLOCK_SCALE = 2.0**-9  # E4M3's smallest; a block scale of 0 would lose the block
_ROWS_AT_ONCE = 4096  # keeps the float32 intermediates of a large weight small


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvfp4Weight(QuantizedWeight[T]):
    """W4A4, or W4A16 when `input_scale` is None. `in` is a multiple of 16."""

    weight_scale: T
    codes: T  # uint8 [..., out, in / 2], two codes per byte, the even column in the low nibble
    block_scale: T  # float8_e4m3fn [..., out, in / 16]


class Nvfp4WeightOnly(WeightFormat):
    name = "nvfp4_w4a16"
    weight_type = Nvfp4Weight
    shares_weight_scale = True
    columns_per_block = BLOCK_SIZE

    def layout(self, shape: tuple[int, ...], segments: Sequence[int]) -> dict[str, TensorLayout]:
        *leading, columns = shape
        return {
            "codes": TensorLayout("uint8", (*leading, columns // 2)),
            "block_scale": TensorLayout("float8_e4m3fn", (*leading, columns // BLOCK_SIZE)),
            "weight_scale": TensorLayout("float32", (*shape[:-2], len(segments))),
        }

    def quantize_matrix(
        self, weight: Tensor, *, segments: Sequence[int], weight_amax: Tensor, input_amax: Tensor | None
    ) -> QuantizedWeight[Tensor]:
        scale = weight_amax.float() / (E2M1_MAX * E4M3_MAX)
        parts = [_codes(part, scale[s]) for s, part in enumerate(torch.split(weight, list(segments)))]
        return Nvfp4Weight(
            segments=tuple(segments),
            weight_scale=scale,
            input_scale=None if input_amax is None else input_amax.float() / (E2M1_MAX * E4M3_MAX),
            codes=torch.cat([codes for codes, _ in parts]),
            block_scale=torch.cat([block_scale for _, block_scale in parts]),
        )

    def unscaled(self, weight: QuantizedWeight[Tensor], dtype: torch.dtype) -> Tensor:
        """Exact in bfloat16 too: a code times a block scale has 6 significant bits."""
        assert isinstance(weight, Nvfp4Weight)
        codes, block_scale = weight.codes.flatten(0, -2), weight.block_scale.flatten(0, -2)
        rows, packed_columns = codes.shape
        values = torch.empty(rows, packed_columns * 2, dtype=dtype, device=codes.device)
        for start in range(0, rows, _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            numbers = e2m1_values(codes[part]).float()
            scale = block_scale[part].float()
            values[part] = (numbers.view(*scale.shape, BLOCK_SIZE) * scale[:, :, None]).flatten(1).to(dtype)
        return values.view(*weight.codes.shape[:-1], -1)


class Nvfp4(Nvfp4WeightOnly):
    name = "nvfp4"
    first_capability = (10, 0)  # Blackwell
    instead = "Use `fp8` for speed, or `nvfp4_w4a16` for 4-bit weights with unquantized activations."
    has_input_scale = True
    modelopt_activation: ClassVar = {  # ModelOpt's NVFP4_DEFAULT_CFG
        "num_bits": (2, 1),
        "block_sizes": {-1: BLOCK_SIZE, "type": "dynamic", "scale_bits": (4, 3)},
    }

    def layout(self, shape: tuple[int, ...], segments: Sequence[int]) -> dict[str, TensorLayout]:
        layout = super().layout(shape, segments)
        return layout | {"input_scale": layout["weight_scale"]}


def e2m1_values(codes: Tensor) -> Tensor:  # uint8 [..., in / 2], in / 2 even -> bfloat16 [..., in]
    """Decode E2M1 nibbles, exactly. Four at a time: a step may dequantize billions."""
    pairs_of_bytes = codes.contiguous().view(torch.uint16).int()
    values = _four_values(codes.device).index_select(0, pairs_of_bytes.flatten())
    return values.view(torch.bfloat16).view(*codes.shape[:-1], -1)


@cache
def _four_values(device: torch.device) -> Tensor:  # int64 [65536]: four bfloat16 numbers, by a pair of bytes
    with torch.inference_mode(False):
        table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.bfloat16, device=device)
        number = torch.arange(1 << 16, device=device)
        nibbles = torch.stack([number >> shift & 0x0F for shift in (0, 4, 8, 12)], dim=-1)  # little-endian
        return table[nibbles].view(torch.int64).flatten()


def e2m1_codes(values: Tensor) -> Tensor:  # float32, any shape -> uint8 of the same shape
    """Round to E2M1, ties to even, saturating; code = sign << 3 | magnitude index."""
    bounds = torch.tensor(E2M1_BOUNDS, device=values.device)
    # Counting the bounds below a value rounds ties down; the odd bounds are one ulp lower, so that their ties go up.
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros_like(bounds[1::2]))
    magnitude = torch.bucketize(values.abs(), bounds).to(torch.uint8)
    return magnitude | ((values < 0).to(torch.uint8) << 3)


def block_scales(blocks: Tensor, scale: Tensor) -> Tensor:  # float32 [..., blocks, 16] -> e4m3 [..., blocks]
    """E4M3 scale of each block of 16, given the global scale."""
    wanted = blocks.abs().amax(dim=-1) / (E2M1_MAX * scale)
    wanted = torch.where(wanted == 0, torch.ones_like(wanted), wanted)
    return wanted.clamp(_MIN_BLOCK_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)


def _codes(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [out, in / 2] and block scales [out, in / 16] of one segment; `scale` is its global scale."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    block_scale = torch.empty(rows, columns // BLOCK_SIZE, dtype=torch.float8_e4m3fn)
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        blocks = weight[part].float().view(-1, columns // BLOCK_SIZE, BLOCK_SIZE)
        block_scale[part] = block_scales(blocks, scale)
        scaled = (blocks / (block_scale[part].float() * scale)[:, :, None]).flatten(1)
        nibbles = e2m1_codes(scaled)
        codes[part] = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return codes, block_scale


FORMATS = (Nvfp4(), Nvfp4WeightOnly())
