"""Logit rules and token masks on a GPU: scores of a step in float32, as `backends/torch` defines them.


    count_tokens  [requests, tiles]  how often each token is in the text before a request's first row of logits
    adjust        [rows, tiles]      scores: the logits, with the rules of the row's request, then its mask
    raw_logprobs  [rows]             log-probabilities of rows with rules or masks, under the logits before them

Tokens of a slot are stored by position, the step's tokens included; a row reads the tokens before it. Masks are as in
`core.step_plan.TokenMasks`; `row_masks` has the number of each row's mask, from 1 on, or 0.
Launching is in `sampling_launch.py`.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.sampling_rows import load_logits

_ANY_TOKEN = tl.constexpr(-1)
_NOT_THERE = tl.constexpr(-2)


@triton.jit
def mask_of_row(row_masks, row):
    """The number of a row's mask, from 1 on; 0 for none."""
    return tl.load(row_masks + row)


@triton.jit
def is_adjusted(has_rules, slot_ids, row_masks, row, width):
    """True for a row with rules or a mask."""
    return (tl.load(has_rules + tl.load(slot_ids + row // width)) != 0) | (mask_of_row(row_masks, row) != 0)


@triton.jit
def num_known_tokens(positions, logit_rows, row):
    """Tokens before the one that a row of logits gives."""
    return tl.load(positions + tl.load(logit_rows + row)) + 1


@triton.jit(do_not_specialize=["width", "max_positions"])
def count_tokens_kernel(
    slot_ids,  # int64 [R]
    positions,  # int32 [T]
    logit_rows,  # int32 [R * width]
    has_rules,  # int32 [S]
    num_prompt_tokens,  # int32 [S]
    tokens,  # int32 [S, max_positions]
    counts,  # int32 [R, vocab_size], twice the number in the output, and 1 for a token of the prompt
    vocab_size,
    width,
    max_positions,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ids + request)
    if tl.load(has_rules + slot) != 0:
        own = counts + request.to(tl.int64) * vocab_size
        offsets = tile * TILE + tl.arange(0, TILE)
        tl.store(own + offsets, tl.zeros([TILE], tl.int32), mask=offsets < vocab_size)
        tl.debug_barrier()
        known, num_prompt = num_known_tokens(positions, logit_rows, request * width), tl.load(num_prompt_tokens + slot)
        for start in range(0, known, CHUNK):
            places = start + tl.arange(0, CHUNK)
            found = tl.load(tokens + slot * max_positions + places, mask=places < known, other=_NOT_THERE)
            is_in = (places < known) & (found // TILE == tile) & (found >= 0) & (found < vocab_size)
            tl.atomic_or(own + found, 1, mask=is_in & (places < num_prompt), sem="relaxed")
            tl.atomic_add(own + found, 2, mask=is_in & (places >= num_prompt), sem="relaxed")


@triton.jit(do_not_specialize=["width", "max_positions"])
def adjust_kernel(
    logits,  # F [R * width, vocab_size]
    scores,  # float32 [R * width, vocab_size], written
    slot_ids,  # int64 [R]
    positions,  # int32 [T]
    logit_rows,  # int32 [R * width]
    has_rules,  # int32 [S]
    penalties,  # float32 [S, 3]: repetition, presence, frequency
    num_biases,  # int32 [S]
    bias_tokens,  # int32 [S, MAX_BIASES]
    bias_values,  # float32 [S, MAX_BIASES]
    bias_ends,  # int32 [S, MAX_BIASES]
    prefixes,  # int32 [S, MAX_BIASES, PREFIX]
    tokens,  # int32 [S, max_positions]
    row_masks,  # int32 [R * width + 1], the last one not read
    mask_bits,  # int32 [any, ceil(vocab_size / 32)]
    counts,  # int32 [R, vocab_size]
    vocab_size,
    width,
    max_positions,
    TILE: tl.constexpr,
    MAX_BIASES: tl.constexpr,
    PREFIX: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    request = row // width
    slot = tl.load(slot_ids + request)
    offsets = tile * TILE + tl.arange(0, TILE)
    x = load_logits(logits, row, offsets, vocab_size)
    if tl.load(has_rules + slot) != 0:
        known = num_known_tokens(positions, logit_rows, row)
        text = tokens + slot * max_positions
        columns = tl.arange(0, PREFIX)
        places = known - PREFIX + columns
        before = tl.load(text + places, mask=places >= 0, other=_NOT_THERE)
        for i in range(tl.load(num_biases + slot)):
            at = slot * MAX_BIASES + i
            prefix = tl.load(prefixes + at * PREFIX + columns)
            num_others = tl.sum(((prefix != _ANY_TOKEN) & (prefix != before)).to(tl.int32), axis=0)
            is_active = (known < tl.load(bias_ends + at)) & (num_others == 0)
            is_biased = (offsets == tl.load(bias_tokens + at)) & is_active
            x = tl.where(is_biased, x + tl.load(bias_values + at), x)
        count = tl.load(counts + request.to(tl.int64) * vocab_size + offsets, mask=offsets < vocab_size, other=0)
        for place in range(num_known_tokens(positions, logit_rows, request * width), known):
            count += tl.where(offsets == tl.load(text + place), 2, 0)
        repetition, presence = tl.load(penalties + slot * 3), tl.load(penalties + slot * 3 + 1)
        repeated = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition))
        x = tl.where(count > 0, repeated, x)
        x -= tl.load(penalties + slot * 3 + 2) * (count // 2).to(tl.float32)
        x -= tl.where(count >= 2, presence, 0.0)
    mask = mask_of_row(row_masks, row)
    if mask != 0:
        words = mask_bits + (mask - 1).to(tl.int64) * tl.cdiv(vocab_size, 32)
        word = tl.load(words + offsets // 32, mask=offsets < vocab_size, other=0)
        x = tl.where((word >> (offsets % 32)) & 1 != 0, x, float("-inf"))
    tl.store(scores + row.to(tl.int64) * vocab_size + offsets, x, mask=offsets < vocab_size)


@triton.jit(do_not_specialize=["width"])
def raw_logprobs_kernel(
    logits,  # F [R * width, vocab_size]
    scores,  # float32 [R * width, vocab_size]
    slot_ids,  # int64 [R]
    has_rules,  # int32 [S]
    row_masks,  # int32 [R * width + 1], the last one not read
    emitted_tokens,  # int32 [R * width]
    emitted_logprobs,  # float32 [R * width], rows with rules or masks are overwritten
    vocab_size,
    width,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    if is_adjusted(has_rules, slot_ids, row_masks, row, width):
        largest = tl.full((), float("-inf"), tl.float32)
        for start in range(0, vocab_size, TILE):
            x = load_logits(logits, row, start + tl.arange(0, TILE), vocab_size)
            largest = tl.maximum(largest, tl.max(tl.where(x == x, x, float("-inf")), axis=0))
        anchor = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
        total = tl.full((), 0.0, tl.float32)
        for start in range(0, vocab_size, TILE):
            total += tl.sum(tl.exp(load_logits(logits, row, start + tl.arange(0, TILE), vocab_size) - anchor), axis=0)
        at = row.to(tl.int64) * vocab_size + tl.load(emitted_tokens + row)
        logprob = tl.load(logits + at).to(tl.float32) - anchor - tl.log(total)
        gives_token = (total > 0) & (total < float("inf")) & (tl.load(scores + at) != float("-inf"))
        tl.store(emitted_logprobs + row, tl.where(gives_token, logprob, float("nan")))
