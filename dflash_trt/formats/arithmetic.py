"""From plain weights and measured ranges to packed weights, and back: the definitions of `packed` in PyTorch.

The codes are those ModelOpt's exporter writes, bit for bit, when given the same ranges: FP8 divides in the weight's
own dtype (so bfloat16 weights round twice), NVFP4 in float32.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dflash_trt.core.errors import CheckpointError, problem
from dflash_trt.core.packed_spec import packed_tensors, segments_of
from dflash_trt.core.quantization import WeightFormat
from dflash_trt.core.weight_spec import WeightSpec
from dflash_trt.formats.base import (
    BLOCK_SIZE,
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    Fp8Weight,
    Nvfp4Weight,
    PackedWeight,
)

_MIN_BLOCK_SCALE = 2.0**-9  # E4M3's smallest; a block scale of 0 would lose the block
_ROWS_AT_ONCE = 4096  # keeps the float32 intermediates of a large weight small


def pack(
    weight: Tensor,  # [out, in], float
    weight_format: WeightFormat,
    *,
    segments: Sequence[int],
    weight_amax: Tensor,  # float32 [segments]
    input_amax: Tensor | None,  # float32 [segments]; None for weight-only formats
) -> PackedWeight[Tensor]:
    """Quantize a weight with the ranges of its segments.

    Raises:
        CheckpointError: a range that is not finite and positive.
    """
    _require_ranges(weight_amax, "weight")
    if input_amax is not None:
        _require_ranges(input_amax, "activation")
    assert (input_amax is None) == (weight_format == "nvfp4_w4a16")
    parts = torch.split(weight, list(segments))
    if weight_format == "fp8":
        scale = weight_amax.float() / E4M3_MAX
        return Fp8Weight(
            segments=tuple(segments),
            weight_scale=scale,
            input_scale=None if input_amax is None else input_amax.float() / E4M3_MAX,
            codes=torch.cat([_fp8_codes(part, scale[s]) for s, part in enumerate(parts)]),
        )
    scale = weight_amax.float() / (E2M1_MAX * E4M3_MAX)
    packed = [_nvfp4_codes(part, scale[s]) for s, part in enumerate(parts)]
    return Nvfp4Weight(
        segments=tuple(segments),
        weight_scale=scale,
        input_scale=None if input_amax is None else input_amax.float() / (E2M1_MAX * E4M3_MAX),
        codes=torch.cat([codes for codes, _ in packed]),
        block_scale=torch.cat([block_scale for _, block_scale in packed]),
    )


def segment_amax(weight: Tensor, segments: Sequence[int]) -> Tensor:  # float32 [segments]
    """The largest magnitude of each segment."""
    parts = torch.split(weight, list(segments))
    return torch.tensor([part.abs().max().item() for part in parts], dtype=torch.float32)


def dequantize(weight: PackedWeight[Tensor]) -> Tensor:  # float32 [out, in]
    """Exactly W of `packed`, computed in float32."""
    return unscaled(weight, torch.float32) * row_scale(weight)[:, None]


def unscaled(weight: PackedWeight[Tensor], dtype: torch.dtype) -> Tensor:  # [out, in]
    """W without `weight_scale`: exact in bfloat16 too, for a code times a block scale has 6 significant bits."""
    if isinstance(weight, Fp8Weight):
        values: Tensor = weight.codes.to(dtype)
        return values
    assert isinstance(weight, Nvfp4Weight)
    rows, packed_columns = weight.codes.shape
    values = torch.empty(rows, packed_columns * 2, dtype=dtype, device=weight.codes.device)
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        codes = e2m1_values(weight.codes[part])  # float32
        scale = weight.block_scale[part].float()
        values[part] = (codes.view(*scale.shape, BLOCK_SIZE) * scale[:, :, None]).flatten(1).to(dtype)
    return values


def row_scale(weight: PackedWeight[Tensor]) -> Tensor:  # float32 [out]
    """`weight_scale`, repeated for the rows of each segment."""
    return weight.weight_scale.repeat_interleave(torch.tensor(weight.segments, device=weight.weight_scale.device))


def e2m1_values(codes: Tensor) -> Tensor:  # uint8 [N, in / 2] -> float32 [N, in]
    """What packed nibbles stand for."""
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=codes.device)
    nibbles = torch.stack((codes & 0x0F, codes >> 4), dim=-1).flatten(-2)  # column 2j is the low nibble of byte j
    return table[nibbles.int()]


def e2m1_codes(values: Tensor) -> Tensor:  # float32, any shape -> uint8 of the same shape
    """Round to E2M1, ties to even, saturating; code = sign << 3 | magnitude index."""
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    # Counting the bounds below a value rounds ties down; the odd bounds are moved a hair, so that theirs go up.
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros_like(bounds[1::2]))
    magnitude = torch.bucketize(values.abs(), bounds).to(torch.uint8)
    return magnitude | ((values < 0).to(torch.uint8) << 3)


def e4m3(values: Tensor) -> Tensor:  # float8_e4m3fn
    """Round to nearest even, saturating."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def engine_tensors(name: str, weight: PackedWeight[Tensor]) -> dict[str, Tensor]:
    """A packed weight under the names of `core/packed_spec.packed_tensors`, in their order."""
    assert isinstance(weight, Fp8Weight | Nvfp4Weight)
    tensors = {name: weight.codes}
    if isinstance(weight, Nvfp4Weight):
        tensors[f"{name}.block_scale"] = weight.block_scale
    tensors[f"{name}.weight_scale"] = weight.weight_scale
    if weight.input_scale is not None:
        tensors[f"{name}.input_scale"] = weight.input_scale
    return tensors


def packed_weight(
    name: str, spec: WeightSpec, weight_format: WeightFormat, tensors: Mapping[str, Tensor]
) -> PackedWeight[Tensor]:
    """The reverse of `engine_tensors`; `spec` is that of the tensors' rank. Raises KeyError on a missing tensor."""
    expected = {part.name for part in packed_tensors(name, spec, weight_format)}
    input_name = f"{name}.input_scale"
    weight_scale = tensors[f"{name}.weight_scale"]
    input_scale = tensors[input_name] if input_name in expected else None
    if weight_format == "fp8":
        return Fp8Weight(
            segments=segments_of(spec), weight_scale=weight_scale, input_scale=input_scale, codes=tensors[name]
        )
    return Nvfp4Weight(
        segments=segments_of(spec),
        weight_scale=weight_scale,
        input_scale=input_scale,
        codes=tensors[name],
        block_scale=tensors[f"{name}.block_scale"],
    )


def _fp8_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """In the weight's dtype: `scale` has no axes, so it does not promote bfloat16."""
    return e4m3(weight / scale)


def _nvfp4_codes(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
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


def block_scales(blocks: Tensor, scale: Tensor) -> Tensor:  # float32 [..., blocks, 16] -> e4m3 [..., blocks]
    """The E4M3 scale of each block of 16, given the global one."""
    wanted = blocks.abs().amax(dim=-1) / (E2M1_MAX * scale)
    wanted = torch.where(wanted == 0, torch.ones_like(wanted), wanted)
    return wanted.clamp(_MIN_BLOCK_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)


def _require_ranges(amax: Tensor, what: str) -> None:
    if bool((torch.isfinite(amax) & (amax > 0)).all()):
        return
    found = ", ".join(f"{value:g}" for value in amax.tolist())
    mend = "Check the checkpoint and the calibration prompts, or keep this linear plain with an override."
    raise CheckpointError(problem(f"{what} ranges", expected="finite and positive magnitudes", found=found, mend=mend))
