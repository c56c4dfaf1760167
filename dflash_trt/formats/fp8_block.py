"""FP8 in blocks of 128 x 128: E4M3 codes with a float32 scale per block, weight-only.

    W[n, k] = codes[n, k] * block_scale[n // 128, k // 128]        rounded to float32

The blocks of each fused segment begin at its first row; those at the end of a segment or a row may be smaller.
Checkpoints of DeepSeek, Qwen and MiniMax have these weights, with the scales as `weight_scale_inv`. They quantize the
activations with scales computed per token and 128 features; here activations stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from dflash_trt.formats.base import QuantizedWeight, T, TensorLayout, WeightFormat
from dflash_trt.formats.fp8 import e4m3, e4m3_scale

BLOCK_SIZE: Final = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8BlockWeight(QuantizedWeight[T]):
    """All scales are in blocks: no `weight_scale`."""

    rows_per_block: ClassVar = {"block_scale": BLOCK_SIZE}

    codes: T  # float8_e4m3fn [..., out, in]
    block_scale: T  # float32 [..., sum of ceil(rows / 128) over the segments, ceil(in / 128)]


class Fp8Block(WeightFormat):
    name = "fp8_block"
    weight_type = Fp8BlockWeight
    columns_per_block = BLOCK_SIZE
    has_partial_blocks = True

    def layout(self, shape: tuple[int, ...], segments: Sequence[int]) -> dict[str, TensorLayout]:
        blocks = (sum(Fp8BlockWeight.rows_of("block_scale", segments)), -(-shape[-1] // BLOCK_SIZE))
        return {
            "codes": TensorLayout("float8_e4m3fn", shape),
            "block_scale": TensorLayout("float32", (*shape[:-2], *blocks)),
        }

    def quantize_matrix(
        self, weight: Tensor, *, segments: Sequence[int], weight_amax: Tensor, input_amax: Tensor | None
    ) -> QuantizedWeight[Tensor]:
        parts = [_quantized(part) for part in torch.split(weight.float(), list(segments))]
        return Fp8BlockWeight(
            segments=tuple(segments),
            codes=torch.cat([codes.view(torch.uint8) for codes, _ in parts]).view(torch.float8_e4m3fn),
            block_scale=torch.cat([scale for _, scale in parts]),
        )

    def unscaled(self, weight: QuantizedWeight[Tensor], dtype: torch.dtype) -> Tensor:
        assert isinstance(weight, Fp8BlockWeight)
        values = torch.empty(weight.codes.shape, dtype=dtype, device=weight.codes.device)
        row, block_row = 0, 0
        for rows in weight.segments:
            for start in range(row, row + rows, BLOCK_SIZE):  # a row of blocks at a time: no float32 copy of the weight
                part = slice(start, min(start + BLOCK_SIZE, row + rows))
                scale = _by_column(weight.block_scale[..., block_row, :], values.shape[-1])[..., None, :]
                values[..., part, :] = weight.codes[..., part, :].float() * scale
                block_row += 1
            row += rows
        return values


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [rows, in] and scales [ceil(rows / 128), ceil(in / 128)] of one segment, in float32."""
    row_amax = [_block_amax(rows.abs().amax(dim=0)) for rows in torch.split(weight, BLOCK_SIZE)]
    scale = e4m3_scale(torch.stack(row_amax))
    by_row = scale.repeat_interleave(BLOCK_SIZE, dim=0)[: weight.shape[0]]
    return e4m3(weight / _by_column(by_row, weight.shape[1])), scale


def _block_amax(column_amax: Tensor) -> Tensor:  # [in] -> [ceil(in / 128)]
    return torch.stack([part.amax() for part in torch.split(column_amax, BLOCK_SIZE)])


def _by_column(scale: Tensor, columns: int) -> Tensor:  # [..., blocks] -> [..., columns]
    return scale.repeat_interleave(BLOCK_SIZE, dim=-1)[..., :columns]


FORMATS = (Fp8Block(),)
