"""Memory for the outputs of `row_codes.py`, and its kernel's launch for rows from other kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_trt.kernels.row_codes import FP8, NVFP4_TILED, quantize_fp8_kernel, quantize_rows_kernel

BLOCK = 1024
TILE_ROWS, TILE_BLOCKS = 128, 4  # tile of block scales, with NVFP4_TILED


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCodes:
    """Quantized rows, written by the kernel that computes them."""

    form: int  # RESULT of `row_codes.py`
    scale: Tensor  # float32 [1]
    values: Tensor  # float8_e4m3fn [N, in], or uint8 [N, in / 2]
    block_scale: Tensor | None = None  # float8_e4m3fn [N, in / 16], or tiled: [ceil(N / 128) * 128 * in / 16]

    @classmethod
    def allocate(cls, form: int, scale: Tensor, num_rows: int, num_columns: int) -> "RowCodes":
        """Allocate on the scale's device. Scales of rows that only fill a tile stay unwritten and are unused."""

        def new(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=scale.device)

        if form == FP8:
            return cls(form=form, scale=scale, values=new(num_rows, num_columns, dtype=torch.float8_e4m3fn))
        assert num_columns % 16 == 0
        shape = [num_rows, num_columns // 16]
        if form == NVFP4_TILED:
            assert shape[1] % TILE_BLOCKS == 0
            shape = [-(-num_rows // TILE_ROWS) * TILE_ROWS * shape[1]]
        return cls(
            form=form,
            scale=scale,
            values=new(num_rows, num_columns // 2, dtype=torch.uint8),
            block_scale=new(*shape, dtype=torch.float8_e4m3fn),
        )

    @property
    def block_scale_argument(self) -> Tensor:
        """Any tensor stands in for one that is not written."""
        return self.values if self.block_scale is None else self.block_scale


def quantize_rows(x: Tensor, form: int, scale: Tensor) -> RowCodes:
    """F [N, in], contiguous, and the scale float32 [1] of all rows -> codes."""
    assert x.is_contiguous()
    num_rows, num_columns = x.shape
    if form == FP8 and num_columns % 16 == 0:  # the number of elements would else change the kernel from step to step
        return RowCodes(form=form, scale=scale, values=quantize_fp8(x, scale))
    codes = RowCodes.allocate(form, scale, num_rows, num_columns)
    quantize_rows_kernel[(num_rows, -(-num_columns // BLOCK))](
        x,
        codes.values,
        codes.block_scale_argument,
        scale,
        num_columns,
        BLOCK=BLOCK,
        RESULT=form,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return codes


FP8_BLOCK = 2048


def quantize_fp8(x: Tensor, scale: Tensor) -> Tensor:  # F, float32 [1] -> float8_e4m3fn
    """e4m3(x / scale), x contiguous and of any shape."""
    assert x.is_contiguous()
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    num_blocks = -(-x.numel() // FP8_BLOCK)
    quantize_fp8_kernel[(num_blocks,)](x, scale, codes, x.numel(), BLOCK=FP8_BLOCK, num_warps=4, enable_fp_fusion=True)
    return codes
