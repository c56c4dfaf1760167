"""A model of step times, fitted to the steps that ran.

It has a table of medians per (number of decoding requests, K), and a linear model that fills the table's gaps and
subtracts the prompt tokens of mixed steps. The model starts from a prior, of which the first steps tell the scale: what
a step costs before its first row, in rows. All times are in seconds.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dflash_trt.core.draft_lengths import DRAFTER_FRACTION

_NUM_SAMPLES = 35  # per table entry; their median ignores outliers
_KEYS_PER_DOUBLING = 4
_DECAY = 0.998  # per step, of the model's samples
_PRIOR_WEIGHT = 0.02  # squared noise of a step over squared doubt of the prior's weights
_MODEL_WEIGHT = 2  # samples that the model's estimate counts for, so that a single outlier has no effect
_NUM_TO_BELIEVE = 3  # measurements that make a K known
_MIN_S = 1e-5
_PACE_GAIN = 0.15  # weight of one step in the pace
_PACE_MEMORY = 0.96  # the pace decays to 1, as the table adapts
_MAX_CHANGE = 0.25  # by one step, as a logarithm, to limit outliers
_MAX_PATIENCE = 8
_MAX_OUTLIER = 8.0  # steps slower than expected by this factor are ignored


@dataclass(slots=True)
class _Entry:
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SAMPLES))
    median_s: float = 0.0
    num_steps: int = 0
    last_step: int = 0

    @property
    def is_sure(self) -> bool:
        return len(self.samples) >= _NUM_TO_BELIEVE


class StepCosts:
    """Step times by batch size and K. Batch sizes that differ by less than about a fifth share an entry."""

    def __init__(self, *, num_fixed_rows: float = 10.0) -> None:
        """`num_fixed_rows`: rows that cost as much as a step without any, to begin with."""
        self._table: dict[tuple[int, int], _Entry] = {}
        self._model = _LinearModel(_prior(num_fixed_rows))
        self._num_steps = 0
        self._pace = 1.0  # present step time / recorded step time

    def add(
        self,
        num_decoding: int,
        num_draft_tokens: int,
        elapsed_s: float,
        *,
        num_verified: int | None = None,
        num_prefill_tokens: int,
        is_steady: bool,
    ) -> None:
        """Add a step, which verified `num_verified` drafts in all (by default all); measure it if `is_steady`."""
        self._num_steps += 1
        if not is_steady:
            return
        num_left_out = 0 if num_verified is None else num_decoding * num_draft_tokens - num_verified
        features = _features(num_decoding, num_draft_tokens, num_prefill_tokens, num_left_out)
        usual_s = elapsed_s / self._pace
        expected_s = self._model.predict(features)
        if not self._model.has_values or usual_s < _MAX_OUTLIER * max(expected_s, _MIN_S):
            self._model.add(features, usual_s, sets_scale=num_decoding > 0)
        if not num_decoding:
            return
        entry = self._table.setdefault(_key(num_decoding, num_draft_tokens), _Entry())
        entry.num_steps += 1
        entry.last_step = self._num_steps
        decode_s = self._without_prefill(features, usual_s)
        if decode_s is None:
            return
        decode_s += num_left_out * self._verified_s()
        if entry.is_sure:
            self._update_pace(entry, decode_s)
        entry.samples.append(decode_s)
        entry.median_s = _median(entry.samples)

    def estimate(self, num_decoding: int, num_draft_tokens: int) -> float:
        """Seconds of a step without prompt tokens, at the present pace; in rows before the first measurement."""
        expected_s = self._model.predict(_features(num_decoding, num_draft_tokens, 0))
        expected_s = max(expected_s, self._min_s(num_decoding, num_draft_tokens))
        expected_s = min(expected_s, self._max_s(num_decoding, num_draft_tokens))
        entry = self._table.get(_key(num_decoding, num_draft_tokens))
        samples = entry.samples if entry is not None else ()
        return self._pace * _median([*samples, *[expected_s] * _MODEL_WEIGHT])

    def row_s(self) -> float:
        """Seconds that one more draft to verify takes, at the present pace."""
        return self._pace * self._verified_s()

    def prefill_s(self, num_prefill_tokens: int) -> float:
        """Seconds that prompt tokens add to a step, at the present pace."""
        features = _features(0, 0, num_prefill_tokens)
        return self._pace * max(0.0, self._model.part(features, len(features) - 1))

    def age(self, num_decoding: int, num_draft_tokens: int) -> int | None:
        """Steps since such a step was last measured; None if measured too seldom."""
        entry = self._table.get(_key(num_decoding, num_draft_tokens))
        if entry is None or entry.num_steps < _NUM_TO_BELIEVE:
            return None
        return self._num_steps - entry.last_step

    def is_known_nearby(self, num_decoding: int, num_draft_tokens: int) -> bool:
        """True if this K was measured with half to twice as many requests, so that the model can predict it."""
        center, _ = _key(num_decoding, num_draft_tokens)
        nearby = range(center - _KEYS_PER_DOUBLING, center + _KEYS_PER_DOUBLING + 1)
        return any((key, num_draft_tokens) in self._table for key in nearby)

    def _verified_s(self) -> float:
        return max(0.0, self._model.part(_features(1, 1, 0), _VERIFIED))

    def _update_pace(self, entry: _Entry, decode_s: float) -> None:
        """Estimate the machine's current speed from a well-known kind of step; it drifts with clocks and load.

        Otherwise a K that was measured at a slow moment would look expensive for long.
        """
        change = math.log(max(decode_s, _MIN_S) / max(entry.median_s, _MIN_S))
        change = min(max(change, -_MAX_CHANGE), _MAX_CHANGE)
        self._pace = math.exp((math.log(self._pace) + _PACE_GAIN * change) * _PACE_MEMORY)

    def _without_prefill(self, features: list[float], elapsed_s: float) -> float | None:
        """Step time without prompt tokens; None if these take the larger part."""
        if not features[-1]:
            return elapsed_s
        prefill_s = self._model.part(features, len(features) - 1)
        return elapsed_s - prefill_s if 0 < prefill_s < elapsed_s / 2 else None

    def _min_s(self, num_decoding: int, num_draft_tokens: int) -> float:
        """Lower bound: the measured time of steps with fewer drafts."""
        fewer = (self._table.get(_key(num_decoding, length)) for length in range(num_draft_tokens))
        return max((entry.median_s for entry in fewer if entry is not None and entry.is_sure), default=_MIN_S)

    def _max_s(self, num_decoding: int, num_draft_tokens: int) -> float:
        """Upper bound: the measured time of steps with more drafts."""
        key, _ = _key(num_decoding, num_draft_tokens)
        more = (
            entry.median_s
            for (k, length), entry in self._table.items()
            if k == key and length > num_draft_tokens and entry.is_sure
        )
        return min(more, default=math.inf)


class _LinearModel:
    """Least squares of the relative error, with decaying weights. Features should be of order 1.

    `prior` are the weights without values, up to their scale; it follows the values.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = prior
        self._moments = [[0.0] * len(prior) for _ in prior]
        self._products = [0.0] * len(prior)
        self._scale = (0.0, 0.0)  # sums of prior / value and of its square
        self._weights = list(prior)
        self._num_new = 0  # values since the weights were solved for
        self._patience = 1  # values between two solutions, which take some 50 us

    @property
    def has_values(self) -> bool:
        """True if any value has set the scale."""
        return self._scale[1] > 0

    def add(self, features: list[float], value: float, *, sets_scale: bool) -> None:
        """Add a positive value. `sets_scale`: the prior's scale follows it."""
        features = [feature / value for feature in features]
        for row, left in zip(self._moments, features, strict=True):
            for column, right in enumerate(features):
                row[column] = row[column] * _DECAY + left * right
        self._products = [product * _DECAY + feature for product, feature in zip(self._products, features, strict=True)]
        if sets_scale:
            ratio = sum(weight * feature for weight, feature in zip(self._prior, features, strict=True))
            self._scale = (self._scale[0] * _DECAY + ratio, self._scale[1] * _DECAY + ratio * ratio)
        self._num_new += 1

    def predict(self, features: list[float]) -> float:
        return sum(self.part(features, index) for index in range(len(features)))

    def part(self, features: list[float], index: int) -> float:
        """Contribution of one feature to the prediction."""
        if self._num_new >= self._patience and self.has_values:
            scale = self._scale[0] / self._scale[1]
            self._weights = _solve(self._moments, self._products, [scale * weight for weight in self._prior])
            self._patience = min(2 * self._patience, _MAX_PATIENCE)
            self._num_new = 0
        return self._weights[index] * features[index]


def _prior(num_fixed_rows: float) -> list[float]:
    """Weights of `_features` of a step whose rows cost 1 each."""
    drafter = DRAFTER_FRACTION
    return [num_fixed_rows, 16.0, 64.0, 64 * drafter, drafter * num_fixed_rows, 16 * drafter, 256.0]


_VERIFIED = 2  # index of a feature


def _features(num_decoding: int, num_draft_tokens: int, num_prefill_tokens: int, num_left_out: int = 0) -> list[float]:
    """Features: 1, requests, drafts verified, drafts made, 1 with drafts, requests with drafts, prompt tokens."""
    is_drafting, num_drafts = float(num_draft_tokens > 0), num_decoding * num_draft_tokens
    return [
        1.0,
        num_decoding / 16,
        (num_drafts - num_left_out) / 64,
        num_drafts / 64,
        is_drafting,
        is_drafting * num_decoding / 16,
        num_prefill_tokens / 256,
    ]


def _median(values: Iterable[float]) -> float:
    """Lower median, since disturbances only add time."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _key(num_decoding: int, num_draft_tokens: int) -> tuple[int, int]:
    return (round(_KEYS_PER_DOUBLING * math.log2(max(1, num_decoding))), num_draft_tokens)


def _solve(matrix: list[list[float]], right: list[float], prior: list[float]) -> list[float]:
    """Gaussian elimination of (matrix + ridge) x = right + ridge prior; the ridge makes it positive definite."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        rows[i][i] += _PRIOR_WEIGHT / prior[i] ** 2
        rows[i][size] += _PRIOR_WEIGHT / prior[i]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
