"""A model of step times, fitted to the steps that ran.

It has a table of medians per (number of decoding requests, K), and a linear model that fills the table's gaps and
subtracts the prompt tokens of mixed steps. All times are in seconds.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

_NUM_SAMPLES = 35  # per table entry; their median ignores outliers
_KEYS_PER_DOUBLING = 4
_DECAY = 0.998  # of the model's samples, per step
_RIDGE = 1e-3
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

    def __init__(self) -> None:
        self._table: dict[tuple[int, int], _Entry] = {}
        self._model = _LinearModel(num_features=len(_features(1, 0, 0)))
        self._num_steps = 0
        self._pace = 1.0  # present step time / recorded step time

    def add(
        self, num_decoding: int, num_draft_tokens: int, elapsed_s: float, *, num_prefill_tokens: int, is_steady: bool
    ) -> None:
        """Add a step. `is_steady`: every decoding request verified num_draft_tokens drafts."""
        self._num_steps += 1
        if not is_steady:
            return
        features = _features(num_decoding, num_draft_tokens, num_prefill_tokens)
        usual_s = elapsed_s / self._pace
        expected_s = self._model.predict(features)
        if expected_s is None or usual_s < _MAX_OUTLIER * max(expected_s, _MIN_S):
            self._model.add(features, usual_s)
        if not num_decoding:
            return
        entry = self._table.setdefault(_key(num_decoding, num_draft_tokens), _Entry())
        entry.num_steps += 1
        entry.last_step = self._num_steps
        decode_s = self._without_prefill(features, usual_s)
        if decode_s is None:
            return
        if entry.is_sure:
            self._update_pace(entry, decode_s)
        entry.samples.append(decode_s)
        entry.median_s = _median(entry.samples)

    def estimate(self, num_decoding: int, num_draft_tokens: int) -> float | None:
        """Seconds of a step without prompt tokens, at the present pace; None before the first measurement."""
        expected_s = self._model.predict(_features(num_decoding, num_draft_tokens, 0))
        if expected_s is None:
            return None
        expected_s = max(expected_s, self._min_s(num_decoding, num_draft_tokens))
        expected_s = min(expected_s, self._max_s(num_decoding, num_draft_tokens))
        entry = self._table.get(_key(num_decoding, num_draft_tokens))
        samples = entry.samples if entry is not None else ()
        return self._pace * _median([*samples, *[expected_s] * _MODEL_WEIGHT])

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

    def _update_pace(self, entry: _Entry, decode_s: float) -> None:
        """Estimate the machine's present speed, which drifts with clocks and load, from a well-known kind of step.

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
    """Least squares of the relative error, with decaying weights. Features should be of order 1."""

    def __init__(self, num_features: int) -> None:
        self._moments = [[0.0] * num_features for _ in range(num_features)]
        self._products = [0.0] * num_features
        self._weights: list[float] | None = None
        self._num_new = 0  # values since the weights were solved for
        self._patience = 1  # values between two solutions, which take some 50 us

    def add(self, features: list[float], value: float) -> None:
        """Add a positive value."""
        features = [feature / value for feature in features]
        for row, left in zip(self._moments, features, strict=True):
            for column, right in enumerate(features):
                row[column] = row[column] * _DECAY + left * right
        self._products = [product * _DECAY + feature for product, feature in zip(self._products, features, strict=True)]
        self._num_new += 1

    def predict(self, features: list[float]) -> float | None:
        if not any(self._products):
            return None
        return sum(self.part(features, index) for index in range(len(features)))

    def part(self, features: list[float], index: int) -> float:
        """Contribution of one feature to the prediction."""
        if self._weights is None or self._num_new >= self._patience:
            self._weights = _solve(self._moments, self._products)
            self._patience = min(2 * self._patience, _MAX_PATIENCE)
            self._num_new = 0
        return self._weights[index] * features[index]


def _features(num_decoding: int, num_draft_tokens: int, num_prefill_tokens: int) -> list[float]:
    """Constant, requests, rows beyond one each, 1 with drafts, requests with drafts, and last prompt tokens."""
    is_drafting = float(num_draft_tokens > 0)
    return [
        1.0,
        num_decoding / 16,
        num_decoding * num_draft_tokens / 64,
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


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination of (matrix + ridge) x = right; the ridge makes it positive definite."""
    size = len(right)
    ridge = _RIDGE * max(matrix[i][i] for i in range(size))
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        rows[i][i] += ridge
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
