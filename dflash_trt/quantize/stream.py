"""The weights of an engine, one at a time: tensors of the checkpoints in, the engine's tensors out.

Packs what the plan says, keeps what a checkpoint holds packed, and adds the packed copies of the head.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

import torch
from torch import Tensor

from dflash_trt.core.packed_spec import engine_table, segments_of
from dflash_trt.core.quantization import Calibration, WeightFormat
from dflash_trt.core.weight_spec import WeightSpec
from dflash_trt.quantize.pack import dequantize, engine_tensors, pack, packed_weight, segment_amax
from dflash_trt.quantize.packed import PackedWeight
from dflash_trt.quantize.plan import PlannedLinear, QuantizationPlan

NamedTensors = Iterable[tuple[str, Tensor]]


def engine_stream(
    tensors: NamedTensors, plan: QuantizationPlan, calibration: Calibration, *, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """`CheckpointPair.iter_weights` as the tensors of `engine_dir`, in the same order; one weight in memory at a time.

    Raises:
        CheckpointError: a weight without a usable range.
    """
    planned = {linear.name: linear for linear in plan.linears}
    models = engine_table(plan.target, plan.draft, None)
    copies = [linear for linear in plan.linears if linear.name not in models]  # of the head; last in the file
    head = "target.embedding" if plan.target.is_embedding_tied else "target.lm_head"
    packed_copies: dict[str, Tensor] = {}
    for name, tensor in joined(tensors, dtype=dtype):
        if name == head:
            for linear in copies:
                packed_copies |= engine_tensors(linear.name, pack_linear(linear, tensor, calibration))
        known = planned.get(name)
        if known is None or known.format is None or known.is_stored:
            yield name, tensor
        else:
            yield from engine_tensors(name, pack_linear(known, tensor, calibration)).items()
    yield from packed_copies.items()


def pack_linear(linear: PlannedLinear, weight: Tensor, calibration: Calibration) -> PackedWeight[Tensor]:
    """One weight in its planned format, with one activation scale and, for NVFP4, one global scale for all segments.

    One scale each lets a fused GEMM quantize its input once; the ranges of q, k and v, or of gate and up, are close,
    and E4M3 block scales absorb the rest. FP8 keeps a weight scale per segment, which costs nothing.
    """
    assert linear.format is not None
    segments = segments_of(linear.spec)
    weight_amax = segment_amax(weight, segments)
    if linear.format != "fp8":
        weight_amax = weight_amax.max().expand(len(segments)).clone()
    input_amax = None
    if linear.format != "nvfp4_w4a16":
        input_amax = torch.full((len(segments),), calibration.input_amax[linear.name])
    return pack(weight, linear.format, segments=segments, weight_amax=weight_amax, input_amax=input_amax)


def joined(tensors: NamedTensors, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Fused linears whose parts came one by one, as `NAME/0`, `NAME/1`, ..., become plain tensors of `dtype`."""
    for (name, is_in_parts), group in groupby(tensors, key=lambda item: (item[0].split("/")[0], "/" in item[0])):
        if not is_in_parts:
            yield from group
            continue
        held = dict(group)
        num_parts = 1 + max(int(part.split("/")[1].split(".")[0]) for part in held)
        yield name, torch.cat([_plain_part(f"{name}/{i}", held).to(dtype) for i in range(num_parts)])


def _plain_part(name: str, held: Mapping[str, Tensor]) -> Tensor:
    tensor = held[name]
    if f"{name}.weight_scale" not in held:
        return tensor
    weight_format: WeightFormat = "fp8"
    columns = tensor.shape[1]
    if tensor.dtype == torch.uint8:
        weight_format, columns = ("nvfp4" if f"{name}.input_scale" in held else "nvfp4_w4a16"), 2 * columns
    spec = WeightSpec(shape=(tensor.shape[0], columns))
    return dequantize(packed_weight(name, spec, weight_format, held))
