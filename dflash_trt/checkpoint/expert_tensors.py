"""Layouts of a layer's experts in checkpoints, and their conversion to the canonical one.

Canonical: [experts, out, in], and for gate_up all gate rows above all up rows. Only one expert is in memory beside the
tensor that is being filled.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_trt.checkpoint.tensors import StoredTensor
from dflash_trt.formats.mxfp4 import BLOCK_BYTES, BLOCK_COLUMNS, dequantize_mxfp4

FLOAT_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout:
    """By default one tensor of all experts, [experts, out, in] or [experts, out].

    `is_one_by_one`: a matrix for each expert and projection, expert by expert. `is_transposed`: [experts, in, out].
    `is_interleaved`: gate and up rows alternate. `is_mxfp4`: blocks [experts, out, in / 32, 16] and scales
    [experts, out, in / 32].
    """

    is_one_by_one: bool = False
    is_transposed: bool = False
    is_interleaved: bool = False
    is_mxfp4: bool = False


def part_shapes(layout: ExpertLayout, shape: tuple[int, ...], num_parts: int) -> list[tuple[int, ...]]:
    """Shapes of the stored parts of a canonical tensor of this shape."""
    num_experts, rows = shape[:2]
    if layout.is_one_by_one:
        return [(rows * num_experts // num_parts, *shape[2:])] * num_parts
    if layout.is_mxfp4:
        scales = (num_experts, rows, shape[2] // BLOCK_COLUMNS)
        return [(*scales, BLOCK_BYTES), scales]
    return [(num_experts, *reversed(shape[1:])) if layout.is_transposed else shape]


def part_dtypes(layout: ExpertLayout) -> tuple[str, ...]:
    return ("U8",) if layout.is_mxfp4 else FLOAT_DTYPES


def read_experts(
    layout: ExpertLayout,
    parts: Sequence[StoredTensor],
    shape: tuple[int, ...],
    slice_of: Callable[[StoredTensor], Any],
    *,
    dtype: torch.dtype,
) -> Tensor:  # `shape`
    tensor = torch.empty(shape, dtype=dtype)
    half = shape[1] // 2
    for mine, stored in zip(tensor, _experts(layout, parts, shape[0], slice_of), strict=True):
        if layout.is_interleaved:
            mine[:half].copy_(stored[0::2])  # casts to `dtype`
            mine[half:].copy_(stored[1::2])
        else:
            mine.copy_(stored)
    return tensor


def _experts(
    layout: ExpertLayout, parts: Sequence[StoredTensor], num_experts: int, slice_of: Callable[[StoredTensor], Any]
) -> Iterator[Tensor]:
    """Yield [out, in] or [out] of each expert. A slice must not outlive the next call of `slice_of`."""
    if layout.is_one_by_one:
        num_parts = len(parts) // num_experts
        for start in range(0, len(parts), num_parts):
            yield torch.cat([slice_of(part)[:] for part in parts[start : start + num_parts]])
        return
    scales = slice_of(parts[1])[:] if layout.is_mxfp4 else None
    whole = slice_of(parts[0])
    for i in range(num_experts):
        (stored,) = whole[i : i + 1]
        if scales is not None:
            stored = dequantize_mxfp4(stored, scales[i])
        yield stored.t() if layout.is_transposed else stored
