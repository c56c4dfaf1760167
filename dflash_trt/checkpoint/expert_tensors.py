"""Layouts of a layer's experts in checkpoints, and their conversion to the canonical one.

Canonical: [experts, out, in], and for gate_up all gate rows above all up rows. Memory holds only one expert in addition
to the tensor that is being filled.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_trt.checkpoint.sharding import rank_experts, shard_expert
from dflash_trt.checkpoint.tensors import StoredTensor
from dflash_trt.core.errors import CheckpointError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.weight_spec import WeightSpec, rank_shard, segments_of
from dflash_trt.formats.mxfp4 import BLOCK_BYTES, BLOCK_SIZE, NAN_SCALE, Mxfp4

SliceOf = Callable[[StoredTensor], Any]
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
        scales = (num_experts, rows, shape[2] // BLOCK_SIZE)
        return [(*scales, BLOCK_BYTES), scales]
    return [(num_experts, *reversed(shape[1:])) if layout.is_transposed else shape]


def part_dtypes(layout: ExpertLayout) -> tuple[str, ...]:
    return ("U8",) if layout.is_mxfp4 else FLOAT_DTYPES


def read_experts(
    layout: ExpertLayout,
    parts: Sequence[StoredTensor],
    spec: WeightSpec,
    slice_of: SliceOf,
    *,
    dtype: torch.dtype,
    mapping: Mapping,
) -> Tensor:  # rank_shard(spec, mapping).shape
    """One rank's part of a weight or bias in a float dtype."""
    tensor = torch.empty(rank_shard(spec, mapping).shape, dtype=dtype)
    mine = rank_experts(spec.num_experts, mapping)
    _fill(tensor, _experts(layout, parts, mine, spec.num_experts, slice_of), layout, spec, mapping)
    return tensor


def read_mxfp4_experts(
    layout: ExpertLayout, parts: Sequence[StoredTensor], spec: WeightSpec, slice_of: SliceOf, *, mapping: Mapping
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an `Mxfp4Weight` by field, as they are stored.

    Raises:
        CheckpointError: a scale is NaN.
    """
    mine = rank_experts(spec.num_experts, mapping)
    share = rank_shard(spec, mapping)
    layouts = Mxfp4().layout(share.shape, segments_of(share))
    for (field, wanted), stored in zip(layouts.items(), parts, strict=True):
        tensor = torch.empty(wanted.shape, dtype=torch.uint8)
        whole = slice_of(stored)
        _fill(tensor, (whole[i : i + 1][0].flatten(1) for i in mine), layout, spec, mapping)
        if field == "block_scale" and bool((tensor == NAN_SCALE).any()):
            subject, hint = f"tensor '{stored.name}'", "Download the checkpoint again."
            raise CheckpointError.about(subject, expected="E8M0 scales", found=f"NaN ({NAN_SCALE})", hint=hint)
        yield field, tensor


def _fill(tensor: Tensor, experts: Iterable[Tensor], layout: ExpertLayout, spec: WeightSpec, mapping: Mapping) -> None:
    """Copy experts into this rank's tensor one by one; casts to its dtype."""
    for mine, stored in zip(tensor, experts, strict=True):
        rows = torch.cat((stored[0::2], stored[1::2])) if layout.is_interleaved else stored
        mine.copy_(shard_expert(rows, replace(spec, shape=(spec.num_experts, *rows.shape)), mapping))


def _experts(
    layout: ExpertLayout, parts: Sequence[StoredTensor], mine: range, num_experts: int, slice_of: SliceOf
) -> Iterator[Tensor]:
    """Yield [out, in] or [out] of each expert. A slice must not outlive the next call of `slice_of`."""
    if layout.is_one_by_one:
        num_parts = len(parts) // num_experts
        for i in mine:
            yield torch.cat([slice_of(part)[:] for part in parts[i * num_parts : (i + 1) * num_parts]])
        return
    whole = slice_of(parts[0])
    for i in mine:
        (stored,) = whole[i : i + 1]
        yield stored.t() if layout.is_transposed else stored
