"""Most likely tokens of rows of logits, with log probabilities, as in `backends/torch/logprobs.py`.


    tile_top  [rows, tiles]  a tile's largest logits and their columns, its maximum, and the sum of its exponentials
    row_top   [rows]         the largest of all tiles, ties by smaller column, less the logarithm of the row's sum

Launching is in `sampling_launch.py`.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.sampling_rows import load_logits


@triton.jit
def largest_left(x, columns, is_left, none):
    """The largest number and its smallest column; -infinity and `none` if only NaN is left."""
    value = tl.max(tl.where(is_left & (x == x), x, float("-inf")), axis=0)
    return value, tl.min(tl.where(is_left & (x == value), columns, none), axis=0)


@triton.jit
def finite_or_zero(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit(do_not_specialize=["num_top", "num_tiles"])
def tile_top_kernel(
    logits,  # F [any, vocab_size]
    rows,  # int64 [M], of logits
    values,  # float32 [M, num_tiles, num_top], written
    columns,  # int32 [M, num_tiles, num_top], written; vocab_size where a tile has no more
    tile_max,  # float32 [M, num_tiles], written
    tile_sum,  # float32 [M, num_tiles], written: of exponentials of logits less a finite maximum
    vocab_size,
    num_top,
    num_tiles,
    TILE: tl.constexpr,
):
    index, tile = tl.program_id(0), tl.program_id(1)
    offsets = tile * TILE + tl.arange(0, TILE)
    x = load_logits(logits, tl.load(rows + index), offsets, vocab_size)
    is_left = offsets < vocab_size
    place = index * num_tiles + tile
    largest, _ = largest_left(x, offsets, is_left, vocab_size)
    tl.store(tile_max + place, largest)
    tl.store(tile_sum + place, tl.sum(tl.exp(x - finite_or_zero(largest)), axis=0))
    for i in range(num_top):
        value, column = largest_left(x, offsets, is_left, vocab_size)
        is_left &= offsets != column
        tl.store(values + place * num_top + i, value)
        tl.store(columns + place * num_top + i, column)


@triton.jit(do_not_specialize=["num_top", "num_tiles"])
def row_top_kernel(
    logits,  # F [any, vocab_size]
    rows,  # int64 [M], of logits
    tokens,  # int64 [M], with HAS_TOKENS
    values,  # float32 [M, num_tiles, num_top]
    columns,  # int32 [M, num_tiles, num_top]
    tile_max,  # float32 [M, num_tiles]
    tile_sum,  # float32 [M, num_tiles]
    top_tokens,  # int32 [M, num_top], written
    top_logprobs,  # float32 [M, num_top], written
    token_logprobs,  # float32 [M], with HAS_TOKENS written
    vocab_size,
    num_top,
    num_tiles,
    TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
):
    index = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    maxima = tl.load(tile_max + index * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    sums = tl.load(tile_sum + index * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    anchor = finite_or_zero(tl.max(maxima, axis=0))
    distances = tl.where(sums == 0.0, 0.0, finite_or_zero(maxima) - anchor)  # 0 of a tile of -infinity
    total = tl.sum(sums * tl.exp(distances), axis=0)
    log_sum = tl.log(tl.where(total < float("inf"), total, float("nan")))
    places = tl.arange(0, CANDIDATES)
    is_there = places < num_tiles * num_top
    at = index * num_tiles * num_top + places
    x = tl.load(values + at, mask=is_there, other=float("-inf"))
    candidates = tl.load(columns + at, mask=is_there, other=vocab_size)
    is_left = candidates < vocab_size
    for i in range(num_top):
        value, column = largest_left(x, candidates, is_left, vocab_size)
        is_left &= candidates != column
        tl.store(top_tokens + index * num_top + i, tl.minimum(column, vocab_size - 1))
        tl.store(top_logprobs + index * num_top + i, value - anchor - log_sum)
    if HAS_TOKENS:
        row = tl.load(rows + index).to(tl.int64)
        x = tl.load(logits + row * vocab_size + tl.load(tokens + index)).to(tl.float32)
        tl.store(token_logprobs + index, x - anchor - log_sum)
