"""A linear layer with packed weights, dequantized in registers tile by tile. See `packed_product.py`."""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.packed_product import product, rows_of_scales


@triton.jit(do_not_specialize=["num_rows"])
def packed_linear_kernel(
    x,  # F [N, IN], or codes: float8_e4m3fn [N, IN], or uint8 [N, IN / 2]
    x_block_scale,  # float8_e4m3fn [N, IN / 16]; read only with NVFP4 codes
    codes,  # [OUT_SIZE, IN], as the format has it
    block_scale,
    block_rows,  # int32 [OUT_SIZE]; see `rows_of_scales`
    row_scale,  # float32 [OUT_SIZE]; read only with HAS_ROW_SCALE
    bias,  # F [OUT_SIZE]; read only with HAS_BIAS
    out,  # F [N, OUT_SIZE]
    num_rows,
    num_block_rows,
    IN: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    FORM: tl.constexpr,
    INPUT: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Grid: (ceil(N / TOKENS), ceil(OUT_SIZE / OUT))."""
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    is_token = tokens < num_rows
    features = (tl.program_id(1) * OUT + tl.arange(0, OUT)).to(tl.int64)
    is_row = features < OUT_SIZE
    scale_rows = rows_of_scales(block_rows, num_block_rows, 0, features, features, is_row, FORM)
    inputs = (x, x_block_scale, tokens, is_token)
    weights = (codes, block_scale, features, scale_rows, is_row)
    result = product(inputs, weights, 1.0, None, OUT, TOKENS, IN, BLOCK_IN, FORM, INPUT)
    if HAS_ROW_SCALE:
        result *= tl.load(row_scale + features, mask=is_row, other=0.0)[:, None]
    if HAS_BIAS:
        result += tl.load(bias + features, mask=is_row, other=0.0).to(tl.float32)[:, None]
    at = tokens[:, None] * OUT_SIZE + features[None, :]
    tl.store(out + at, tl.trans(result).to(out.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])
