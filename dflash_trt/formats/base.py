"""Packed weights: what stands in a Linear's `weight` when it is not a plain [out, in] tensor.

`T` is a back end's tensor handle, as in `network/ops`; nothing here computes, so no tensor library is needed. The
formats are those of ModelOpt 0.47's `export_hf_checkpoint`, so an exported checkpoint is taken as it is.

A canonical linear may be several ones stacked along its rows (q, k, v; gate, up). Each of these *segments* has scalar
scales of its own: `segments` are their row counts, in order, with sum `out`; a tensor of scales has one float32 per
segment. In exact arithmetic, for the rows of segment s,

    y[:, rows of s] = x_s @ W_s.T + bias[rows of s]

where W_s is the dequantized weight below, and x_s is x itself when `input_scale` is None, else x quantized and
dequantized with input_scale[s]. Scales that are equal in all segments are stored equal, so that a back end can see
that one activation quantization serves the whole GEMM.

FP8 (E4M3 "fn": no infinity, largest 448, smallest subnormal 2**-9; round to nearest even, saturating)
    W_s = codes * weight_scale[s]
    x_s = e4m3(clamp(x / input_scale[s], -448, 448)) * input_scale[s]          static, per tensor

NVFP4 (E2M1 values 0 .5 1 1.5 2 3 4 6 and their negatives; blocks of 16 along `in`)
    code c = sign << 3 | magnitude index; byte j of a row holds column 2j in bits 0-3 and column 2j + 1 in bits 4-7
    W_s[n, k] = e2m1(code[n, k]) * block_scale[n, k // 16] * weight_scale[s]   block_scale in E4M3, never negative
    x_s: per row and block b of 16, g = input_scale[s]:
        scale_b = e4m3(clamp(max|x_b| / (6 g), 2**-9, 448))   (1 for a block of zeros)
        x_s = e2m1(x_b / (scale_b g)) * scale_b * g                            block scales dynamic, g static

`weight_scale` is amax / 448 for FP8 and amax / (6 * 448) for NVFP4 (ModelOpt's `weight_scale_2`); likewise
`input_scale`. E2M1 rounds to nearest, ties to the even code (0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2,
3.5 -> 4, 5 -> 4) and saturates at 6.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

E4M3_MAX: Final = 448.0
E2M1_MAX: Final = 6.0
E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by magnitude index; the sign is bit 3
BLOCK_SIZE: Final = 16  # columns that share an NVFP4 block scale

SliceRows = Callable[[T, int, int], T]  # (tensor, start, stop) -> rows start .. stop - 1 of axis 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWeight(Generic[T]):
    """What the packed formats share."""

    segments: tuple[int, ...]  # rows per stacked linear
    weight_scale: T  # float32 [segments]
    input_scale: T | None  # float32 [segments]; None: activations stay as they are (weight-only)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Weight(PackedWeight[T]):
    """FP8 E4M3, W8A8 (or weight-only). Per-segment scale: TensorRT's DQ over axis 0 takes it repeated per row."""

    codes: T  # float8_e4m3fn [out, in]


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvfp4Weight(PackedWeight[T]):
    """NVFP4, W4A4, or W4A16 when `input_scale` is None. `in` is a multiple of 16."""

    codes: T  # uint8 [out, in / 2], two codes per byte, the even column in the low nibble
    block_scale: T  # float8_e4m3fn [out, in / 16]


def slice_packed(weight: PackedWeight[T], start: int, stop: int, slice_rows: SliceRows[T]) -> PackedWeight[T]:
    """Whole segments of a packed weight: rows start .. stop - 1, which must lie between segment boundaries."""
    edges = [0]
    for rows in weight.segments:
        edges.append(edges[-1] + rows)
    assert start in edges and stop in edges and start < stop, f"rows {start}..{stop} cut a segment of {weight.segments}"
    first, last = edges.index(start), edges.index(stop)
    segments = weight.segments[first:last]
    weight_scale = slice_rows(weight.weight_scale, first, last)
    input_scale = None if weight.input_scale is None else slice_rows(weight.input_scale, first, last)
    if isinstance(weight, Fp8Weight):
        codes = slice_rows(weight.codes, start, stop)
        return Fp8Weight(segments=segments, weight_scale=weight_scale, input_scale=input_scale, codes=codes)
    assert isinstance(weight, Nvfp4Weight), f"not a packed format: {type(weight).__name__}"
    return Nvfp4Weight(
        segments=segments,
        weight_scale=weight_scale,
        input_scale=input_scale,
        codes=slice_rows(weight.codes, start, stop),
        block_scale=slice_rows(weight.block_scale, start, stop),
    )
