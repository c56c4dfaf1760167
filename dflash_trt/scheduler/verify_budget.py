"""Which drafts of a step are worth a row: those that are most likely reached and accepted, of all requests together.

A step that verifies n drafts emits R tokens and the drafts' probabilities to be accepted; it costs a part that n does
not change, and n rows. The best n is where tokens per second are highest. Requests differ: what each had accepted,
relative to the usual rates by position, decides how far its drafts are believed.

The choice looks at tokens that are emitted already, never at a draft: if a draft's value decided whether it is tested,
texts would be biased (docs/design/drafts.md).
"""

from dataclasses import dataclass

import numpy as np

from dflash_trt.core.array import Array

_DECAY = 0.97  # per step, of what a request is known for: about its last 30 steps, so that it is tried again after them
_PRIOR_WEIGHT = 4.0  # accepted drafts that a request is given to begin with, as many as expected
_CONFIDENCE_DECAY, _CONFIDENCE_WEIGHT = 0.998, 8.0  # per step; drafts as good as their confidence to begin with
_MAX_RATE = 0.98
_MARGIN = 0.2  # drafts that are nearly worth it are verified, since what is known of them is noisy


class ConfidenceRates:
    """Acceptance rates of drafts by the drafter's confidence in them, learned from those that were tested."""

    _EDGES = np.array([0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99])
    _MIDDLES = np.array([0.1, 0.3, 0.5, 0.7, 0.85, 0.925, 0.97, 0.995])

    def __init__(self) -> None:
        self._reached = np.full(len(self._MIDDLES), _CONFIDENCE_WEIGHT)
        self._accepted = self._reached * self._MIDDLES

    def rates(self, confidence: Array, usual: Array) -> Array:
        """Of drafts with a confidence [R, K]; where it is NaN, the usual rate [K] by position."""
        rates = (self._accepted / self._reached)[self._bins(confidence)]
        found: Array = np.where(np.isnan(confidence), usual, rates)
        return found

    def observe(self, confidence: Array, num_candidates: Array, num_accepted: Array) -> None:
        columns = np.arange(confidence.shape[1])
        is_accepted = columns < num_accepted[:, None]
        is_tested = (columns < np.minimum(num_accepted + 1, num_candidates)[:, None]) & ~np.isnan(confidence)
        bins = self._bins(confidence)
        for counts, is_counted in ((self._reached, is_tested), (self._accepted, is_tested & is_accepted)):
            counts *= _CONFIDENCE_DECAY
            counts += np.bincount(bins[is_counted], minlength=len(counts))

    def _bins(self, confidence: Array) -> Array:
        return np.searchsorted(self._EDGES, confidence, side="right")


class RequestRates:
    """Acceptance rates of running requests, by slot; a slot's next request, another epoch, starts as the usual one."""

    def __init__(self) -> None:
        self._epochs = np.full(0, -1)
        self._accepted, self._expected = np.zeros((2, 0))

    def observe(self, slots: Array, epochs: Array, num_candidates: Array, num_accepted: Array, usual: Array) -> None:
        """Count a step's verify blocks [R], none where num_candidates is 0, which usually had these rates [R, K]."""
        self._begin(slots, epochs)
        num_reached = np.minimum(num_accepted + 1, num_candidates)
        expected = np.where(np.arange(usual.shape[1]) < num_reached[:, None], usual, 0.0).sum(1)
        self._accepted[slots] = _DECAY * self._accepted[slots] + num_accepted
        self._expected[slots] = _DECAY * self._expected[slots] + expected

    def reach(self, slots: Array, epochs: Array, usual: Array) -> Array:
        """float64 [R, K]: the chance that a draft and all before it are accepted; `usual` rates [R, K]."""
        self._begin(slots, epochs)
        factors = (self._accepted[slots] + _PRIOR_WEIGHT) / (self._expected[slots] + _PRIOR_WEIGHT)
        reached: Array = np.cumprod(np.minimum(factors[:, None] * usual, _MAX_RATE), axis=1)
        return reached

    def _begin(self, slots: Array, epochs: Array) -> None:
        missing = int(slots.max(initial=-1)) + 1 - len(self._epochs)
        if missing > 0:
            self._epochs = np.append(self._epochs, np.full(missing, -1))
            self._accepted, self._expected = (
                np.append(counts, np.zeros(missing)) for counts in (self._accepted, self._expected)
            )
        new = slots[self._epochs[slots] != epochs]
        self._epochs[slots] = epochs
        self._accepted[new] = self._expected[new] = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyBudget:
    """Drafts to verify in a step: all that are accepted more likely than `threshold`."""

    threshold: float
    tokens_per_second: float

    def num_candidates(self, reach: Array) -> Array:
        """Of each row of `reach` [R, K], whose rows fall."""
        counts: Array = (reach > self.threshold).sum(axis=1)
        return counts


def best_budget(reach: Array, *, fixed_s: float, row_s: float) -> VerifyBudget:
    """The best choice of drafts for `reach` [R, K], 0 where there is none; `fixed_s`: a step that verifies none.

    A draft is worth its row if it adds more tokens than a step makes in that time. So a draft that is left out changes
    no other choice, nor does what comes after it: a later draft's chance may follow from an earlier one's value.
    """
    ordered = np.sort(reach[reach > 0])[::-1]
    num_tokens = len(reach) + np.append(0.0, np.cumsum(ordered))
    speed = float((num_tokens / (fixed_s + row_s * np.arange(len(num_tokens)))).max())
    return VerifyBudget(threshold=(1 - _MARGIN) * row_s * speed, tokens_per_second=speed)
