"""Greedy tokens straight from low-precision logits: no fp32 copy, and one (value, index) pair per tile or shard.

Ties go to the smallest index, however the vocabulary is cut. NaN is below every number, so that the token is in the
vocabulary whatever the logits are: drafts made of NaN are only rejected. `reference_sampling.py` has the twin.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

TILE = 4096  # logits per program

_NO_INDEX = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["first_token_id"])
def tile_argmax_kernel(
    logits,  # F [rows, vocab_size]: a shard of the vocabulary, or all of it
    tile_max,  # float32 [rows, tiles]
    tile_argmax,  # int32 [rows, tiles], in the whole vocabulary
    vocab_size,
    first_token_id,  # of the shard
    TILE: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    offsets = tile * TILE + tl.arange(0, TILE)
    start = logits + row.to(tl.int64) * vocab_size
    x = tl.load(start + offsets, mask=offsets < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    largest = tl.max(x, axis=0)
    index = tl.min(tl.where((x == largest) & (offsets < vocab_size), offsets, _NO_INDEX), axis=0) + first_token_id
    at = row * tl.num_programs(1) + tile
    tl.store(tile_max + at, largest)
    tl.store(tile_argmax + at, index)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "num_parts"])
def combine_argmax_kernel(
    tile_max,  # float32 [parts, rows, tiles]: parts are the shards of several ranks, or one
    tile_argmax,  # int32 [parts, rows, tiles]
    token_ids,  # int32 [rows]
    shard_max,  # float32 [rows], the value at token_ids, for combining ranks later
    num_rows,
    num_tiles,
    num_parts,
    BLOCK: tl.constexpr,  # power of two >= num_parts * num_tiles
):
    row = tl.program_id(0)
    entries = tl.arange(0, BLOCK)
    is_in = entries < num_parts * num_tiles
    at = (entries // num_tiles * num_rows + row) * num_tiles + entries % num_tiles
    maxima = tl.load(tile_max + at, mask=is_in, other=float("-inf"))
    indices = tl.load(tile_argmax + at, mask=is_in, other=_NO_INDEX)
    largest = tl.max(maxima, axis=0)
    tl.store(token_ids + row, tl.min(tl.where(maxima == largest, indices, _NO_INDEX), axis=0))
    tl.store(shard_max + row, largest)
