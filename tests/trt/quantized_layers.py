"""TensorRT's Quantize, Dequantize and DynamicQuantize layers in torch, as its operator documentation defines them.

FP4 data travels as uint8 [..., n / 2], the even element in the low nibble, as in the weights TensorRT is given.
"""

import torch
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def constant_of(stored: Tensor, data_type: str, shape: tuple[int, ...]) -> Tensor:
    """What a constant of this type and shape holds, from the bytes that TensorRT was given."""
    if data_type == "FP4":
        return stored.reshape(*shape[:-1], shape[-1] // 2)
    if data_type == "INT4":
        nibbles = torch.stack((stored & 15, stored >> 4), -1).reshape(shape).to(torch.int8)
        return torch.where(nibbles >= 8, nibbles - 16, nibbles)
    if data_type == "INT8":
        return stored.flatten().view(torch.int8).reshape(shape)
    if data_type == "E8M0":
        return stored.view(torch.float8_e8m0fnu).reshape(shape)
    names = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8_e4m3fn"}
    assert stored.dtype == getattr(torch, names[data_type]) and tuple(stored.shape) == shape
    return stored


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """Per tensor, to FP8."""
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def dequantize(
    codes: Tensor, scale: Tensor, *, axis: int, dtype: torch.dtype, block_shape: tuple[int, ...] = ()
) -> Tensor:
    """Per tensor (scalar scale), per channel (rank 1), or per block: along `axis`, or of `block_shape`."""
    values = unpack_fp4(codes) if codes.dtype == torch.uint8 else codes.float()
    if scale.dim() == 1 and values.dim() > 1:
        scale = scale.reshape([-1 if i == axis else 1 for i in range(values.dim())])
    elif scale.dim() > 1:
        blocks = block_shape or [size // scale.shape[i] if i == axis else 1 for i, size in enumerate(values.shape)]
        for i, size in enumerate(blocks):
            scale = scale.repeat_interleave(size, dim=i)
        assert scale.shape == values.shape
    return (values * scale.float()).to(dtype)


def dynamic_quantize(x: Tensor, global_scale: Tensor, *, block_size: int) -> tuple[Tensor, Tensor]:
    """(FP4 codes, FP8 block scales), blocks along the last axis."""
    blocks = x.float().unflatten(-1, (-1, block_size))
    largest = blocks.abs().amax(-1)
    scales = (largest / (6 * global_scale)).clamp(2.0**-9, 448)
    scales = torch.where(largest > 0, scales, 1.0).to(torch.float8_e4m3fn)
    scaled = blocks / (scales.float() * global_scale)[..., None]
    return pack_fp4(scaled.flatten(-2)), scales


def unpack_fp4(codes: Tensor) -> Tensor:
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    return torch.where(nibbles >= 8, -1.0, 1.0) * E2M1[nibbles & 7]


def pack_fp4(x: Tensor) -> Tensor:
    """Round to nearest, ties to the even code, saturating."""
    distance = (x.abs()[..., None].clamp(max=6) - E2M1).abs()
    nearest = distance.amin(-1, keepdim=True)
    is_nearest = distance == nearest
    even_first = torch.arange(8) + 8 * (torch.arange(8) % 2)  # an odd code loses a tie
    index = torch.where(is_nearest, even_first, 99).argmin(-1)
    nibbles = (index + 8 * (x < 0)).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
