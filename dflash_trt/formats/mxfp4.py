"""Dequantization of MXFP4 experts, as in gpt-oss.

A block is 32 E2M1 values along the input features, two to a byte, low nibble first, with one E8M0 scale (OCP
Microscaling Formats, v1.0). Same results as `transformers.integrations.mxfp4.convert_moe_quantized_tensors`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

BLOCK_COLUMNS = 32
BLOCK_BYTES = BLOCK_COLUMNS // 2

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor((*_E2M1, *(-value for value in _E2M1)))
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), dim=1)  # [byte, (low, high)]
_POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 127)  # of every scale; the last, NaN in E8M0, is infinite


def dequantize_mxfp4(
    blocks: Tensor,  # uint8 [rows, G, 16]
    scales: Tensor,  # uint8 [rows, G]: 127 + the power of two
) -> Tensor:  # float32 [rows, 32 * G]
    """Dequantize, exactly. Looks up two codes at a time, since a checkpoint has billions."""
    values = F.embedding(blocks.int(), _PAIRS).flatten(-2)  # [rows, G, 32]
    return values.mul_(_POWERS[scales.int()][..., None]).flatten(1)
