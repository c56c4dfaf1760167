"""Online softmax of the attention kernels: base-2 scores, sums of weights and values, and the divisor."""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scores_of(q, k, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """q [TILE, D] times k [KEYS, D], and the factor that takes them to scores in base 2."""
    products = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
        doubled = tl.exp2(products * (scale * (2.0 * LOG2_E) / softcap))
        products = 1.0 - 2.0 / (1.0 + doubled)
        scale = softcap
    return products, scale * LOG2_E


@triton.jit
def absorb(products, factor, v, maximum, total, output):
    """Online softmax: take in the scores of some keys, -inf where hidden, and their values."""
    new_maximum = tl.maximum(maximum, tl.max(products, 1) * factor)
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a row that has seen no key yet
    weights = tl.exp2(products * factor - shift[:, None])
    decay = tl.exp2(maximum - shift)
    total = total * decay + tl.sum(weights, 1)
    output = tl.dot(weights.to(v.dtype), v, output * decay[:, None], input_precision="tf32x3")
    return new_maximum, total, output


@triton.jit
def divisor_of(maximum, total, sinks, in_tile, row, heads_per_kv, has_sinks):
    """Divisor of the sum of values: the sum of weights plus the sink's, which has no value.

    has_sinks is 0 or 1. The sink comes last, so that no split of the keys changes the order of the sum.
    """
    head = in_tile - row * heads_per_kv
    sink = tl.load(sinks + head, mask=head < heads_per_kv * has_sinks, other=float("-inf"))
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    total += tl.exp2(sink * LOG2_E - shift)
    return tl.where(total == 0.0, 1.0, total)
