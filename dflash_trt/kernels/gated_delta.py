"""The recurrence of gated delta nets, as `backends/torch/gated_delta.py` defines it, with its source.

A program has BLOCK_V columns of one head's state S. It folds the accepted records into S, then solves blocks of rows at
once: one block of a verify step, whose records are stored after the unchanged S, or all blocks of a prompt, each of
which is folded. S stays in memory and passes through registers in parts of PART rows. Convolved inputs come from
`gated_delta_ends.py`, which also writes the values that other programs read here: keys, decays, window, position.

float32 inside. Products are in TF32, which holds 16-bit inputs exactly: so keys and queries enter them unchanged, and
their lengths divide the results. Other factors are rounded to nearest, because tensor cores would truncate them; that
changes results by a quarter of the change from rounding q, k and v to bfloat16. In a float32 network a product is three
of TF32, float32 except for the last bits.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.rope_and_pages import pooled


@triton.jit(do_not_specialize=["state_index"])
def delta_verify_kernel(
    mixed,  # F [N, 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM]: q, k, v after convolution and SiLU
    ba,  # F [N, 2 * HEADS]
    log_rate,  # float32 [HEADS]
    dt_bias,  # float32 [HEADS]
    slot_ids,  # int64 [R]
    token_offsets,  # int32 [R + 1]
    num_folded,  # int32 [R]: records to fold; -1: the request is new, and its state zeros
    state,  # float32 [slots, HEADS, KEY_DIM, VALUE_DIM]
    keys,  # float32 [slots, RECORDS, KEY_HEADS, KEY_DIM]
    deltas,  # float32 [slots, RECORDS, HEADS, VALUE_DIM]
    decays,  # float32 [slots, RECORDS, HEADS]
    state_pools,  # int64; with POOLED the four tensors before it are at its state_index and the next three entries
    attended,  # out, float32 [N, HEADS, VALUE_DIM]
    state_index,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    RECORDS: tl.constexpr,
    PART: tl.constexpr,  # divides BLOCK_K
    BLOCK_K: tl.constexpr,  # power of two >= KEY_DIM
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= RECORDS
    POOLED: tl.constexpr,
):
    """Requests of at most RECORDS rows. Grid: (R, HEADS, ceil(VALUE_DIM / BLOCK_V))."""
    if POOLED:
        address = tl.load(state_pools + state_index)
        if address == 0:  # no state
            return
    request, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(token_offsets + request)
    num_rows = tl.load(token_offsets + request + 1) - start
    if (num_rows > 0) & (num_rows <= RECORDS):
        if POOLED:
            state = pooled(state_pools, state_index, state.dtype)
            keys = pooled(state_pools, state_index + 1, keys.dtype)
            deltas = pooled(state_pools, state_index + 2, deltas.dtype)
            decays = pooled(state_pools, state_index + 3, decays.dtype)
        slot, folds = tl.load(slot_ids + request), tl.load(num_folded + request)
        state += (slot * HEADS + head) * (KEY_DIM * VALUE_DIM)
        row = tl.arange(0, BLOCK)
        first_record = slot * RECORDS
        key_rows = (
            keys + (first_record * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM + row * (KEY_HEADS * KEY_DIM)
        )
        delta_rows = deltas + (first_record * HEADS + head) * VALUE_DIM + row * (HEADS * VALUE_DIM)
        decay = tl.load(decays + first_record * HEADS + head + row * HEADS, mask=row < folds, other=0.0)
        old = _columns(delta_rows, row < folds, VALUE_DIM, BLOCK_V)
        inputs = mixed + (start.to(tl.int64) + row) * (2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM)
        q_rows = inputs + (head // (HEADS // KEY_HEADS)) * KEY_DIM
        k_rows = q_rows + KEY_HEADS * KEY_DIM
        of_k, of_q, kk, qk = _no_products(BLOCK, BLOCK_V)
        for first in range(0, BLOCK_K, PART):
            part = _part(state, first, tl.where(folds < 0, 0, KEY_DIM), VALUE_DIM, PART, BLOCK_V)
            if folds > 0:
                part = _folded(part, _keys(key_rows, first, row < folds, KEY_DIM, PART), old, decay, _product_of(mixed))
            if folds != 0:  # without records the state stays as it is
                _store_part(state, part, first, KEY_DIM, VALUE_DIM, PART, BLOCK_V)
            q = _keys(q_rows, first, row < num_rows, KEY_DIM, PART)
            k = _keys(k_rows, first, row < num_rows, KEY_DIM, PART)
            of_k, of_q, kk, qk = _with_part(of_k, of_q, kk, qk, q, k, part, _product_of(mixed))
        kk, qk, of_k, of_q = _unit(kk, qk, of_k, of_q, q_rows, k_rows, row < num_rows, KEY_DIM, BLOCK_K)
        v = _columns(inputs + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM, row < num_rows, VALUE_DIM, BLOCK_V)
        rate, decay = _gates(ba, log_rate, dt_bias, start, head, row, num_rows, HEADS)
        result, new = _solved(kk, qk, of_k, of_q, v, rate, decay, BLOCK, _product_of(mixed))
        out = attended + ((start.to(tl.int64) + row) * HEADS + head) * VALUE_DIM
        _store_columns(out, result, row < num_rows, VALUE_DIM, BLOCK_V)
        tl.debug_barrier()  # other threads of the program may still read the old records
        _store_columns(delta_rows, new, row < num_rows, VALUE_DIM, BLOCK_V)


@triton.jit(do_not_specialize=["state_index"])
def delta_prompt_kernel(
    mixed,  # arguments as of `delta_verify_kernel`
    ba,
    log_rate,
    dt_bias,
    slot_ids,
    token_offsets,
    num_folded,
    state,
    keys,
    deltas,
    decays,
    state_pools,
    attended,
    state_index,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    RECORDS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,  # rows of a chunk; a power of two
    FOLDED: tl.constexpr,  # power of two >= RECORDS
    POOLED: tl.constexpr,
):
    """Requests of more than RECORDS rows, whose state advances to the end.

    Grid as in `delta_verify_kernel`.
    """
    if POOLED:
        address = tl.load(state_pools + state_index)
        if address == 0:  # no state
            return
    request, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(token_offsets + request)
    num_rows = tl.load(token_offsets + request + 1) - start
    if num_rows > RECORDS:
        if POOLED:
            state = pooled(state_pools, state_index, state.dtype)
            keys = pooled(state_pools, state_index + 1, keys.dtype)
            deltas = pooled(state_pools, state_index + 2, deltas.dtype)
            decays = pooled(state_pools, state_index + 3, decays.dtype)
        slot, folds = tl.load(slot_ids + request), tl.load(num_folded + request)
        state += (slot * HEADS + head) * (KEY_DIM * VALUE_DIM)
        if folds != 0:
            row = tl.arange(0, FOLDED)
            record = slot * RECORDS + row
            key_rows = keys + (record * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
            decay = tl.load(decays + record * HEADS + head, mask=row < folds, other=0.0)
            old = _columns(deltas + (record * HEADS + head) * VALUE_DIM, row < folds, VALUE_DIM, BLOCK_V)
            for first in range(0, BLOCK_K, PART):
                part = _part(state, first, tl.where(folds < 0, 0, KEY_DIM), VALUE_DIM, PART, BLOCK_V)
                part = _folded(part, _keys(key_rows, first, row < folds, KEY_DIM, PART), old, decay, _product_of(mixed))
                _store_part(state, part, first, KEY_DIM, VALUE_DIM, PART, BLOCK_V)
        row = tl.arange(0, BLOCK)
        for chunk in range(0, num_rows, BLOCK):
            begin, is_row = start + chunk, row < num_rows - chunk
            inputs = mixed + (begin.to(tl.int64) + row) * (2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM)
            q_rows = inputs + (head // (HEADS // KEY_HEADS)) * KEY_DIM
            k_rows = q_rows + KEY_HEADS * KEY_DIM
            of_k, of_q, kk, qk = _no_products(BLOCK, BLOCK_V)
            tl.debug_barrier()  # the state was stored by other threads of the program
            for first in range(0, BLOCK_K, PART):
                part = _part(state, first, KEY_DIM, VALUE_DIM, PART, BLOCK_V)
                q = _keys(q_rows, first, is_row, KEY_DIM, PART)
                k = _keys(k_rows, first, is_row, KEY_DIM, PART)
                of_k, of_q, kk, qk = _with_part(of_k, of_q, kk, qk, q, k, part, _product_of(mixed))
            kk, qk, of_k, of_q = _unit(kk, qk, of_k, of_q, q_rows, k_rows, is_row, KEY_DIM, BLOCK_K)
            v = _columns(inputs + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM, is_row, VALUE_DIM, BLOCK_V)
            rate, decay = _gates(ba, log_rate, dt_bias, begin, head, row, num_rows - chunk, HEADS)
            result, new = _solved(kk, qk, of_k, of_q, v, rate, decay, BLOCK, _product_of(mixed))
            out = attended + ((begin.to(tl.int64) + row) * HEADS + head) * VALUE_DIM
            _store_columns(out, result, is_row, VALUE_DIM, BLOCK_V)
            new *= inverse_lengths(k_rows, is_row, KEY_DIM, BLOCK_K)[:, None]
            for first in range(0, BLOCK_K, PART):
                part = _part(state, first, KEY_DIM, VALUE_DIM, PART, BLOCK_V)
                part = _folded(part, _keys(k_rows, first, is_row, KEY_DIM, PART), new, decay, _product_of(mixed))
                _store_part(state, part, first, KEY_DIM, VALUE_DIM, PART, BLOCK_V)


@triton.constexpr_function
def _product_of(mixed):
    return "tf32x3" if mixed.dtype.element_ty == tl.float32 else "tf32"


@triton.jit
def _solved(kk, qk, of_k, of_q, v, rate, decay, BLOCK: tl.constexpr, PRODUCT: tl.constexpr):
    """Results and deltas of a block, [BLOCK, BLOCK_V] each.

    Inputs are products of its keys and queries with its keys, [BLOCK, BLOCK], and with S, [BLOCK, BLOCK_V]; missing
    rows have zeros everywhere.
    """
    total = tl.cumsum(decay, 0)
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    between = tl.exp(tl.where(row >= column, total[:, None] - total[None, :], float("-inf")))
    from_state = tl.exp(total)[:, None]
    inverse = _inverse(tl.where(row > column, rate[:, None] * between * kk, 0.0), BLOCK, PRODUCT)
    deltas = _dot(inverse, rate[:, None] * (v - from_state * of_k), None, PRODUCT)
    return _dot(between * qk, deltas, from_state * of_q, PRODUCT), deltas


@triton.jit
def _inverse(lower, BLOCK: tl.constexpr, PRODUCT: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangle L. BLOCK: 16, 32 or 64.

    From T, the inverses of the diagonal blocks of one size, follow the inverses of blocks four times as large: with E
    the part of L between the small blocks, (I + T E)^-1 T, and T E is nilpotent of order 4. Powers of the whole of L
    would cancel.
    """
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    inverse = _of_larger_blocks((row == column).to(tl.float32), lower, 1, BLOCK, PRODUCT)
    inverse = _of_larger_blocks(inverse, lower, 4, BLOCK, PRODUCT)
    if BLOCK > 16:
        inverse = _of_larger_blocks(inverse, lower, 16, BLOCK, PRODUCT)
    return inverse


@triton.jit
def _of_larger_blocks(inverse, lower, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr):
    """From inverses of diagonal blocks of SIZE rows to inverses of blocks of 4 * SIZE, or of the whole."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    is_between = (row // (4 * SIZE) == column // (4 * SIZE)) & (row // SIZE > column // SIZE)
    between = tl.where(is_between, lower, 0.0)
    if SIZE > 1:
        between = _dot(inverse, between, None, PRODUCT)
    if 2 * SIZE < BLOCK:  # else the square is zero
        square = _dot(between, between, None, PRODUCT)
        inverse = _dot(square, inverse, inverse, PRODUCT)
    return inverse - _dot(between, inverse, None, PRODUCT)


@triton.jit
def _dot(a, b, addend, PRODUCT: tl.constexpr):
    return tl.dot(_rounded(a, PRODUCT), _rounded(b, PRODUCT), addend, input_precision=PRODUCT)


@triton.jit
def _rounded(x, PRODUCT: tl.constexpr):
    """To the nearest TF32."""
    if PRODUCT == "tf32":
        return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _folded(part, k, deltas, decay, PRODUCT: tl.constexpr):
    """A part of S after the rows of a block; those that are not folded have zeros in `k` and `decay`."""
    total = tl.sum(decay, 0)
    weight = tl.exp(total - tl.cumsum(decay, 0))
    return _dot(tl.trans(k), deltas * weight[:, None], part * tl.exp(total), PRODUCT)


@triton.jit
def _no_products(BLOCK: tl.constexpr, BLOCK_V: tl.constexpr):
    zeros, square = tl.zeros((BLOCK, BLOCK_V), tl.float32), tl.zeros((BLOCK, BLOCK), tl.float32)
    return zeros, zeros, square, square


@triton.jit
def _with_part(of_k, of_q, kk, qk, q, k, part, PRODUCT: tl.constexpr):
    """The products of k and q with S and with k, and what a part of them adds."""
    part = _rounded(part, PRODUCT)  # k and q are exact
    of_k = tl.dot(k, part, of_k, input_precision=PRODUCT)
    of_q = tl.dot(q, part, of_q, input_precision=PRODUCT)
    kk = tl.dot(k, tl.trans(k), kk, input_precision=PRODUCT)
    return of_k, of_q, kk, tl.dot(q, tl.trans(k), qk, input_precision=PRODUCT)


@triton.jit
def _unit(kk, qk, of_k, of_q, q_rows, k_rows, is_row, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """The products for keys of length one, and queries of length KEY_DIM^-0.5."""
    of_key = inverse_lengths(k_rows, is_row, KEY_DIM, BLOCK_K)
    of_query = inverse_lengths(q_rows, is_row, KEY_DIM, BLOCK_K) * (KEY_DIM**-0.5)
    kk *= of_key[:, None] * of_key[None, :]
    qk *= of_query[:, None] * of_key[None, :]
    return kk, qk, of_k * of_key[:, None], of_q * of_query[:, None]


@triton.jit
def _gates(ba, log_rate, dt_bias, begin, head, row, num_rows, HEADS: tl.constexpr):
    """Rates and log decays [BLOCK]; zeros in rows that are none."""
    at = ba + (begin.to(tl.int64) + row) * (2 * HEADS) + head
    return rates_of(at, row < num_rows), decays_of(at + HEADS, log_rate + head, dt_bias + head, row < num_rows)


@triton.jit
def _keys(rows, first, is_row, KEY_DIM: tl.constexpr, PART: tl.constexpr):
    """Features of q or k from `first` on, float32 [BLOCK, PART]; zeros in rows that are none."""
    key = first + tl.arange(0, PART)[None, :]
    return tl.load(rows[:, None] + key, mask=is_row[:, None] & (key < KEY_DIM), other=0.0).to(tl.float32)


@triton.jit
def _columns(rows, is_row, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr):
    """The program's columns, float32 [BLOCK, BLOCK_V]; zeros in rows that are none."""
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    return tl.load(rows[:, None] + column, mask=is_row[:, None] & (column < VALUE_DIM), other=0.0).to(tl.float32)


@triton.jit
def _store_columns(rows, value, is_row, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr):
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    tl.store(rows[:, None] + column, value, mask=is_row[:, None] & (column < VALUE_DIM))


@triton.jit
def _part(state, first, num_keys, VALUE_DIM: tl.constexpr, PART: tl.constexpr, BLOCK_V: tl.constexpr):
    """Rows of S from `first` on, [PART, BLOCK_V]; zeros from row `num_keys` on."""
    key = first + tl.arange(0, PART)[:, None]
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    return tl.load(state + key * VALUE_DIM + column, mask=(key < num_keys) & (column < VALUE_DIM), other=0.0)


@triton.jit
def _store_part(
    state, part, first, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PART: tl.constexpr, BLOCK_V: tl.constexpr
):
    key = first + tl.arange(0, PART)[:, None]
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    tl.store(state + key * VALUE_DIM + column, part, mask=(key < KEY_DIM) & (column < VALUE_DIM))


_L2_EPS = tl.constexpr(1e-6)  # inside of the square root
_LINEAR = tl.constexpr(20.0)  # from here on softplus is its argument, as in PyTorch


@triton.jit
def inverse_lengths(rows, is_row, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Inverse lengths of the vectors of KEY_DIM at `rows`, a vector of pointers."""
    key = tl.arange(0, BLOCK_K)[None, :]
    x = tl.load(rows[:, None] + key, mask=is_row[:, None] & (key < KEY_DIM), other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) + _L2_EPS)


@triton.jit
def inverse_length(x):
    """Inverse length of one vector, float32."""
    return 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) + _L2_EPS)


@triton.jit
def rates_of(b, is_row):
    """sigmoid, and 0 where there is no row."""
    value = tl.load(b, mask=is_row, other=0.0).to(tl.float32)
    return tl.where(is_row, 1.0 / (1.0 + tl.exp(-value)), 0.0)


@triton.jit
def decays_of(a, log_rate, dt_bias, is_row):
    """-e^log_rate softplus(a + dt_bias), and 0 where there is no row."""
    value = tl.load(a, mask=is_row, other=0.0).to(tl.float32) + tl.load(dt_bias)
    softplus = tl.where(value > _LINEAR, value, tl.log(1.0 + tl.exp(tl.minimum(value, _LINEAR))))
    return tl.where(is_row, -tl.exp(tl.load(log_rate)) * softplus, 0.0)
