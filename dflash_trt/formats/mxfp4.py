"""MXFP4: E2M1 values in blocks of 32 along `in`, each with an E8M0 scale, as in gpt-oss; weight-only.

    code c = sign << 3 | magnitude index; byte j of a row holds column 2j in bits 0-3 and column 2j + 1 in bits 4-7
    W[n, k] = e2m1(code[n, k]) * 2 ** (block_scale[n, k // 32] - 127)

OCP Microscaling Formats, v1.0. A scale of 255 is NaN there, and is refused when a checkpoint is read. Same results as
`transformers.integrations.mxfp4.convert_moe_quantized_tensors`. Quantization gives the values of ModelOpt 0.47's
`MXFP4QTensor`: the least power of two that lets no value of a block exceed 6, and ties to the smaller magnitude.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dflash_trt.formats.base import QuantizedWeight, T, TensorLayout, WeightFormat
from dflash_trt.formats.nvfp4 import E2M1_BOUNDS, E2M1_MAX, e2m1_values

BLOCK_SIZE: Final = 32
BLOCK_BYTES: Final = BLOCK_SIZE // 2
NAN_SCALE: Final = 255

_BIAS = 127


@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4Weight(QuantizedWeight[T]):
    """Codes with a power of two per block. `in` is a multiple of 32."""

    codes: T  # uint8 [..., out, in / 2], two codes per byte, the even column in the low nibble
    block_scale: T  # uint8 [..., out, in / 32]: 127 + the power of two


class Mxfp4(WeightFormat):
    name = "mxfp4"
    weight_type = Mxfp4Weight
    columns_per_block = BLOCK_SIZE

    def layout(self, shape: tuple[int, ...], segments: Sequence[int]) -> dict[str, TensorLayout]:
        *leading, columns = shape
        return {
            "codes": TensorLayout("uint8", (*leading, columns // 2)),
            "block_scale": TensorLayout("uint8", (*leading, columns // BLOCK_SIZE)),
        }

    def quantize_matrix(
        self, weight: Tensor, *, segments: Sequence[int], weight_amax: Tensor, input_amax: Tensor | None
    ) -> QuantizedWeight[Tensor]:
        rows, columns = weight.shape
        blocks = weight.float().view(rows, columns // BLOCK_SIZE, BLOCK_SIZE)
        powers = (blocks.abs().amax(dim=-1) / E2M1_MAX).log2().clamp(min=-_BIAS).ceil()
        scaled = (blocks / powers.exp2()[..., None]).flatten(1)
        magnitudes = torch.bucketize(scaled.abs(), torch.tensor(E2M1_BOUNDS, device=scaled.device)).to(torch.uint8)
        nibbles = magnitudes | (scaled < 0).to(torch.uint8) << 3
        return Mxfp4Weight(
            segments=tuple(segments),
            input_scale=None,
            codes=nibbles[:, 0::2] | nibbles[:, 1::2] << 4,
            block_scale=(powers + _BIAS).to(torch.uint8),
        )

    def unscaled(self, weight: QuantizedWeight[Tensor], dtype: torch.dtype) -> Tensor:
        assert isinstance(weight, Mxfp4Weight)
        scale = weight.block_scale
        values = e2m1_values(weight.codes).to(dtype).view(*scale.shape, BLOCK_SIZE)
        return values.mul_(powers_of_two(scale, dtype)[..., None]).flatten(-2)


def powers_of_two(block_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales as numbers."""
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - _BIAS).to(block_scale.device, dtype)  # by scale
    return powers[block_scale.int()]


FORMATS = (Mxfp4(),)
