"""The recurrence of gated delta nets token by token: a row's bits depend on the tokens before it alone.

The kernels of `gated_delta.py` solve blocks of rows, which round by the place where a block begins. Here one loop folds
the accepted records into S and then computes the step's rows: both advance S by the same instructions, so neither K nor
chunks nor rejected drafts change a bit. Records hold keys as they leave the convolution: their lengths are computed
where they are used, for records and rows alike.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.gated_delta import decays_of, inverse_length, rates_of
from dflash_trt.kernels.rope_and_pages import pooled


@triton.jit(do_not_specialize=["state_index"])
def delta_in_order_kernel(
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
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    POOLED: tl.constexpr,
):
    """All requests. Grid: (R, HEADS, ceil(VALUE_DIM / BLOCK_V)).

    A request of more than RECORDS rows leaves its state at its end, others before their rows, which become records.
    """
    if POOLED:
        address = tl.load(state_pools + state_index)
        if address == 0:  # no state
            return
        state = pooled(state_pools, state_index, state.dtype)
        keys = pooled(state_pools, state_index + 1, keys.dtype)
        deltas = pooled(state_pools, state_index + 2, deltas.dtype)
        decays = pooled(state_pools, state_index + 3, decays.dtype)
    request, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(token_offsets + request).to(tl.int64)
    num_rows = tl.load(token_offsets + request + 1) - start
    if num_rows > 0:
        slot, folds = tl.load(slot_ids + request), tl.load(num_folded + request)
        num_records = tl.maximum(folds, 0)
        key_head = head // (HEADS // KEY_HEADS)
        key, column = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_in = (key < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
        of_state = state + (slot * HEADS + head) * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + column[None, :]
        s = tl.load(of_state, mask=is_in, other=0.0)
        s = tl.where(folds < 0, 0.0, s)
        for i in range(num_records + num_rows):
            index = i - num_records  # of the row; below 0 of a record
            is_row, is_record = index >= 0, index < 0
            row_key, record_key = key < tl.where(is_row, KEY_DIM, 0), key < tl.where(is_row, 0, KEY_DIM)
            row_column = column < tl.where(is_row, VALUE_DIM, 0)
            record_column = column < tl.where(is_row, 0, VALUE_DIM)
            if index == 0:
                if (folds != 0) & (num_rows <= RECORDS):
                    tl.store(of_state, s, mask=is_in)
                tl.debug_barrier()  # other threads of the program may still read the old records
            row = start + index
            record = slot * RECORDS + tl.where(is_row, index, i)
            inputs = mixed + row * (2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM)
            of_keys = keys + (record * KEY_HEADS + key_head) * KEY_DIM + key
            of_deltas = deltas + (record * HEADS + head) * VALUE_DIM + column
            of_rows = inputs + key_head * KEY_DIM + key
            q = tl.load(of_rows, mask=row_key, other=0.0).to(tl.float32)
            k = tl.load(of_rows + KEY_HEADS * KEY_DIM, mask=row_key, other=0.0).to(tl.float32)
            k += tl.load(of_keys, mask=record_key, other=0.0)  # one of them is there
            of_values = inputs + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
            v = tl.load(of_values, mask=row_column, other=0.0).to(tl.float32)
            k *= inverse_length(k)
            q *= inverse_length(q) * (KEY_DIM**-0.5)
            b = ba + row * (2 * HEADS) + head
            decay = decays_of(b + HEADS, log_rate + head, dt_bias + head, is_row)
            decay += tl.load(decays + record * HEADS + head, mask=is_record, other=0.0)
            s *= tl.exp(decay)
            delta = rates_of(b, is_row) * (v - tl.sum(k[:, None] * s, 0))
            delta += tl.load(of_deltas, mask=record_column, other=0.0)
            s = tl.fma(tl.broadcast_to(k[:, None], s.shape), tl.broadcast_to(delta[None, :], s.shape), s)
            result = tl.sum(q[:, None] * s, 0)
            of_results = attended + (row * HEADS + head) * VALUE_DIM + column
            tl.store(of_results, result, mask=row_column)
            if num_rows <= RECORDS:
                tl.store(of_deltas, delta, mask=row_column)
        if num_rows > RECORDS:
            tl.store(of_state, s, mask=is_in)
