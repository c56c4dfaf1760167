"""Draft tokens straight from low-precision logits: no fp32 copy, and one (value, index) pair per tile.

Rows of requests with a temperature get the noise that will sample the target at their position (`philox.py`), or are
sampled from the row's top-k tokens for rejection sampling (`draft_topk.py`); greedy rows do not pay for it. Ties go to
the smallest index, however the vocabulary is cut. NaN is below every number, and the token is in the vocabulary
whatever the logits are: drafts made of NaN are only rejected. `reference_sampling.py` has the definition.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.draft_topk import best_of_pieces, draw_of, topk_tokens
from dflash_trt.kernels.philox import DRAFTS, TOKENS, noise_of_range, noise_of_tokens

_NO_INDEX = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["num_slots"])
def tile_argmax_kernel(
    logits,  # F [rows, vocab_size]
    temperature,  # float32 [R]
    seed,  # int64 [R]
    draft_stream,  # int32 [R]
    next_context_lens,  # int32 [R], position of the bonus token, the block's slot 0
    draft_to_target,  # int64 [vocab_size], the target's ids of a draft vocabulary, whose noise it is
    tile_max,  # float32 [rows, tiles], rows without rejection sampling
    tile_argmax,  # int32 [rows, tiles], the same
    piece_best,  # int64 [rows, tiles * PIECES], rows with rejection sampling
    vocab_size,
    num_slots,  # rows of a request, K
    HAS_MAP: tl.constexpr,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    request = row // num_slots
    offsets = tile * TILE + tl.arange(0, TILE)
    start = logits + row.to(tl.int64) * vocab_size
    x = tl.load(start + offsets, mask=offsets < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    at = row * tl.num_programs(1) + tile
    degree = tl.load(temperature + request)
    if (degree > 0) & (tl.load(draft_stream + request) == DRAFTS):
        best = best_of_pieces(x, tile * TILE, vocab_size, TILE, PIECES)
        tl.store(piece_best + at.to(tl.int64) * PIECES + tl.arange(0, PIECES), best)
    else:
        if degree > 0:
            position = tl.load(next_context_lens + request) + 1 + row % num_slots
            if HAS_MAP:
                tokens = tl.load(draft_to_target + offsets, mask=offsets < vocab_size, other=0).to(tl.int32)
                x += degree * noise_of_tokens(tl.load(seed + request), position, TOKENS, tokens)
            else:
                x += degree * noise_of_range(tl.load(seed + request), position, TOKENS, tile * TILE, TILE)
        largest = tl.max(x, axis=0)
        index = tl.min(tl.where((x == largest) & (offsets < vocab_size), offsets, _NO_INDEX), axis=0)
        tl.store(tile_max + at, largest)
        tl.store(tile_argmax + at, index)


@triton.jit(do_not_specialize=["num_slots", "num_tiles", "draft_topk"])
def combine_argmax_kernel(
    logits,  # F [rows, vocab_size]
    temperature,  # float32 [R]
    seed,  # int64 [R]
    draft_stream,  # int32 [R]
    next_context_lens,  # int32 [R]
    draft_to_target,  # int64 [vocab_size]
    tile_max,  # float32 [rows, tiles]
    tile_argmax,  # int32 [rows, tiles]
    piece_best,  # int64 [rows, tiles * PIECES]
    token_ids,  # out, int32 [rows], of the target
    next_draft_topk_ids,  # out, int32 [rows, draft_topk], of the target
    next_draft_topk_probs,  # out, float32 [rows, draft_topk]; 0 in rows without rejection sampling, as their ids
    vocab_size,
    num_slots,
    num_tiles,
    draft_topk,
    HAS_MAP: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # power of two >= num_tiles
    PIECES: tl.constexpr,
    DRAFT_TOPK: tl.constexpr,  # power of two >= draft_topk
):
    row = tl.program_id(0)
    request = row // num_slots
    degree = tl.load(temperature + request)
    places = tl.arange(0, DRAFT_TOPK)
    is_topk = places < draft_topk
    chosen = tl.zeros([DRAFT_TOPK], tl.int32)
    draft_topk_probs = tl.zeros([DRAFT_TOPK], tl.float32)
    if (degree > 0) & (tl.load(draft_stream + request) == DRAFTS):
        num_pieces = num_tiles * PIECES
        scores, chosen = topk_tokens(
            logits + row.to(tl.int64) * vocab_size,
            piece_best + row.to(tl.int64) * num_pieces,
            vocab_size,
            num_pieces,
            draft_topk,
            TILES * PIECES,
            TILE // PIECES,
            DRAFT_TOPK,
        )
        if HAS_MAP:
            chosen = tl.load(draft_to_target + chosen, mask=is_topk, other=0).to(tl.int32)
        position = tl.load(next_context_lens + request) + 1 + row % num_slots
        token, draft_topk_probs = draw_of(scores, chosen, is_topk, degree, tl.load(seed + request), position)
    else:
        tiles = tl.arange(0, TILES)
        maxima = tl.load(tile_max + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
        indices = tl.load(tile_argmax + row * num_tiles + tiles, mask=tiles < num_tiles, other=_NO_INDEX)
        token = tl.min(tl.where(maxima == tl.max(maxima, axis=0), indices, _NO_INDEX), axis=0)
        token = tl.minimum(token, vocab_size - 1)  # whatever a GPU's maximum makes of NaN
        if HAS_MAP:
            token = tl.load(draft_to_target + token).to(tl.int32)
    tl.store(token_ids + row, token)
    tl.store(next_draft_topk_ids + row * draft_topk + places, chosen, mask=is_topk)
    tl.store(next_draft_topk_probs + row * draft_topk + places, draft_topk_probs, mask=is_topk)
