"""95% intervals over prompts, by a bootstrap that draws whole prompts: steps of one text are no independent samples.

Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13: percentiles. The draws are always the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

_NUM_RESAMPLES = 1000
_BOUNDS = (2.5, 97.5)  # percentiles of a 95% interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}"

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


def interval(
    table: Numbers,  # [prompts, numbers]
    statistic: Callable[[Numbers], Numbers],  # of sums over the prompts of a draw: [numbers, draws] -> [draws]
) -> Interval:
    """A draw without a value, such as one without any step, does not count."""
    num_prompts = len(table)
    dice = np.random.default_rng(0)
    drawn = dice.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=_NUM_RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic((drawn @ table).T)
    low, high = np.percentile(values[np.isfinite(values)], _BOUNDS)
    return Interval(low=float(low), high=float(high))


def quotient_interval(parts: Numbers, wholes: Numbers) -> Interval:  # [prompts] each
    """Of the sum of parts over the sum of wholes."""
    return interval(np.column_stack([parts, wholes]), lambda sums: sums[0] / sums[1])


def speedup_interval(plain_s: Sequence[Sequence[float]], own_s: Sequence[Sequence[float]]) -> Interval:
    """Of the median over rounds of the rounds' speedups, from the seconds of each prompt in each round.

    Rounds are drawn as well as prompts: on a machine whose speed drifts they differ more.
    """
    num_rounds = len(plain_s)
    rounds = np.random.default_rng(1).integers(num_rounds, size=(num_rounds, _NUM_RESAMPLES))

    def median_speedup(sums: Numbers) -> Numbers:
        speedups = sums[:num_rounds] / sums[num_rounds:]  # [rounds, draws]
        return np.asarray(np.median(np.take_along_axis(speedups, rounds, axis=0), axis=0))

    return interval(np.array([*plain_s, *own_s]).T, median_speedup)
