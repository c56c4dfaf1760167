"""Products with packed weights: a tile is dequantized in registers on its way to the tensor cores.

Weights are the left operand, tokens the right one: as few as 16 tokens fill an instruction of the tensor cores, and
dequantized weights are multiplied out of registers. Formats: `formats/`. INT4 weights are rounded to the dtype of the
activations; weights of the other formats fit it. INT8 weights are multiplied by integers, as they are.
"""

# mypy: ignore-errors
# ruff: noqa: N803, SIM300  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from dflash_trt.kernels.launch_rules import FP8, FP8_BLOCK, INT4, INT8, MXFP4, NVFP4, PLAIN  # FORM
from dflash_trt.kernels.row_codes import fp8, nvfp4

AS_THEY_ARE, ROUNDED_HERE, CODES = range(3)  # INPUT: activations in F, in F to be quantized, as codes of the format

_PLAIN, _FP8, _FP8_BLOCK = tl.constexpr(PLAIN), tl.constexpr(FP8), tl.constexpr(FP8_BLOCK)
_MXFP4, _NVFP4, _INT4 = tl.constexpr(MXFP4), tl.constexpr(NVFP4), tl.constexpr(INT4)
_INT8 = tl.constexpr(INT8)
_AS_THEY_ARE, _ROUNDED_HERE = tl.constexpr(AS_THEY_ARE), tl.constexpr(ROUNDED_HERE)
_FP8_BLOCK_SIZE = tl.constexpr(128)


@triton.jit
def product(
    inputs,
    weights,
    input_scale,  # float32; read only with ROUNDED_HERE
    x_factors,  # float32 [TOKENS], of rows of x before they are quantized, or None; used only with ROUNDED_HERE
    OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    FORM: tl.constexpr,
    INPUT: tl.constexpr,
):
    """weight @ x.T, float32 [OUT, TOKENS], without the scales that belong to whole rows.

    `inputs` are x, rows of IN in F or codes: float8_e4m3fn, int8, or uint8 of two columns each; its block scales, rows
    of IN / 16 in float8_e4m3fn, read only with NVFP4 codes; the rows of both, int64 [TOKENS]; and is_token. `weights`
    are codes, rows of IN, two columns a byte in 4-bit formats; block scales as the format has them; the rows of each,
    int64 [OUT]; and is_row.
    """
    if FORM == _INT8:
        return _integer_product(inputs, weights, OUT, TOKENS, IN, BLOCK_IN)
    else:
        return _float_product(inputs, weights, input_scale, x_factors, OUT, TOKENS, IN, BLOCK_IN, FORM, INPUT)


@triton.jit
def _integer_product(
    inputs, weights, OUT: tl.constexpr, TOKENS: tl.constexpr, IN: tl.constexpr, BLOCK_IN: tl.constexpr
):
    """The sums are exact."""
    x, _, x_rows, is_token = inputs
    codes, _, rows, _, is_row = weights
    sums = tl.zeros((OUT, TOKENS), tl.int32)
    for start in range(0, IN, BLOCK_IN):
        w = _unpacked(codes, rows, is_row, start, IN, BLOCK_IN)
        tokens = _unpacked(x, x_rows, is_token, start, IN, BLOCK_IN)
        sums = tl.dot(w, tl.trans(tokens), sums, out_dtype=tl.int32)
    return sums.to(tl.float32)


@triton.jit
def _float_product(
    inputs,
    weights,
    input_scale,
    x_factors,
    OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    FORM: tl.constexpr,
    INPUT: tl.constexpr,
):
    x, x_block_scale, x_rows, is_token = inputs
    codes, block_scale, rows, scale_rows, is_row = weights
    # Not "ieee": for SM100 Triton 3.7 makes TF32 of it where a factor was narrower (triton-lang/triton#10176).
    acc = tl.zeros((OUT, TOKENS), tl.float32)
    inverse = 1.0 / input_scale
    for start in range(0, IN, BLOCK_IN):
        if FORM == _NVFP4 and INPUT != _AS_THEY_ARE:
            w = _packed(codes, rows, is_row, start, IN, BLOCK_IN)
            w_scale = _scales(block_scale, scale_rows, is_row, start, IN, BLOCK_IN, 16)
            if INPUT == _ROUNDED_HERE:
                values = _scaled(_unpacked(x, x_rows, is_token, start, IN, BLOCK_IN), x_factors)
                x_codes, scales = nvfp4(values, input_scale, TOKENS, BLOCK_IN)
                x_scale = scales.to(tl.float8e4nv)
            else:
                x_codes = _packed(x, x_rows, is_token, start, IN, BLOCK_IN)
                x_scale = _scales(x_block_scale, x_rows, is_token, start, IN, BLOCK_IN, 16)
            acc = tl.dot_scaled(w, w_scale, "e2m1", tl.trans(x_codes), x_scale, "e2m1", acc)
        else:
            tokens = _unpacked(x, x_rows, is_token, start, IN, BLOCK_IN)
            if INPUT == _ROUNDED_HERE:
                tokens = fp8(_scaled(tokens, x_factors), input_scale, inverse)
            if FORM == _FP8_BLOCK:
                w = _e4m3(_unpacked(codes, rows, is_row, start, IN, BLOCK_IN), tokens.dtype)
                at = scale_rows * tl.cdiv(IN, _FP8_BLOCK_SIZE) + start // _FP8_BLOCK_SIZE
                scale = tl.load(block_scale + at, mask=is_row, other=0.0)  # BLOCK_IN columns are within a block
                acc += tl.dot(w, tl.trans(tokens), input_precision="tf32x3") * scale[:, None]
            elif FORM == _MXFP4 and tokens.dtype == tl.bfloat16:
                w = _packed(codes, rows, is_row, start, IN, BLOCK_IN)
                scale = _scales(block_scale, scale_rows, is_row, start, IN, BLOCK_IN, 32)
                acc = tl.dot_scaled(w, scale, "e2m1", tl.trans(tokens), None, "bf16", acc, fast_math=True)
            elif INPUT != _AS_THEY_ARE:  # FP8
                w = _unpacked(codes, rows, is_row, start, IN, BLOCK_IN)
                acc = tl.dot(w, tl.trans(tokens), acc)
            else:
                w = _weights(codes, block_scale, rows, scale_rows, is_row, start, tokens.dtype, OUT, IN, BLOCK_IN, FORM)
                acc = tl.dot(w, tl.trans(tokens), acc, input_precision="tf32x3")
        # Sums that are used in the loop are waited for. Else Triton 3.7 lets wgmma read the registers of w, which the
        # next round writes (PTX ISA, "wgmma.mma_async": access before wgmma.wait_group is undefined).
        if cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0):  # SM90
            acc = tl.where(is_token[None, :], acc, 0.0)
    return acc


@triton.jit
def _unpacked(tensor, rows, is_row, start, IN: tl.constexpr, BLOCK_IN: tl.constexpr):
    columns = start + tl.arange(0, BLOCK_IN)
    is_in = is_row[:, None] if IN % BLOCK_IN == 0 else is_row[:, None] & (columns < IN)[None, :]
    element: tl.constexpr = tensor.dtype.element_ty
    other: tl.constexpr = 0 if element == tl.uint8 or element == tl.int8 else 0.0
    return tl.load(tensor + rows[:, None] * IN + columns[None, :], mask=is_in, other=other)


@triton.jit
def _scaled(rows, factors):
    """In float32, rounded to the dtype of the rows."""
    if factors is None:
        return rows.to(tl.float32)
    else:
        return (rows.to(tl.float32) * factors[:, None]).to(rows.dtype).to(tl.float32)


@triton.jit
def _packed(codes, rows, is_row, start, IN: tl.constexpr, BLOCK_IN: tl.constexpr):
    columns = start // 2 + tl.arange(0, BLOCK_IN // 2)
    is_in = is_row[:, None] if IN % BLOCK_IN == 0 else is_row[:, None] & (columns < IN // 2)[None, :]
    return tl.load(codes + rows[:, None] * (IN // 2) + columns[None, :], mask=is_in, other=0)


@triton.jit
def _scales(block_scale, rows, is_row, start, IN: tl.constexpr, BLOCK_IN: tl.constexpr, SIZE: tl.constexpr):
    columns = start // SIZE + tl.arange(0, BLOCK_IN // SIZE)
    is_in = is_row[:, None] if IN % BLOCK_IN == 0 else is_row[:, None] & (columns < IN // SIZE)[None, :]
    other: tl.constexpr = 0 if block_scale.dtype.element_ty == tl.uint8 else 0.0
    return tl.load(block_scale + rows[:, None] * (IN // SIZE) + columns[None, :], mask=is_in, other=other)


@triton.jit
def _weights(
    codes,
    block_scale,
    rows,
    scale_rows,
    is_row,
    start,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    FORM: tl.constexpr,
):
    """[OUT, BLOCK_IN] in DTYPE, with their block scales."""
    if FORM == _PLAIN:
        return _unpacked(codes, rows, is_row, start, IN, BLOCK_IN).to(DTYPE)
    elif FORM == _FP8:
        return _e4m3(_unpacked(codes, rows, is_row, start, IN, BLOCK_IN), DTYPE)
    else:
        pairs = _packed(codes, rows, is_row, start, IN, BLOCK_IN).to(tl.uint32)
        size: tl.constexpr = 16 if FORM == _NVFP4 else 32
        scale = _scales(block_scale, scale_rows, is_row, start, IN, BLOCK_IN, size)
        if FORM == _INT4:
            low, high = _int4(pairs & 15, DTYPE), _int4(pairs >> 4, DTYPE)
            scale = scale.to(DTYPE)
        else:
            low, high = _e2m1(pairs & 15, 0, DTYPE), _e2m1(pairs & 240, 4, DTYPE)
            scale = _e8m0(scale, DTYPE) if FORM == _MXFP4 else _e4m3(scale, DTYPE)
        blocks = tl.reshape(tl.interleave(low, high), (OUT, BLOCK_IN // size, size))
        return tl.reshape(blocks * scale[:, :, None], (OUT, BLOCK_IN))


# Conversions by bits, since the hardware's run at a quarter to an eighth of the rate of its other instructions: a code
# shifted to where DTYPE has its exponent is the number, up to a constant power of two. Shifts are products, which take
# one instruction for sign and magnitude.


@triton.jit
def _e2m1(code, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    """uint32, code << SHIFT of an E2M1 number -> DTYPE."""
    if DTYPE == tl.float32:
        bits = (code * ((1 << (28 - SHIFT)) | (1 << (22 - SHIFT)))) & 0x81C00000
        return bits.to(tl.uint32).to(DTYPE, bitcast=True) * 2.0**126
    elif DTYPE == tl.float16:
        # No single product here: the second copy's sign would be added to the first one's last bit.
        bits = ((code << (12 - SHIFT)) & 0x8000) | ((code << (9 - SHIFT)) & 0x0E00)
        return bits.to(tl.uint16).to(DTYPE, bitcast=True) * 2.0**14
    else:
        bits = (code * ((1 << (12 - SHIFT)) | (1 << (6 - SHIFT)))) & 0x81C0
        return bits.to(tl.uint16).to(DTYPE, bitcast=True) * 2.0**126


@triton.jit
def _e4m3(code, DTYPE: tl.constexpr):
    """float8_e4m3fn, not NaN, or its byte -> DTYPE."""
    signed = code.to(tl.int8, bitcast=True).to(tl.int32)  # copies of the sign fill the bits above the magnitude
    if DTYPE == tl.float32:
        return ((signed << 20) & -0x78100000).to(DTYPE, bitcast=True) * 2.0**120
    elif DTYPE == tl.float16:
        return ((signed << 7) & 0xBF80).to(tl.uint16).to(DTYPE, bitcast=True) * 2.0**8
    else:
        return ((signed << 4) & 0x87F0).to(tl.uint16).to(DTYPE, bitcast=True) * 2.0**120


@triton.jit
def _int4(code, DTYPE: tl.constexpr):
    """uint32 nibble -> DTYPE, code - 8: the last bits of a number whose unit is 1."""
    if DTYPE == tl.float32:
        return (code | 0x4B000000).to(tl.uint32).to(DTYPE, bitcast=True) - 8388616.0
    elif DTYPE == tl.float16:
        return (code | 0x6400).to(tl.uint16).to(DTYPE, bitcast=True) - 1032.0
    else:
        return (code | 0x4300).to(tl.uint16).to(DTYPE, bitcast=True) - 136.0


@triton.jit
def _e8m0(code, DTYPE: tl.constexpr):
    """uint8 -> 2 ** (code - 127), in float32 and bfloat16."""
    if DTYPE == tl.float32:
        bits = code.to(tl.uint32) << 23
        return tl.where(bits == 0, 1 << 22, bits).to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        bits = code.to(tl.uint16) << 7
        return tl.where(bits == 0, 1 << 6, bits).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def rows_of_scales(block_rows, num_block_rows, expert, features, rows, is_row, FORM: tl.constexpr):
    """Rows of `block_scale`: the weight's rows, except for FP8 blocks, which use `block_rows` int32 [out]."""
    if FORM == _FP8_BLOCK:
        return expert * num_block_rows + tl.load(block_rows + features, mask=is_row, other=0)
    else:
        return rows
