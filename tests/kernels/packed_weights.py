"""Weights of every form that the kernels read, and the same as numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_trt.formats.fp8 import e4m3
from dflash_trt.formats.mxfp4 import Mxfp4
from dflash_trt.formats.nvfp4 import Nvfp4WeightOnly
from dflash_trt.kernels.launch_rules import FP8, FP8_BLOCK, INT4, INT8, MXFP4, NVFP4, PLAIN
from dflash_trt.kernels.packed_matrix import PackedMatrix

FORMS = {"plain": PLAIN, "fp8": FP8, "fp8_block": FP8_BLOCK, "mxfp4": MXFP4, "nvfp4": NVFP4, "int4": INT4, "int8": INT8}


@dataclass(frozen=True)
class Weight:
    packed: PackedMatrix
    values: Tensor  # float32 [E, out, in]
    input_scale: Tensor | None  # float32 [E, segments]


def make_weight(
    form: str,
    shape: tuple[int, int, int],  # [E, out, in]
    *,
    segments: tuple[int, ...],
    input_scales: tuple[float, ...] = (),  # of the segments; each expert's is another
    has_bias: bool = False,
    seed: int = 0,
) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    num_experts, out_size, in_size = shape
    dense = torch.randn(shape, generator=generator) * 0.2
    codes, block_scale, row_scale, block_rows = dense, None, None, None
    values = dense
    if form == "fp8":
        row_scale = torch.rand(num_experts, out_size, generator=generator) * 0.01 + 0.001
        codes = e4m3(dense / row_scale[..., None])
        values = codes.float() * row_scale[..., None]
    elif form == "fp8_block":
        block_rows = torch.cat([torch.arange(rows) // 128 for rows in segments])
        starts = [sum(-(-rows // 128) for rows in segments[:s]) for s in range(len(segments))]
        block_rows += torch.tensor(starts).repeat_interleave(torch.tensor(segments))
        columns = torch.arange(in_size) // 128
        block_scale = torch.rand(num_experts, int(block_rows.max()) + 1, int(columns.max()) + 1, generator=generator)
        by_element = block_scale[:, block_rows][:, :, columns] * 0.01 + 0.001
        block_scale = block_scale * 0.01 + 0.001
        codes = e4m3(dense / by_element)
        values = codes.float() * by_element
        block_rows = block_rows.int()
    elif form == "int8":
        row_scale = torch.rand(num_experts, out_size, generator=generator) * 0.01 + 0.001
        codes = (dense / row_scale[..., None]).round().clamp(-128, 127).to(torch.int8)
        values = codes.float() * row_scale[..., None]
    elif form == "int4":
        codes = torch.randint(0, 256, (num_experts, out_size, in_size // 2), generator=generator, dtype=torch.uint8)
        block_scale = (torch.rand(num_experts, out_size, in_size // 32, generator=generator) * 0.1).bfloat16()
        integers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).float() - 8
        values = (integers.unflatten(-1, (-1, 32)) * block_scale.float()[..., None]).flatten(-2)
    elif form in ("mxfp4", "nvfp4"):
        known = Mxfp4() if form == "mxfp4" else Nvfp4WeightOnly()
        amax = torch.stack([part.abs().amax(dim=(1, 2)) for part in dense.split(segments, dim=1)], dim=1)
        weight = known.quantize(dense, segments=segments, weight_amax=amax, input_amax=None)
        codes, block_scale, values = weight.codes, weight.block_scale, known.dequantize(weight)
        if form == "nvfp4":
            row_scale = weight.weight_scale.repeat_interleave(torch.tensor(segments), dim=-1)
    input_scale = None
    if input_scales:
        factors = 1 + torch.arange(num_experts)[:, None] / num_experts
        input_scale = torch.tensor([input_scales]) * factors
        scales = input_scale.repeat_interleave(torch.tensor(segments), dim=-1)
        row_scale = scales if row_scale is None else row_scale * scales
        is_shared = bool((input_scale == input_scale[:, :1]).all())
        packed_scale = input_scale[:, :1].contiguous() if is_shared else input_scale
    bias = torch.randn(num_experts, out_size, generator=generator) if has_bias else None
    packed = PackedMatrix(
        form=FORMS[form],
        codes=codes,
        block_scale=block_scale,
        block_rows=block_rows,
        row_scale=row_scale,
        input_scale=packed_scale if input_scales else None,
        bias=bias,
    )
    packed.check()
    return Weight(packed, values, input_scale)
