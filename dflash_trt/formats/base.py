"""The interface of a weight format, and the quantized weight that a Linear has in place of a tensor.

A canonical linear layer may be several fused along its rows (q, k, v; gate, up). Each of these *segments* has its own
scalar scales: `segments` are their row counts, with sum `out`, and a tensor of scales has one float32 per segment,
unless the format has one per row, or block scales alone. In exact arithmetic, for the rows of segment s,

    y[:, rows of s] = x_s @ W_s.T + bias[rows of s]

where W_s is the dequantized weight, as defined by the format, and x_s is x if `input_scale` is None, else x quantized
and dequantized with input_scale[s]; a format with `has_token_scales` says how it quantizes x. Scales that are equal in
all segments are stored equal, so that a backend can see that one activation quantization serves the whole GEMM.

Weights are N-D: the last two axes are out and in, leading axes are experts. `T` is a backend's tensor handle.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

import torch
from torch import Tensor

from dflash_trt.core.dtype import DType, num_bytes_of
from dflash_trt.core.errors import CheckpointError

T = TypeVar("T")
U = TypeVar("U")
K = TypeVar("K")

E4M3_MAX: Final = 448.0
SCALES: Final = ("weight_scale", "input_scale")

SliceRows = Callable[[T, int, int], T]  # (tensor, start, stop) -> rows start .. stop - 1 of axis 0


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Dtype and shape of one tensor of a quantized weight."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.dtype) * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedWeight(Generic[T]):
    """Fields that all formats share; a format's subclass adds its codes."""

    per_segment: ClassVar[tuple[str, ...]] = SCALES  # fields with one number per segment; the others have rows
    rows_per_block: ClassVar[Mapping[str, int]] = {}  # fields with a row per block of rows; segments share no block

    segments: tuple[int, ...]  # rows per stacked linear
    weight_scale: T | None = None  # float32 [..., segments], or [..., out] where it is not `per_segment`
    input_scale: T | None = None  # float32 [..., segments]; None means activations without static scales

    def tensors(self) -> dict[str, T]:
        """Tensors by field name, codes first and the scales that all formats have last."""
        own = [item.name for item in fields(self) if item.name != "segments" and item.name not in SCALES]
        found = {name: getattr(self, name, None) for name in (*own, *SCALES)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @classmethod
    def rows_of(cls, name: str, segments: Sequence[int]) -> tuple[int, ...]:
        """Rows of one field for each segment; the last block of a segment may have fewer rows than the others."""
        if name in cls.per_segment:
            return (1,) * len(segments)
        return tuple(-(-rows // cls.rows_per_block.get(name, 1)) for rows in segments)

    def map_tensors(self, change: Callable[[str, T], U]) -> QuantizedWeight[U]:
        """The same weight with `change(field name, tensor)` in place of every tensor."""
        changed: dict[str, Any] = {name: change(name, tensor) for name, tensor in self.tensors().items()}
        return cast("QuantizedWeight[U]", replace(self, **changed))


def slice_quantized(weight: QuantizedWeight[T], start: int, stop: int, slice_rows: SliceRows[T]) -> QuantizedWeight[T]:
    """Slice rows start .. stop - 1 of a matrix, which must be whole segments."""
    edges = [0]
    for rows in weight.segments:
        edges.append(edges[-1] + rows)
    assert start in edges and stop in edges and start < stop, f"rows {start}..{stop} cut a segment of {weight.segments}"
    first, last = edges.index(start), edges.index(stop)

    def cut(name: str, tensor: T) -> T:
        rows = weight.rows_of(name, weight.segments)
        return slice_rows(tensor, sum(rows[:first]), sum(rows[:last]))

    return replace(weight.map_tensors(cut), segments=weight.segments[first:last])


class WeightFormat(ABC):
    """One format: layout, arithmetic and hardware; `checkpoint/producers` knows how files store it."""

    name: ClassVar[str]
    weight_type: ClassVar[type[QuantizedWeight[Any]]]
    first_capability: ClassVar[tuple[int, int] | None] = (
        None  # CUDA compute capability of the first GPUs with it; None means any
    )
    instead: ClassVar[str] = ""  # hint for an older GPU
    has_input_scale: ClassVar[bool] = False  # activations are quantized too, with static scales from calibration
    has_token_scales: ClassVar[bool] = False  # activations are quantized too, a token with a scale that running finds
    shares_weight_scale: ClassVar[bool] = False  # all segments are quantized with the largest of their scales
    columns_per_block: ClassVar[int] = 1  # input features that share a block scale and are never split
    max_columns: ClassVar[int | None] = None  # input features that the sums hold
    has_partial_blocks: ClassVar[bool] = False  # the last block of a row or a segment may be smaller
    modelopt_activation: ClassVar[Mapping[str, Any]] = {}  # ModelOpt's description of the activation quantizer

    @property
    def is_weight_only(self) -> bool:
        """True if activations keep their dtype."""
        return not (self.has_input_scale or self.has_token_scales)

    @property
    def rows_per_block(self) -> int:
        """Output features of a segment that share a block scale and are never split."""
        return max(self.weight_type.rows_per_block.values(), default=1)

    @abstractmethod
    def layout(self, shape: tuple[int, ...], segments: Sequence[int]) -> dict[str, TensorLayout]:
        """Layout of a weight of this shape, by field, in the order of the file."""

    def unscaled(self, weight: QuantizedWeight[Tensor], dtype: torch.dtype) -> Tensor:
        """W [..., out, in] without `weight_scale`, rounded at most once; exact if block scales have few bits.

        By default the codes as numbers.
        """
        return weight.tensors()["codes"].to(dtype)

    @abstractmethod
    def quantize_matrix(
        self,
        weight: Tensor,  # [out, in], float
        *,
        segments: Sequence[int],
        weight_amax: Tensor,  # float32 [segments]
        input_amax: Tensor | None,  # float32 [segments]; None for weight-only formats
    ) -> QuantizedWeight[Tensor]:
        """Quantize one matrix; the ranges are valid."""

    def quantize(
        self, weight: Tensor, *, segments: Sequence[int], weight_amax: Tensor, input_amax: Tensor | None
    ) -> QuantizedWeight[Tensor]:
        """Quantize [..., out, in] with the ranges [..., segments] of its segments.

        Raises:
            CheckpointError: a range is not finite and positive.
        """
        _require_ranges(weight_amax, "weight")
        if input_amax is not None:
            _require_ranges(input_amax, "activation")
        assert (input_amax is not None) == self.has_input_scale
        if weight.dim() == 2:
            return self.quantize_matrix(weight, segments=segments, weight_amax=weight_amax, input_amax=input_amax)
        experts = [
            self.quantize(
                w,
                segments=segments,
                weight_amax=weight_amax[i],
                input_amax=None if input_amax is None else input_amax[i],
            )
            for i, w in enumerate(weight)
        ]
        return _stacked(experts)

    def dequantize(self, weight: QuantizedWeight[Tensor]) -> Tensor:
        """W [..., out, in] in float32, each product rounded once."""
        values = self.unscaled(weight, torch.float32)
        return values if weight.weight_scale is None else values * row_scale(weight)[..., None]

    def weight_of(self, segments: tuple[int, ...], tensors: Mapping[str, T]) -> QuantizedWeight[T]:
        """The inverse of `QuantizedWeight.tensors`."""
        return self.weight_type(segments=segments, **tensors)


def tensor_name(linear: str, field_name: str) -> str:
    """Canonical name of a quantized weight's tensor; codes have the name of the linear layer."""
    return linear if field_name == "codes" else f"{linear}.{field_name}"


def row_scale(weight: QuantizedWeight[Tensor]) -> Tensor:  # float32 [..., out]
    """`weight_scale`, repeated for the rows of each segment where it is one number for all of them."""
    scale = weight.weight_scale
    assert scale is not None, f"{type(weight).__name__} has no weight_scale"
    if "weight_scale" not in weight.per_segment:
        return scale
    return repeated_by_segment(scale, weight.segments)


def repeated_by_segment(scale: Tensor, segments: Sequence[int]) -> Tensor:  # [..., segments] -> [..., out]
    """One number of each segment for all of its rows; nothing waits for a device."""
    repeats = torch.tensor(segments, device=scale.device)
    return scale.repeat_interleave(repeats, dim=-1, output_size=sum(segments))


def runs_of_segments(keys: Iterable[K], segments: Sequence[int]) -> Iterator[tuple[K, int, int]]:
    """Runs of segments with one key, in order: the key, the first row, and the row after the last."""
    stop = 0
    for key, run in groupby(zip(keys, segments, strict=True), key=lambda pair: pair[0]):
        start, stop = stop, stop + sum(rows for _, rows in run)
        yield key, start, stop


def runs_of_one_input(weight: QuantizedWeight[Tensor]) -> Iterator[tuple[float | None, int, int]]:
    """`runs_of_segments` whose activations are quantized with one scale, None for unquantized ones."""
    scales = [None] * len(weight.segments) if weight.input_scale is None else weight.input_scale.tolist()
    return runs_of_segments(scales, weight.segments)


def is_of_experts(weight: QuantizedWeight[Tensor]) -> bool:
    """True if the tensors have an axis of experts before the others."""
    codes = next(iter(weight.tensors().values()))
    return codes.dim() > 2


def expert_of(weight: QuantizedWeight[Tensor], index: int) -> QuantizedWeight[Tensor]:
    """One expert's weight; views."""
    return weight.map_tensors(lambda _, tensor: tensor[index])


def segment_amax(weight: Tensor, segments: Sequence[int]) -> Tensor:  # float32 [..., segments]
    """Largest magnitude of each segment of [..., out, in]."""
    parts = torch.split(weight, list(segments), dim=-2)
    return torch.stack([part.abs().amax(dim=(-2, -1)) for part in parts], dim=-1).float()


def _stacked(weights: Sequence[QuantizedWeight[Tensor]]) -> QuantizedWeight[Tensor]:
    tensors = [weight.tensors() for weight in weights]
    return weights[0].map_tensors(lambda name, _: torch.stack([each[name] for each in tensors]))


def _require_ranges(amax: Tensor, subject: str) -> None:
    if bool((amax.isfinite() & (amax > 0)).all()):
        return
    found = ", ".join(f"{value:g}" for value in amax.flatten().tolist())
    hint = "Check the checkpoint and the calibration prompts, or keep this layer unquantized with an override."
    raise CheckpointError.about(f"{subject} ranges", expected="finite and positive magnitudes", found=found, hint=hint)
