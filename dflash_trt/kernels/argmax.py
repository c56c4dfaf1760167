"""Draft tokens straight from low-precision logits: no fp32 copy, and one (value, index) pair per tile.

Rows of requests with a temperature get the noise that will sample the target at their position (`philox.py`); greedy
rows do not pay for it. Ties go to the smallest index, however the vocabulary is cut. NaN is below every number, and the
token is in the vocabulary whatever the logits are: drafts made of NaN are only rejected. `reference_sampling.py` has
the definition.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.philox import noise_of_range, noise_of_tokens

TILE = 4096  # logits per program

_NO_INDEX = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["num_slots"])
def tile_argmax_kernel(
    logits,  # F [rows, vocab_size]
    temperature,  # float32 [R]
    seed,  # int64 [R]
    next_context_lens,  # int32 [R], position of the bonus token, the block's slot 0
    draft_to_target,  # int64 [vocab_size], the target's ids of a draft vocabulary, whose noise it is
    tile_max,  # float32 [rows, tiles]
    tile_argmax,  # int32 [rows, tiles]
    vocab_size,
    num_slots,  # rows of a request, K
    HAS_MAP: tl.constexpr,
    TILE: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    request = row // num_slots
    offsets = tile * TILE + tl.arange(0, TILE)
    start = logits + row.to(tl.int64) * vocab_size
    x = tl.load(start + offsets, mask=offsets < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    degree = tl.load(temperature + request)
    if degree > 0:
        position = tl.load(next_context_lens + request) + 1 + row % num_slots
        if HAS_MAP:
            tokens = tl.load(draft_to_target + offsets, mask=offsets < vocab_size, other=0).to(tl.int32)
            x += degree * noise_of_tokens(tl.load(seed + request), position, tokens)
        else:
            x += degree * noise_of_range(tl.load(seed + request), position, tile * TILE, TILE)
    largest = tl.max(x, axis=0)
    index = tl.min(tl.where((x == largest) & (offsets < vocab_size), offsets, _NO_INDEX), axis=0)
    at = row * tl.num_programs(1) + tile
    tl.store(tile_max + at, largest)
    tl.store(tile_argmax + at, index)


@triton.jit(do_not_specialize=["num_tiles"])
def combine_argmax_kernel(
    tile_max,  # float32 [rows, tiles]
    tile_argmax,  # int32 [rows, tiles]
    draft_to_target,  # int64 [vocab_size]
    token_ids,  # int32 [rows], of the target
    vocab_size,
    num_tiles,
    HAS_MAP: tl.constexpr,
    TILES: tl.constexpr,  # power of two >= num_tiles
):
    row = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    maxima = tl.load(tile_max + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    indices = tl.load(tile_argmax + row * num_tiles + tiles, mask=tiles < num_tiles, other=_NO_INDEX)
    token = tl.min(tl.where(maxima == tl.max(maxima, axis=0), indices, _NO_INDEX), axis=0)
    token = tl.minimum(token, vocab_size - 1)  # whatever a GPU's maximum makes of NaN
    if HAS_MAP:
        token = tl.load(draft_to_target + token).to(tl.int32)
    tl.store(token_ids + row, token)
