"""The weights of an engine, one at a time: tensors of the checkpoints in, the engine's tensors out.

Packs what the plan says, keeps what a checkpoint holds quantized, and adds the quantized copies of the head.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

import torch
from torch import Tensor

from dflash_trt.checkpoint.sharding import shard
from dflash_trt.core.mapping import Mapping as RankMapping
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.quantization import Calibration
from dflash_trt.core.weight_spec import segments_of
from dflash_trt.formats.base import QuantizedWeight, segment_amax
from dflash_trt.formats.registry import engine_tensors, field_spec, format_with, weight_format
from dflash_trt.quantize.plan import PlannedLinear, QuantizationPlan

NamedTensors = Iterable[tuple[str, Tensor]]


def engine_stream(
    tensors: NamedTensors,
    plan: QuantizationPlan,
    calibration: Calibration,
    *,
    dtype: torch.dtype,
    mapping: RankMapping | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """`CheckpointPair.iter_weights` as the tensors of `engine_dir`, in the same order.

    One weight is in memory at a time. With a `mapping` of several ranks, `tensors` are that rank's, except
    `whole_weights`, which are cut here: every rank then holds its part of the same codes.

    Raises:
        CheckpointError: a weight without a usable range.
    """
    mapping = mapping or RankMapping()
    planned = {linear.name: linear for linear in plan.linears}
    copies = _copies(plan)
    head, uncut = _head(plan), whole_weights(plan)
    table, quantized_copies = plan.table(), dict[str, Tensor]()
    for name, tensor in joined(tensors, dtype=dtype):
        if name == head:
            for linear in copies:
                quantized_copies |= _quantized_shard(linear, tensor, calibration, mapping)
        known = planned.get(name)
        if known is not None and known.is_to_be_quantized:
            yield from _quantized_shard(known, tensor, calibration, mapping).items()
        else:
            yield name, shard(tensor, table[name], mapping) if name in uncut else tensor
    yield from quantized_copies.items()


def whole_weights(plan: QuantizationPlan) -> frozenset[str]:
    """Weights that every rank must read whole, because their ranges cover the whole weight."""
    names = {linear.name for linear in plan.linears if linear.is_to_be_quantized}
    return frozenset(names | ({_head(plan)} if _copies(plan) else set()))


def _copies(plan: QuantizationPlan) -> list[PlannedLinear]:
    """Quantized copies of the heads; last in the file."""
    models = engine_weights(plan.target, plan.draft, None)
    return [linear for linear in plan.linears if linear.name not in models]


def _head(plan: QuantizationPlan) -> str:
    return "target.embedding" if plan.target.is_embedding_tied else "target.lm_head"


def _quantized_shard(
    linear: PlannedLinear, weight: Tensor, calibration: Calibration, mapping: RankMapping
) -> dict[str, Tensor]:
    """A whole weight, quantized, then cut as the weight is, but for what every rank has whole."""
    quantized = quantize_linear(linear, weight, calibration)
    known = weight_format(linear.format or "")

    def cut(field: str, tensor: Tensor) -> Tensor:
        return shard(tensor, field_spec(linear.spec, known, field, tuple(tensor.shape)), mapping)

    return engine_tensors(linear.name, quantized if mapping.world_size == 1 else quantized.map_tensors(cut))


def quantize_linear(linear: PlannedLinear, weight: Tensor, calibration: Calibration) -> QuantizedWeight[Tensor]:
    """One weight in its planned format; all segments share its activation scale and NVFP4 global scale.

    One scale each lets a fused GEMM quantize its input once; the ranges of q, k and v, or of gate and up, are close,
    and E4M3 block scales absorb the rest. FP8 keeps a weight scale per segment, which costs nothing, except in experts:
    ModelOpt gives gate and up one, and its exports and an engine hold the same codes.
    """
    assert linear.format is not None
    known, segments = weight_format(linear.format), segments_of(linear.spec)
    weight_amax = segment_amax(weight, segments)
    if linear.shares_weight_scale:
        weight_amax = weight_amax.amax(dim=-1, keepdim=True).expand_as(weight_amax).clone()
    input_amax = None
    if known.has_input_scale:
        input_amax = torch.full(weight_amax.shape, calibration.input_amax[linear.name])
    return known.quantize(weight, segments=segments, weight_amax=weight_amax, input_amax=input_amax)


def joined(tensors: NamedTensors, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Join parts of fused layers, `NAME/0`, `NAME/1`, ..., into unquantized tensors of `dtype`."""
    for (name, is_in_parts), group in groupby(tensors, key=lambda item: (item[0].split("/")[0], "/" in item[0])):
        if not is_in_parts:
            yield from group
            continue
        held = dict(group)
        num_parts = 1 + max(int(part.split("/")[1].split(".")[0]) for part in held)
        yield name, torch.cat([_plain_part(f"{name}/{i}", held).to(dtype) for i in range(num_parts)])


def _plain_part(name: str, held: Mapping[str, Tensor]) -> Tensor:
    """A part as it is, or dequantized when its scales came with it."""
    prefix = f"{name}."
    scales = {key.removeprefix(prefix): tensor for key, tensor in held.items() if key.startswith(prefix)}
    if not scales:
        return held[name]
    tensors = {"codes": held[name], **scales}
    known = format_with(tensors)
    return known.dequantize(known.weight_of((len(held[name]),), tensors))
