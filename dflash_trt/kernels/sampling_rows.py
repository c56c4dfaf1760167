"""Rows of logits for the sampler's kernels: exponentials, masses, the search for a threshold, and rankings.

A *ranking* is a logit and its token as one integer: larger for a larger logit, and of equal logits for the smaller
token, so that one maximum finds both and no two are equal. NaN is below every number.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

GREEDY = tl.constexpr(0)  # row modes
RANDOM = tl.constexpr(1)  # no filter, or min_p alone
FILTERED = tl.constexpr(2)  # top_k or top_p

_ONE_BITS = tl.constexpr(0x3F800000)  # bits of 1.0, the largest exponential
_MASS_UNIT = tl.constexpr(float(1 << 40))
_BIN_BITS = tl.constexpr(10)
_NUM_LEVELS = tl.constexpr(3)  # histogram levels: an exponential, at most 1, has 30 bits


@triton.jit
def load_logits(logits, row, offsets, vocab_size):
    # int64: rows * vocab_size passes 2^31
    start = logits + row.to(tl.int64) * vocab_size
    return tl.load(start + offsets, mask=offsets < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def exponentials(logits, row, offsets, vocab_size, largest, degree):
    """e^(logit / temperature - largest of them), at most 1; 0 past the vocabulary."""
    x = load_logits(logits, row, offsets, vocab_size)
    return tl.exp(tl.div_rn(x - largest, degree))


@triton.jit
def is_kept(e, threshold):
    """The filters' answer; no token of no probability, which a threshold of 0 would let pass."""
    return (e >= threshold) & (e > 0)


@triton.jit
def mass_of(e):
    return (e * _MASS_UNIT).to(tl.int64)


@triton.jit
def kth_piece(pieces, k, largest, degree, num_tiles, TILES: tl.constexpr, PIECES: tl.constexpr):
    """The k-th largest of all pieces' maxima, as an exponential; slightly less, for the rounding of e^x."""
    at = tl.arange(0, TILES * PIECES)
    x = tl.load(pieces + at, mask=at < num_tiles * PIECES, other=float("-inf"))
    bits = tl.exp(tl.div_rn(x - largest, degree)).to(tl.int32, bitcast=True)
    found = tl.full((), 0, tl.int32)
    above = tl.full((), _ONE_BITS + 1, tl.int32)
    for _ in range(31):
        middle = found + (above - found) // 2
        is_low = tl.sum((bits >= middle).to(tl.int32), axis=0) >= k
        found = tl.where(is_low, middle, found)
        above = tl.where(is_low, above, middle)
    return 0.999 * found.to(tl.float32, bitcast=True)


@triton.jit
def search_threshold(
    logits,
    list_values,
    bins,
    row,
    count,
    limit,  # positive
    largest,
    degree,
    vocab_size,
    HAS_MASS: tl.constexpr,
    CHUNK: tl.constexpr,
    LIST_CAPACITY: tl.constexpr,
    BINS: tl.constexpr,
):
    """Bits of the largest exponential for which it and larger ones weigh `limit`, and the weight above it.

    A token weighs its mass or 1. Every level is a histogram over the next bits, exponent first, of the tokens that
    agree with the bits found so far: three reads of a row, however flat it is. 0 if all weigh less than `limit`.
    """
    found = tl.full((), 0, tl.int32)
    above = tl.full((), 0, tl.int64)
    slots = tl.arange(0, BINS)
    for level in range(_NUM_LEVELS):
        shift = (_NUM_LEVELS - 1 - level) * _BIN_BITS
        tl.store(bins + row * BINS + slots, tl.zeros([BINS], tl.int64))
        tl.debug_barrier()
        for start in range(0, list_size(count, vocab_size, LIST_CAPACITY), CHUNK):
            e, is_in = listed_exponentials(
                logits, list_values, row, count, start, largest, degree, vocab_size, CHUNK, LIST_CAPACITY
            )
            bits = e.to(tl.int32, bitcast=True)
            is_in = is_in & (bits >> (shift + _BIN_BITS) == found >> (shift + _BIN_BITS))
            weight = mass_of(e) if HAS_MASS else tl.full([CHUNK], 1, tl.int64)
            tl.atomic_add(bins + row * BINS + ((bits >> shift) & (BINS - 1)), weight, mask=is_in, sem="relaxed")
        tl.debug_barrier()
        weights = tl.load(bins + row * BINS + slots, cache_modifier=".cg")  # read where atomics execute
        tl.debug_barrier()
        from_slot = above + tl.sum(weights, axis=0) - tl.cumsum(weights, axis=0) + weights
        slot = tl.maximum(tl.sum((from_slot >= limit).to(tl.int32), axis=0) - 1, 0)
        above += tl.sum(tl.where(slots > slot, weights, 0), axis=0)
        found += slot << shift
    return found, above


@triton.jit
def mass_larger_than(
    logits,
    list_values,
    row,
    count,
    bits,  # bits of an exponential
    largest,
    degree,
    vocab_size,
    CHUNK: tl.constexpr,
    LIST_CAPACITY: tl.constexpr,
):
    """The mass of larger exponentials."""
    mass = tl.full((), 0, tl.int64)
    for start in range(0, list_size(count, vocab_size, LIST_CAPACITY), CHUNK):
        e, is_in = listed_exponentials(
            logits, list_values, row, count, start, largest, degree, vocab_size, CHUNK, LIST_CAPACITY
        )
        mass += tl.sum(tl.where(is_in & (e.to(tl.int32, bitcast=True) > bits), mass_of(e), 0), axis=0)
    return mass


@triton.jit
def list_size(count, vocab_size, LIST_CAPACITY: tl.constexpr):
    """Size of the row's list; an overflown list is replaced by the whole row."""
    return tl.where(count <= LIST_CAPACITY, count, vocab_size)


@triton.jit
def listed_exponentials(
    logits,
    list_values,
    row,
    count,
    start,
    largest,
    degree,
    vocab_size,
    CHUNK: tl.constexpr,
    LIST_CAPACITY: tl.constexpr,
):
    """Exponentials [CHUNK] from `start` on, and which of them are there."""
    offsets = start + tl.arange(0, CHUNK)
    if count <= LIST_CAPACITY:
        e = tl.load(list_values + row * LIST_CAPACITY + offsets, mask=offsets < count, other=0.0)
    else:
        e = exponentials(logits, row, offsets, vocab_size, largest, degree)
    return e, offsets < list_size(count, vocab_size, LIST_CAPACITY)


NO_RANKING = tl.constexpr(-(1 << 63))  # below all; its token is past every vocabulary

_MAX_INT32 = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ranking_of(x, token):
    """int64, of a float32 logit and a token."""
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)  # the zeros are equal
    return (_turned(x.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | (token ^ _MAX_INT32).to(tl.int64)


@triton.jit
def logit_and_token(ranking):
    return _turned((ranking >> 32).to(tl.int32)).to(tl.float32, bitcast=True), ranking.to(tl.int32) ^ _MAX_INT32


@triton.jit
def largest_rankings(rankings, count, CAPACITY: tl.constexpr):
    """int64 [CAPACITY]: the `count` largest, of any shape, in falling order, then NO_RANKING."""
    places = tl.arange(0, CAPACITY)
    largest = tl.full([CAPACITY], NO_RANKING, tl.int64)
    for place in range(count):
        best = tl.max(rankings)
        largest = tl.where(places == place, best, largest)
        rankings = tl.where(rankings == best, NO_RANKING, rankings)
    return largest


@triton.jit
def _turned(bits):
    """Bits of a float32 as an integer of the same order, and back."""
    return tl.where(bits < 0, bits ^ _MAX_INT32, bits)
