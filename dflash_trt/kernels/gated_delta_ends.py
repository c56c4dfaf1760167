"""Both ends of a gated delta net: the causal convolution before the recurrence, and all that follows.


    convolve_kernel  [rows, channels]     SiLU of the convolution, over inputs of the step and of the slot's window
    finish_kernel    [rows, heads]        norm and output gate; the rows' keys and decays, if they are records
                     [requests, channels] the slot's window and position

A window begins with the inputs before `position`; inputs of accepted tokens follow, so it is read from the first
accepted one on. Nothing that `convolve_kernel` and the recurrence read is written before `finish_kernel`.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.gated_delta import decays_of, inverse_lengths
from dflash_trt.kernels.rope_and_pages import pooled, request_of


@triton.jit(do_not_specialize=["num_requests", "state_index"])
def convolve_kernel(
    qkvz,  # F [N, CHANNELS + GATES]
    filters,  # F [CHANNELS, TAPS]
    slot_ids,  # int64 [R]
    token_offsets,  # int32 [R + 1]
    context_lens,  # int32 [R]
    window,  # F [slots, TAPS - 1 + RECORDS, CHANNELS]
    position,  # int32 [slots]
    state_pools,  # int64; with POOLED the two tensors before it are at its state_index + 4 and + 5
    mixed,  # out, F [N, CHANNELS]
    num_folded,  # out, int32 [R]: records that the step folds; -1: the request is new
    num_requests,
    state_index,
    CHANNELS: tl.constexpr,
    GATES: tl.constexpr,
    TAPS: tl.constexpr,
    RECORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    POOLED: tl.constexpr,
):
    """Grid: (N, ceil(CHANNELS / BLOCK))."""
    if POOLED:
        address = tl.load(state_pools + state_index)
        if address == 0:  # no state
            return
        window = pooled(state_pools, state_index + 4, window.dtype)
        position = pooled(state_pools, state_index + 5, position.dtype)
    row = tl.program_id(0)
    request = request_of(row, token_offsets, num_requests, REQUESTS)
    if request < num_requests:
        start, slot = tl.load(token_offsets + request), tl.load(slot_ids + request)
        context_len = tl.load(context_lens + request)
        has_window = context_len > 0
        folds = tl.minimum(tl.maximum(context_len - tl.load(position + slot), 0), RECORDS)
        folds = tl.where(has_window, folds, 0)
        if (row == start) & (tl.program_id(1) == 0):
            tl.store(num_folded + request, tl.where(has_window, folds, -1))
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_in = channel < CHANNELS
        before = window + (slot * (TAPS - 1 + RECORDS) + folds) * CHANNELS
        inputs = qkvz + start.to(tl.int64) * (CHANNELS + GATES)
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(TAPS):
            index = row - start + tap  # index of the input, from the first of the window
            num_old = tl.where((index < TAPS - 1) & has_window, CHANNELS, 0)
            old = tl.load(before + index * CHANNELS + channel, mask=channel < num_old, other=0.0)
            at = (index - (TAPS - 1)).to(tl.int64) * (CHANNELS + GATES)
            num_new = tl.where(index >= TAPS - 1, CHANNELS, 0)
            new = tl.load(inputs + at + channel, mask=channel < num_new, other=0.0)
            weight = tl.load(filters + channel * TAPS + tap, mask=is_in, other=0.0).to(tl.float32)
            total += (old.to(tl.float32) + new.to(tl.float32)) * weight  # one of them is there
        value = total / (1.0 + tl.exp(-total))
        tl.store(mixed + row.to(tl.int64) * CHANNELS + channel, value.to(mixed.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["num_rows", "num_requests", "state_index"])
def finish_kernel(
    attended,  # float32 [N, HEADS, VALUE_DIM]
    qkvz,  # F [N, CHANNELS + HEADS * VALUE_DIM]
    mixed,  # F [N, CHANNELS]
    ba,  # F [N, 2 * HEADS]
    norm,  # F [VALUE_DIM]
    log_rate,  # float32 [HEADS]
    dt_bias,  # float32 [HEADS]
    slot_ids,  # int64 [R]
    token_offsets,  # int32 [R + 1]
    context_lens,  # int32 [R]
    num_folded,  # int32 [R]
    keys,  # float32 [slots, RECORDS, KEY_HEADS, KEY_DIM]
    decays,  # float32 [slots, RECORDS, HEADS]
    window,  # F [slots, TAPS - 1 + RECORDS, CHANNELS]
    position,  # int32 [slots]
    state_pools,  # int64; with POOLED the four tensors before it are at its state_index + 1, 3, 4 and 5
    out,  # F [N, HEADS * VALUE_DIM]; rows of no request get zeros
    eps,
    num_rows,
    num_requests,
    state_index,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    RECORDS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= KEY_DIM
    BLOCK_V: tl.constexpr,  # power of two >= VALUE_DIM
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of a program
    REQUESTS: tl.constexpr,
    HAS_UNIT_KEYS: tl.constexpr,  # of the records; see `gated_delta_in_order.py`
    POOLED: tl.constexpr,
):
    """Grid: (N + R, the larger one of ceil(HEADS / BLOCK_HEADS) and ceil(CHANNELS / BLOCK))."""
    if POOLED:
        address = tl.load(state_pools + state_index)
        if address == 0:  # no state
            return
        keys = pooled(state_pools, state_index + 1, keys.dtype)
        decays = pooled(state_pools, state_index + 3, decays.dtype)
        window = pooled(state_pools, state_index + 4, window.dtype)
        position = pooled(state_pools, state_index + 5, position.dtype)
    row = tl.program_id(0)
    if row < num_rows:
        request = request_of(row, token_offsets, num_requests, REQUESTS)
        is_row = request < num_requests
        _store_gated(
            attended, qkvz, norm, out, eps, row, is_row, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, BLOCK_HEADS, BLOCK_V
        )
        if is_row:
            start = tl.load(token_offsets + request)
            if tl.load(token_offsets + request + 1) - start <= RECORDS:
                inputs = mixed + row.to(tl.int64) * (2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM)
                record = tl.load(slot_ids + request) * RECORDS + row - start
                head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
                column = tl.arange(0, BLOCK_K)[None, :]
                mask = (head < KEY_HEADS)[:, None] & (column < KEY_DIM)
                of_heads = inputs + (KEY_HEADS + head) * KEY_DIM
                key = tl.load(of_heads[:, None] + column, mask=mask, other=0.0).to(tl.float32)
                if HAS_UNIT_KEYS:
                    key *= inverse_lengths(of_heads, head < KEY_HEADS, KEY_DIM, BLOCK_K)[:, None]
                tl.store(keys + (record * KEY_HEADS + head[:, None]) * KEY_DIM + column, key, mask=mask)
                is_head, some = head < HEADS, tl.minimum(head, HEADS - 1)
                a = ba + row.to(tl.int64) * (2 * HEADS) + HEADS + head
                decay = decays_of(a, log_rate + some, dt_bias + some, is_head)
                tl.store(decays + record * HEADS + head, decay, mask=is_head)
    else:
        request = row - num_rows
        _move_window(
            qkvz,
            slot_ids,
            token_offsets,
            context_lens,
            num_folded,
            window,
            position,
            request,
            2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM,
            HEADS * VALUE_DIM,
            TAPS,
            RECORDS,
            BLOCK,
        )


@triton.jit
def _store_gated(
    attended,
    qkvz,
    norm,
    out,
    eps,
    row,
    is_row,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Norm of each head, then its gate; rounded where the network's ops would."""
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_V)
    is_in = (head < HEADS)[:, None] & (column < VALUE_DIM)[None, :]
    at, long_row = head[:, None] * VALUE_DIM + column[None, :], row.to(tl.int64)
    is_of_row = (head < tl.where(is_row, HEADS, 0))[:, None] & (column < VALUE_DIM)[None, :]
    value = tl.load(attended + long_row * (HEADS * VALUE_DIM) + at, mask=is_of_row, other=0.0)
    mean_square = tl.sum(value * value, 1) / VALUE_DIM
    value = (value * (1.0 / tl.sqrt_rn(mean_square + eps))[:, None]).to(out.dtype.element_ty).to(tl.float32)
    weight = tl.load(norm + column, mask=column < VALUE_DIM, other=0.0).to(tl.float32)
    value = (value * weight[None, :]).to(out.dtype.element_ty).to(tl.float32)
    gates = (
        qkvz
        + long_row * (2 * KEY_HEADS * KEY_DIM + 2 * HEADS * VALUE_DIM)
        + 2 * KEY_HEADS * KEY_DIM
        + HEADS * VALUE_DIM
    )
    gate = tl.load(gates + at, mask=is_of_row, other=0.0).to(tl.float32)
    gated = (value * gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + long_row * (HEADS * VALUE_DIM) + at, gated, mask=is_in)


@triton.jit
def _move_window(
    qkvz,
    slot_ids,
    token_offsets,
    context_lens,
    num_folded,
    window,
    position,
    request,
    CHANNELS: tl.constexpr,
    GATES: tl.constexpr,
    TAPS: tl.constexpr,
    RECORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A channel is one thread's, so that what is still to be read has not been overwritten."""
    start = tl.load(token_offsets + request)
    rows = tl.load(token_offsets + request + 1) - start
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = channel < CHANNELS
    if rows > 0:
        slot, folds = tl.load(slot_ids + request), tl.load(num_folded + request)
        is_prompt = rows > RECORDS
        skipped = tl.where(is_prompt, rows, 0)  # a prompt's window is after its rows
        kept = TAPS - 1 + tl.where(is_prompt, 0, rows)
        if tl.program_id(1) == 0:
            tl.store(position + slot, tl.load(context_lens + request) + skipped)
        of_slot = window + slot * (TAPS - 1 + RECORDS) * CHANNELS + channel
        inputs = qkvz + start.to(tl.int64) * (CHANNELS + GATES) + channel
        for i in range(kept):
            index = skipped + i  # index of the input, from the first of the window
            num_old = tl.where((index < TAPS - 1) & (folds >= 0), CHANNELS, 0)
            old = tl.load(of_slot + (index + tl.maximum(folds, 0)) * CHANNELS, mask=channel < num_old, other=0.0)
            at = (index - (TAPS - 1)).to(tl.int64) * (CHANNELS + GATES)
            new = tl.load(inputs + at, mask=channel < tl.where(index >= TAPS - 1, CHANNELS, 0), other=0.0)
            tl.store(of_slot + i * CHANNELS, old + new, mask=is_in)  # one of them is there
