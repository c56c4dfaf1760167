"""FP8: E4M3 "fn" (no infinity, largest 448, smallest subnormal 2**-9); W8A8 or W8A16.

Rounds to nearest even, saturating.

`fp8`, W8A8, per tensor:

    W_s = codes * weight_scale[s]
    x_s = e4m3(clamp(x / input_scale[s], -448, 448)) * input_scale[s]          static, per tensor

`weight_scale` is amax / 448, likewise `input_scale`. The codes equal ModelOpt 0.47's exports, bit for bit,
when given the same ranges: the division is in the weight's own dtype, so bfloat16 weights round twice.

`fp8_w8a16`, weight-only, per channel: W[n, k] = codes[n, k] * weight_scale[n], a row's weight_scale being amax / 448.
It also holds weights per tensor that come without a scale for their activations: a row's scale is then the tensor's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dflash_trt.formats.base import E4M3_MAX, QuantizedWeight, T, TensorLayout, WeightFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Weight(QuantizedWeight[T]):
    """Codes with a scale per segment."""

    weight_scale: T
    codes: T  # float8_e4m3fn [..., out, in]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8RowWeight(QuantizedWeight[T]):
    """Codes with a scale per row, for activations that are not quantized."""

    per_segment: ClassVar[tuple[str, ...]] = ("input_scale",)

    weight_scale: T  # float32 [..., out]
    codes: T  # float8_e4m3fn [..., out, in]


class Fp8(WeightFormat):
    name = "fp8"
    weight_type = Fp8Weight
    first_capability = (8, 9)  # Ada and Hopper
    instead = "Use `none`, or `nvfp4_w4a16`, whose weights are dequantized before the GEMM."
    has_input_scale = True
    modelopt_activation: ClassVar = {"num_bits": (4, 3), "axis": None}  # ModelOpt's FP8_DEFAULT_CFG

    def layout(self, shape: tuple[int, ...], segments: Sequence[int]) -> dict[str, TensorLayout]:
        scales = TensorLayout("float32", (*shape[:-2], len(segments)))
        return {"codes": TensorLayout("float8_e4m3fn", shape), "weight_scale": scales, "input_scale": scales}

    def quantize_matrix(
        self, weight: Tensor, *, segments: Sequence[int], weight_amax: Tensor, input_amax: Tensor | None
    ) -> QuantizedWeight[Tensor]:
        scale = weight_amax.float() / E4M3_MAX
        parts = torch.split(weight, list(segments))
        return Fp8Weight(
            segments=tuple(segments),
            weight_scale=scale,
            input_scale=None if input_amax is None else input_amax.float() / E4M3_MAX,
            # In the weight's dtype: a 0-d scale does not promote bfloat16.
            codes=torch.cat([e4m3(part / scale[s]) for s, part in enumerate(parts)]),
        )


class Fp8WeightOnly(WeightFormat):
    name = "fp8_w8a16"
    weight_type = Fp8RowWeight

    def layout(self, shape: tuple[int, ...], segments: Sequence[int]) -> dict[str, TensorLayout]:
        return {"codes": TensorLayout("float8_e4m3fn", shape), "weight_scale": TensorLayout("float32", shape[:-1])}

    def quantize_matrix(
        self, weight: Tensor, *, segments: Sequence[int], weight_amax: Tensor, input_amax: Tensor | None
    ) -> QuantizedWeight[Tensor]:
        scale = e4m3_scale(weight.float().abs().amax(dim=1))
        codes = e4m3(weight.float() / scale[:, None])
        return Fp8RowWeight(segments=tuple(segments), weight_scale=scale, codes=codes)


def e4m3_scale(amax: Tensor) -> Tensor:  # float32, any shape
    """Scale for a range; 1 where all values are 0."""
    return torch.where(amax > 0, amax.float() / E4M3_MAX, 1.0)


def e4m3(values: Tensor) -> Tensor:  # float8_e4m3fn
    """Round to nearest even, saturating."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


FORMATS = (Fp8(), Fp8WeightOnly())
