"""Kernels from projections to attention's inputs: per-head RMSNorm, RoPE, and K/V into their pages.

Norm and rotation are in float32 and rounded once, when stored. Positions become angles here; no table of cosines is
kept. Which rows may touch a page is decided on the device.
"""

# mypy: ignore-errors
# ruff: noqa: N803, SIM102, C901  (constants of a kernel are upper case; it takes branches one by one)

import triton
import triton.language as tl

HALF_PI_INVERSE = tl.constexpr(0.6366197723675814)
# pi / 2 in three parts, the first two of 8 bits: a multiple of them taken off an angle below MAX_POSITIONS in one fused
# operation leaves no rounding error.
HALF_PI_HIGH = tl.constexpr(1.5703125)
HALF_PI_MIDDLE = tl.constexpr(0.00048351287841796875)
HALF_PI_LOW = tl.constexpr(3.13916478589249e-07)
# sin(x) = x + x^3 (S0 + S1 x^2 + S2 x^4) and cos(x) = 1 - x^2 / 2 + x^4 (C0 + C1 x^2 + C2 x^4) to 4e-9 where
# |x| <= pi / 4; fitted here with the largest relative error minimized.
S0, S1, S2 = (
    tl.constexpr(-0.16666654908613376),
    tl.constexpr(0.008332175845448465),
    tl.constexpr(-0.0001951697737355108),
)
C0, C1, C2 = (
    tl.constexpr(0.04166664680714138),
    tl.constexpr(-0.0013887364483472094),
    tl.constexpr(2.4438090757385113e-05),
)
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def pair_places(HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr):
    """Places of both elements of each pair in a head, [HALF] each: the first ROTARY / 2 pairs are rotated."""
    pair = tl.arange(0, HALF)
    if ROTARY == HEAD_DIM:
        return pair, pair + HEAD_DIM // 2
    is_rotated = pair < ROTARY // 2
    return pair + tl.where(is_rotated, 0, ROTARY // 2), pair + tl.where(is_rotated, ROTARY // 2, HEAD_DIM // 2)


@triton.jit
def cos_and_sin(position, inv_freq, amplitude, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr):
    """float32 [HALF] each, to 1e-7 for positions below `rope_and_pages_launch.MAX_POSITIONS`.

    The angle is rounded to float32, as in the tables of the networks. CUDA's own functions would bring a slow path
    for large angles along with every element.
    """
    pair = tl.arange(0, HALF)
    frequency = tl.load(inv_freq + pair, mask=pair < ROTARY // 2, other=0.0)
    angle = position.to(tl.float32) * frequency
    quarters = tl.floor(angle * HALF_PI_INVERSE + 0.5)
    x = tl.fma(-quarters, HALF_PI_HIGH, angle)
    x = tl.fma(-quarters, HALF_PI_MIDDLE, x)
    x = tl.fma(-quarters, HALF_PI_LOW, x)
    square = x * x
    sin = x + x * square * (S0 + square * (S1 + square * S2))
    cos = 1.0 - 0.5 * square + square * square * (C0 + square * (C1 + square * C2))
    quadrant = quarters.to(tl.int32) & 3
    is_odd = (quadrant & 1) == 1
    turned_cos = tl.where(is_odd, sin, cos) * amplitude
    turned_sin = tl.where(is_odd, cos, sin) * amplitude
    cos_is_negative = (quadrant == 1) | (quadrant == 2)
    turned_cos = tl.where(cos_is_negative, -turned_cos, turned_cos)
    if ROTARY < HEAD_DIM:
        turned_cos = tl.where(pair < ROTARY // 2, turned_cos, 1.0)
    return turned_cos, tl.where(quadrant >= 2, -turned_sin, turned_sin)


@triton.jit
def load_heads(
    x, head, num_heads, PITCH: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr
):
    """The pairs of some heads of one row, PITCH apart: first ones and second ones, float32 [HEADS, HALF]."""
    mask = (head < num_heads)[:, None] & (tl.arange(0, HALF)[None, :] < HEAD_DIM // 2)
    at_first, at_second = pair_places(HEAD_DIM, ROTARY, HALF)
    offset = head[:, None] * PITCH
    first = tl.load(x + offset + at_first[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + offset + at_second[None, :], mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_heads(
    out, first, second, head, num_heads, scale, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr
):
    """The reverse, dense; into FP8 as e4m3(x / scale), rounded to nearest and saturated."""
    mask = (head < num_heads)[:, None] & (tl.arange(0, HALF)[None, :] < HEAD_DIM // 2)
    if out.dtype.element_ty == tl.float8e4nv:
        first = tl.clamp(tl.div_rn(first, scale + tl.zeros_like(first)), -E4M3_MAX, E4M3_MAX)
        second = tl.clamp(tl.div_rn(second, scale + tl.zeros_like(second)), -E4M3_MAX, E4M3_MAX)
    at_first, at_second = pair_places(HEAD_DIM, ROTARY, HALF)
    offset = head[:, None] * HEAD_DIM
    tl.store(out + offset + at_first[None, :], first.to(out.dtype.element_ty), mask=mask)
    tl.store(out + offset + at_second[None, :], second.to(out.dtype.element_ty), mask=mask)


@triton.jit
def normed(first, second, weight, eps, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr):
    """RMSNorm of each head."""
    mask = tl.arange(0, HALF) < HEAD_DIM // 2
    at_first, at_second = pair_places(HEAD_DIM, ROTARY, HALF)
    mean = tl.sum(first * first + second * second, 1) / HEAD_DIM
    inverse = 1.0 / tl.sqrt(mean + eps)
    first_weight = tl.load(weight + at_first, mask=mask, other=0.0).to(tl.float32)
    second_weight = tl.load(weight + at_second, mask=mask, other=0.0).to(tl.float32)
    return first * inverse[:, None] * first_weight[None, :], second * inverse[:, None] * second_weight[None, :]


@triton.jit
def normed_values(first, second, eps, HEAD_DIM: tl.constexpr):
    """RMSNorm of each head, without a weight."""
    mean = tl.sum(first * first + second * second, 1) / HEAD_DIM
    inverse = 1.0 / tl.sqrt(mean + eps)
    return first * inverse[:, None], second * inverse[:, None]


@triton.jit
def rotated(first, second, cos, sin):
    """Rotate-half: the pair (i, i + ROTARY / 2) turns by its angle."""
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@triton.jit
def request_of(row, token_offsets, num_requests, REQUESTS: tl.constexpr):
    """The request that token `row` belongs to; num_requests for a row after the last."""
    requests = tl.arange(0, REQUESTS)
    stops = tl.load(token_offsets + 1 + requests, mask=requests < num_requests, other=row + 1)
    return tl.minimum(tl.sum((stops <= row).to(tl.int32), 0), num_requests)


@triton.jit
def page_slot(request, position, page_table, pages_per_request, page_shift):
    """Row of K in a page pool seen as [(page, k or v, offset)]; V's is a page size further."""
    page = tl.load(page_table + request.to(tl.int64) * pages_per_request + (position >> page_shift)).to(tl.int64)
    page_size = 1 << page_shift
    return page * (2 * page_size) + (position & (page_size - 1))


# As in attention.py: one build serves steps and models of all sizes.
@triton.jit(do_not_specialize=["q_heads", "kv_heads", "num_requests", "pages_per_request", "page_shift", "state_index"])
def rotate_and_store_kernel(
    q,  # F, N rows of q_heads, Q_PITCH apart, the rows q_stride
    k,  # F, N rows of [kv_heads, D], k_stride apart
    v,  # likewise; read only with STORES_PAGES
    q_out,  # F [N, q_heads, D]
    k_out,  # F [N, kv_heads, D]; written only without STORES_PAGES
    pages,  # F or float8_e4m3fn [pages, 2, page_size, kv_heads, D]; written only with STORES_PAGES
    state_pools,  # int64 [states]; with POOLED, pages are at its `state_index`, and only the type of `pages` is read
    q_norm,  # F or float32 [D]; read only with HAS_NORM
    k_norm,
    inv_freq,  # float32 [ROTARY / 2]; read only with HAS_ROPE
    positions,  # int32 [N]
    token_offsets,  # int32 [R + 1]; this and the next two are read only with STORES_PAGES
    page_table,  # int32 [R, pages_per_request]
    limits,  # int32 [R]; read only with HAS_LIMITS: rows at positions >= limit leave the pages alone
    amplitude,  # factor of cos and sin
    eps,
    k_scale,  # for FP8 pages
    v_scale,
    q_stride,
    k_stride,
    v_stride,
    q_heads,  # 0: only K and V
    kv_heads,
    num_requests,
    pages_per_request,
    page_shift,
    state_index,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,  # the first dimensions of a head, which are rotated
    Q_PITCH: tl.constexpr,  # from a head of q to the next
    HALF: tl.constexpr,  # HEAD_DIM / 2 padded to a power of two
    HEADS: tl.constexpr,  # per program
    REQUESTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    STORES_PAGES: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    POOLED: tl.constexpr,
    NORMS_V: tl.constexpr,
):
    """Grid: (N, blocks of HEADS query heads + of K heads + of V heads), the last only with STORES_PAGES.

    For layers without K and V of their own, only the first.
    """
    if POOLED:
        pages = pooled(state_pools, state_index, pages.dtype)
        if pages.to(tl.int64) == 0:  # no state
            return
    row = tl.program_id(0)
    block = tl.program_id(1)
    q_blocks = (q_heads + HEADS - 1) // HEADS
    kv_blocks = (kv_heads + HEADS - 1) // HEADS
    position = tl.load(positions + row)
    long_row = row.to(tl.int64)
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        first, second = load_heads(q + long_row * q_stride, head, q_heads, Q_PITCH, HEAD_DIM, ROTARY, HALF)
        if HAS_NORM:
            first, second = normed(first, second, q_norm, eps, HEAD_DIM, ROTARY, HALF)
        if HAS_ROPE:
            cos, sin = cos_and_sin(position, inv_freq, amplitude, HEAD_DIM, ROTARY, HALF)
            first, second = rotated(first, second, cos, sin)
        store_heads(q_out + long_row * q_heads * HEAD_DIM, first, second, head, q_heads, 1.0, HEAD_DIM, ROTARY, HALF)
        return
    row_size = kv_heads * HEAD_DIM
    slot = long_row
    if STORES_PAGES:
        request = request_of(row, token_offsets, num_requests, REQUESTS)
        if request >= num_requests:
            return
        if HAS_LIMITS:
            if position >= tl.load(limits + request):
                return
        slot = page_slot(request, position, page_table, pages_per_request, page_shift)
    if block < q_blocks + kv_blocks:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        first, second = load_heads(k + long_row * k_stride, head, kv_heads, HEAD_DIM, HEAD_DIM, ROTARY, HALF)
        if HAS_NORM:
            first, second = normed(first, second, k_norm, eps, HEAD_DIM, ROTARY, HALF)
        if HAS_ROPE:
            cos, sin = cos_and_sin(position, inv_freq, amplitude, HEAD_DIM, ROTARY, HALF)
            first, second = rotated(first, second, cos, sin)
        if STORES_PAGES:
            store_heads(pages + slot * row_size, first, second, head, kv_heads, k_scale, HEAD_DIM, ROTARY, HALF)
        else:
            store_heads(k_out + slot * row_size, first, second, head, kv_heads, 1.0, HEAD_DIM, ROTARY, HALF)
    elif STORES_PAGES:
        head = (block - q_blocks - kv_blocks) * HEADS + tl.arange(0, HEADS)
        first, second = load_heads(v + long_row * v_stride, head, kv_heads, HEAD_DIM, HEAD_DIM, ROTARY, HALF)
        if NORMS_V:
            first, second = normed_values(first, second, eps, HEAD_DIM)
        v_rows = pages + (slot + (1 << page_shift)) * row_size
        store_heads(v_rows, first, second, head, kv_heads, v_scale, HEAD_DIM, ROTARY, HALF)


@triton.jit(do_not_specialize=["kv_heads", "num_requests", "pages_per_request", "page_shift"])
def draft_context_kernel(
    kv,  # F [T, layers, 2, kv_heads, D]: what the one GEMM of all layers gives
    pages,  # F or float8_e4m3fn, the first layer's [pages, 2, page_size, kv_heads, D]
    layer_offsets,  # int64 [layers], elements from `pages` to each layer's pages, multiples of 16
    k_norms,  # F [layers, D]; read only with HAS_NORM
    k_scales,  # float32 [layers], of FP8 pages; 1 otherwise
    v_scales,
    inv_freq,  # float32 [D / 2]
    positions,  # int32 [T]
    token_offsets,  # int32 [R + 1]
    page_table,  # int32 [R, pages_per_request]
    limits,  # int32 [R], the next context lengths: rows at positions >= limit leave the pages alone
    amplitude,
    eps,
    kv_heads,
    num_requests,
    pages_per_request,
    page_shift,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    REQUESTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Grid: (T, layers, blocks of HEADS K/V heads)."""
    row = tl.program_id(0)
    layer = tl.program_id(1)
    request = request_of(row, token_offsets, num_requests, REQUESTS)
    if request >= num_requests:
        return
    position = tl.load(positions + row)
    if position >= tl.load(limits + request):
        return
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    row_size = kv_heads * HEAD_DIM
    k = kv + (row.to(tl.int64) * tl.num_programs(1) + layer) * (2 * row_size)
    first, second = load_heads(k, head, kv_heads, HEAD_DIM, HEAD_DIM, HEAD_DIM, HALF)
    v_first, v_second = load_heads(k + row_size, head, kv_heads, HEAD_DIM, HEAD_DIM, HEAD_DIM, HALF)
    if HAS_NORM:
        first, second = normed(first, second, k_norms + layer * HEAD_DIM, eps, HEAD_DIM, HEAD_DIM, HALF)
    cos, sin = cos_and_sin(position, inv_freq, amplitude, HEAD_DIM, HEAD_DIM, HALF)
    first, second = rotated(first, second, cos, sin)
    slot = page_slot(request, position, page_table, pages_per_request, page_shift)
    layer_pages = pages + tl.multiple_of(tl.load(layer_offsets + layer), 16)
    k_rows = layer_pages + slot * row_size
    v_rows = k_rows + (1 << page_shift) * row_size
    store_heads(k_rows, first, second, head, kv_heads, tl.load(k_scales + layer), HEAD_DIM, HEAD_DIM, HALF)
    store_heads(v_rows, v_first, v_second, head, kv_heads, tl.load(v_scales + layer), HEAD_DIM, HEAD_DIM, HALF)


@triton.jit
def pooled(state_pools, state_index, POINTER: tl.constexpr):
    """The start of a state's pages as a pointer of type `POINTER`, at a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(state_pools + state_index).to(POINTER), 16)
