"""Experts of a layer on rows sorted by `routing.py`: two grouped products, and the sum over choices.

A program computes a tile of entries of one expert and a block of that expert's output features. `packed_product.py` has
the weight formats. float32 inside, rounded once per output; nothing depends on the order of programs.
`tests/kernels/reference_experts.py` defines the results.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.launch_rules import INT8
from dflash_trt.kernels.norm import gelu_tanh
from dflash_trt.kernels.packed_product import AS_THEY_ARE, ROUNDED_HERE, product, rows_of_scales
from dflash_trt.kernels.row_codes import e4m3, nvfp4

SILU, CLAMPED_SWIGLU, GELU_TANH = 0, 1, 2  # ACTIVATION
HIDDEN_AS_IT_IS, HIDDEN_FP8, HIDDEN_NVFP4 = 0, 1, 2  # HIDDEN: what the product after it reads

_SILU, _GELU_TANH = tl.constexpr(0), tl.constexpr(2)
_HIDDEN_FP8, _HIDDEN_NVFP4 = tl.constexpr(1), tl.constexpr(2)
_AS_THEY_ARE, _ROUNDED_HERE, _INT8 = tl.constexpr(AS_THEY_ARE), tl.constexpr(ROUNDED_HERE), tl.constexpr(INT8)


@triton.jit(do_not_specialize=["num_tiles"])
def expert_gate_up_kernel(
    x,  # F [N, IN]; int8 codes of INT8, with SCALES_INPUTS a row for each entry
    codes,  # [E, 2 * FFN, IN], as the format has it: gate rows, then up rows
    block_scale,
    block_rows,  # int32 [2 * FFN]; see `rows_of_scales`
    row_scale,  # float32 [E, 2 * FFN]; read only with HAS_ROW_SCALE
    bias,  # F [E, 2 * FFN]; read only with HAS_BIAS, and always of type F
    input_scale,  # float32 [E, 1 + SPLITS_INPUT], or of rows of x for INT8; read only with quantized activations
    order,  # int32 [N * num_chosen]
    tiles,  # int32 [3, num_tiles]
    weights,  # float32 [N * num_chosen], of entries; read only with SCALES_INPUTS
    hidden,  # out, [N * num_chosen, FFN] in the order of `order`: F, float8_e4m3fn, or uint8 of two columns each
    hidden_block_scale,  # out, float8_e4m3fn [N * num_chosen, FFN / 16]; written only with HIDDEN_NVFP4
    hidden_scale,  # float32 [E]; read only for codes
    num_tiles,
    num_block_rows,
    num_chosen: tl.constexpr,
    limit,
    alpha,
    IN: tl.constexpr,
    FFN: tl.constexpr,
    FORM: tl.constexpr,
    INPUT: tl.constexpr,
    SPLITS_INPUT: tl.constexpr,  # gate and up have input scales of their own
    HIDDEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALES_INPUTS: tl.constexpr,  # weights multiply rows of x, not results
    TOKENS: tl.constexpr,
    OUT: tl.constexpr,  # features of `hidden`
    BLOCK_IN: tl.constexpr,
):
    """Grid: (num_tiles, ceil(FFN / OUT))."""
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert >= 0:
        places = tl.load(tiles + num_tiles + tile) + tl.arange(0, TOKENS)
        is_token = places < tl.load(tiles + 2 * num_tiles + tile)
        entries = tl.load(order + places, mask=is_token, other=0)
        tokens = (entries if SCALES_INPUTS and FORM == _INT8 else entries // num_chosen).to(tl.int64)
        factors = tl.load(weights + entries, mask=is_token, other=0.0) if SCALES_INPUTS else None
        halves = tl.arange(0, 2 * OUT)
        features = tl.program_id(1) * OUT + halves % OUT
        is_row = features < FFN
        features += tl.where(halves < OUT, 0, FFN)
        rows = expert * 2 * FFN + features
        scale_rows = rows_of_scales(block_rows, num_block_rows, expert, features, rows, is_row, FORM)
        scale = tl.load(input_scale + (1 + SPLITS_INPUT) * expert) if INPUT == _ROUNDED_HERE else 1.0
        inputs = (x, x, tokens, is_token)  # a block scale of x is not read
        matrix = (codes, block_scale, rows, scale_rows, is_row)
        both = product(inputs, matrix, scale, factors, 2 * OUT, TOKENS, IN, BLOCK_IN, FORM, INPUT)
        if SPLITS_INPUT:  # rare: every published checkpoint has one scale for both
            scale = tl.load(input_scale + 2 * expert + 1)
            of_up = product(inputs, matrix, scale, factors, 2 * OUT, TOKENS, IN, BLOCK_IN, FORM, INPUT)
            both = tl.where((halves < OUT)[:, None], both, of_up)
        if SCALES_INPUTS and INPUT == _AS_THEY_ARE:  # the same before the product, which would have to wait for it
            both *= factors[None, :]
        if HAS_ROW_SCALE:
            both *= tl.load(row_scale + rows, mask=is_row, other=0.0)[:, None]
        if FORM == _INT8:
            both *= tl.load(input_scale + tokens, mask=is_token, other=0.0)[None, :]
        if HAS_BIAS:
            both += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(both, (2, OUT, TOKENS)), (1, 2, 0)))
        value = tl.trans(_activated(gate, up, limit, alpha, ACTIVATION)).to(bias.dtype.element_ty)
        columns = tl.program_id(1) * OUT + tl.arange(0, OUT)
        _store_hidden(value, hidden, hidden_block_scale, hidden_scale + expert, places, is_token, columns, FFN, HIDDEN)


@triton.jit(do_not_specialize=["num_tiles"])
def expert_down_kernel(
    hidden,  # [N * num_chosen, FFN] in the order of `order`: F, or codes as the format has them
    hidden_block_scale,  # read only with codes of NVFP4, and of INT8: float32 [N * num_chosen], of rows
    codes,  # [E, HIDDEN_SIZE, FFN], as the format has it
    block_scale,
    block_rows,  # int32 [HIDDEN_SIZE]; see `rows_of_scales`
    row_scale,  # float32 [E, HIDDEN_SIZE]; read only with HAS_ROW_SCALE
    bias,  # F [E, HIDDEN_SIZE]; read only with HAS_BIAS
    order,  # int32 [N * num_chosen]
    tiles,  # int32 [3, num_tiles]
    weights,  # float32 [N * num_chosen], of entries; not read with SCALES_INPUTS
    results,  # out, F [N * num_chosen, HIDDEN_SIZE], of entries
    num_tiles,
    num_block_rows,
    FFN: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    FORM: tl.constexpr,
    INPUT: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALES_INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Grid: (num_tiles, ceil(HIDDEN_SIZE / OUT))."""
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert >= 0:
        places = tl.load(tiles + num_tiles + tile) + tl.arange(0, TOKENS)
        is_token = places < tl.load(tiles + 2 * num_tiles + tile)
        features = tl.program_id(1) * OUT + tl.arange(0, OUT)
        is_row = features < HIDDEN_SIZE
        rows = expert * HIDDEN_SIZE + features
        scale_rows = rows_of_scales(block_rows, num_block_rows, expert, features, rows, is_row, FORM)
        inputs = (hidden, hidden_block_scale, places.to(tl.int64), is_token)
        matrix = (codes, block_scale, rows, scale_rows, is_row)
        result = product(inputs, matrix, 1.0, None, OUT, TOKENS, FFN, BLOCK_IN, FORM, INPUT)
        if HAS_ROW_SCALE:
            result *= tl.load(row_scale + rows, mask=is_row, other=0.0)[:, None]
        if FORM == _INT8:
            result *= tl.load(hidden_block_scale + places, mask=is_token, other=0.0)[None, :]
        if HAS_BIAS:
            result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
        entries = tl.load(order + places, mask=is_token, other=0).to(tl.int64)
        if not SCALES_INPUTS:
            result *= tl.load(weights + entries, mask=is_token, other=0.0)[None, :]
        at = entries[:, None] * HIDDEN_SIZE + features[None, :]
        tl.store(results + at, tl.trans(result).to(results.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])


@triton.jit
def expert_sum_kernel(
    results,  # F [N, num_chosen, HIDDEN_SIZE]
    expert_ids,  # int32 [N, num_chosen]; read only with FEW
    out,  # F [N, HIDDEN_SIZE]
    first_expert,
    num_experts,
    num_chosen: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    FEW: tl.constexpr,  # only the experts from `first_expert` on are here, `num_experts` of them: others add nothing
    BLOCK: tl.constexpr,
):
    """Add up a row's results in the order of its choice. Grid: (N, ceil(HIDDEN_SIZE / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < HIDDEN_SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(num_chosen):
        at = (row * num_chosen + choice) * HIDDEN_SIZE + columns
        is_here = is_in
        if FEW:
            index = tl.load(expert_ids + row * num_chosen + choice) - first_expert + tl.zeros_like(columns)
            is_here = is_in & (index >= 0) & (index < num_experts)
        total += tl.load(results + at, mask=is_here, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN_SIZE + columns, total.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _activated(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """See `core.model.feed_forward.Moe.activation`."""
    if ACTIVATION == _SILU:
        return gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == _GELU_TANH:
        return gelu_tanh(gate) * up
    else:  # the comparisons keep NaN
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)


@triton.jit
def _store_hidden(
    value, hidden, block_scale, scale, places, is_token, columns, FFN: tl.constexpr, HIDDEN: tl.constexpr
):
    """`value` F [TOKENS, OUT]; rounded to F before it is quantized, as a linear layer's input is."""
    rows = places[:, None].to(tl.int64)
    mask = is_token[:, None] & (columns < FFN)[None, :]
    if HIDDEN == _HIDDEN_FP8:
        value = e4m3(value.to(tl.float32), tl.load(scale)).to(tl.float8e4nv)
        tl.store(hidden + rows * FFN + columns[None, :], value, mask=mask)
    elif HIDDEN == _HIDDEN_NVFP4:
        tokens: tl.constexpr = value.shape[0]
        out: tl.constexpr = value.shape[1]
        value = tl.where(mask, value, 0.0).to(tl.float32)
        codes, scales = nvfp4(value, tl.load(scale), tokens, out)
        first = tl.min(columns, axis=0)
        pairs, blocks = first // 2 + tl.arange(0, out // 2), first // 16 + tl.arange(0, out // 16)
        mask = is_token[:, None] & (pairs < FFN // 2)[None, :]
        tl.store(hidden + rows * (FFN // 2) + pairs[None, :], codes, mask=mask)
        mask = is_token[:, None] & (blocks < FFN // 16)[None, :]
        tl.store(block_scale + rows * (FFN // 16) + blocks[None, :], scales.to(tl.float8e4nv), mask=mask)
    else:
        tl.store(hidden + rows * FFN + columns[None, :], value, mask=mask)
