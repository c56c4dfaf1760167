"""INT8: integers with a scale per row of the weight, and activations in integers with a scale per token; W8A8.

    W[n, k] = codes[n, k] * weight_scale[n]                  weight_scale is amax / 127 of a row
    s[t] = max(max |x[t]| / 127, 2**-126)                    while running, in float32, whatever x is
    q[t, k] = clamp(round(x[t, k] / s[t]), -127, 127)        to nearest, ties to even
    y[t, n] = float32(sum over k of q[t, k] * codes[n, k]) * weight_scale[n] * s[t] + bias[n]

The sum is one of integers in 32 bits, exact for up to 65,536 inputs; each step after it rounds to float32, from left
to right, and y is then rounded to the dtype of x. Ranks that divide the inputs of a layer scale their parts of a token.

Codes made here are -127 to 127; -128 occurs in checkpoints of compressed-tensors, whose scale is amax / 127.5. Its W8A8
with dynamic activations per token is this arithmetic, as vLLM computes it (`scaled_int8_quant`, `cutlass_scaled_mm`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from dflash_trt.formats.base import QuantizedWeight, T, TensorLayout, WeightFormat

LARGEST: Final = 127
MAX_COLUMNS: Final = 1 << 16  # 2**16 products of at most 127 * 128 are below 2**31

SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny  # of tokens of zeros, too, whose codes are 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Weight(QuantizedWeight[T]):
    """Codes with a scale per row; activations have no stored scale."""

    per_segment: ClassVar[tuple[str, ...]] = ("input_scale",)

    weight_scale: T  # float32 [..., out]
    codes: T  # int8 [..., out, in]


class Int8(WeightFormat):
    name = "int8"
    weight_type = Int8Weight
    first_capability = (8, 0)  # Ampere's tensor cores
    instead = "Use `none`."
    has_token_scales = True
    max_columns = MAX_COLUMNS

    def layout(self, shape: tuple[int, ...], segments: Sequence[int]) -> dict[str, TensorLayout]:
        return {"codes": TensorLayout("int8", shape), "weight_scale": TensorLayout("float32", shape[:-1])}

    def quantize_matrix(
        self, weight: Tensor, *, segments: Sequence[int], weight_amax: Tensor, input_amax: Tensor | None
    ) -> QuantizedWeight[Tensor]:
        codes, scale = token_codes(weight)
        return Int8Weight(segments=tuple(segments), weight_scale=scale.squeeze(1), codes=codes)


def token_codes(x: Tensor) -> tuple[Tensor, Tensor]:  # [N, in] -> int8 [N, in], float32 [N, 1]
    """Codes of rows with their scales; a scale that is not finite makes the row's results so."""
    wide = x.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (wide / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


FORMATS = (Int8(),)
