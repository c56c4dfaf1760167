"""What a step costs, learned from the steps that ran.

Two views of the same measurements: a table of medians per (number of decoding requests, K), and a linear model that
fills the table's gaps and takes the prompt tokens out of mixed steps. Seconds everywhere.
"""

import math
from collections import deque
from dataclasses import dataclass, field

_NUM_SAMPLES = 9  # per table entry: a median of these ignores hiccups
_KEYS_PER_DOUBLING = 4
_DECAY = 0.998  # of the model's evidence, per step
_RIDGE = 1e-3
_MAX_OUTLIER = 8.0  # a step this many times dearer than expected says nothing about its shape


@dataclass(slots=True)
class _Entry:
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SAMPLES))
    median_s: float = 0.0
    measured_at: int = 0


class StepCosts:
    """Entries are shared by batch sizes that differ by less than about a fifth."""

    def __init__(self) -> None:
        self._table: dict[tuple[int, int], _Entry] = {}
        self._model = _LinearModel(num_features=5)
        self._num_steps = 0

    def add(
        self, num_decoding: int, num_draft_tokens: int, elapsed_s: float, *, num_prefill_tokens: int, is_steady: bool
    ) -> None:
        """Take in a step. `is_steady`: every decoding request verified num_draft_tokens drafts."""
        self._num_steps += 1
        if not is_steady:
            return
        features = _features(num_decoding, num_draft_tokens, num_prefill_tokens)
        expected_s = self._model.predict(features)
        if expected_s is None or elapsed_s < _MAX_OUTLIER * expected_s:
            self._model.add(features, elapsed_s)
        if num_decoding and not num_prefill_tokens:
            entry = self._table.setdefault(_key(num_decoding, num_draft_tokens), _Entry())
            entry.samples.append(elapsed_s)
            entry.median_s = sorted(entry.samples)[len(entry.samples) // 2]
            entry.measured_at = self._num_steps

    def estimate(self, num_decoding: int, num_draft_tokens: int) -> float | None:
        """Seconds of a step without prompt tokens; None as long as nothing is known."""
        entry = self._table.get(_key(num_decoding, num_draft_tokens))
        if entry is not None:
            return entry.median_s
        expected_s = self._model.predict(_features(num_decoding, num_draft_tokens, 0))
        if expected_s is None:
            return None
        return min(
            max(expected_s, self._least_s(num_decoding, num_draft_tokens)), self._most_s(num_decoding, num_draft_tokens)
        )

    def age(self, num_decoding: int, num_draft_tokens: int) -> int | None:
        """Steps since such a step was last measured; None when it never was."""
        entry = self._table.get(_key(num_decoding, num_draft_tokens))
        return None if entry is None else self._num_steps - entry.measured_at

    def is_known_nearby(self, num_decoding: int, num_draft_tokens: int) -> bool:
        """Whether this K was measured with half to twice as many requests: then the model can tell."""
        center, _ = _key(num_decoding, num_draft_tokens)
        nearby = range(center - _KEYS_PER_DOUBLING, center + _KEYS_PER_DOUBLING + 1)
        return any((key, num_draft_tokens) in self._table for key in nearby)

    def _least_s(self, num_decoding: int, num_draft_tokens: int) -> float:
        """More drafts never make a step cheaper: what fewer were measured to cost, or a hundredth of a millisecond."""
        fewer = (self._table.get(_key(num_decoding, length)) for length in range(num_draft_tokens))
        return max((entry.median_s for entry in fewer if entry is not None), default=1e-5)

    def _most_s(self, num_decoding: int, num_draft_tokens: int) -> float:
        """What more drafts were measured to cost."""
        key, _ = _key(num_decoding, num_draft_tokens)
        more = (entry.median_s for (k, length), entry in self._table.items() if k == key and length > num_draft_tokens)
        return min(more, default=math.inf)


class _LinearModel:
    """Least squares over all steps, the old ones fading. Features should be of order 1."""

    def __init__(self, num_features: int) -> None:
        self._moments = [[0.0] * num_features for _ in range(num_features)]
        self._products = [0.0] * num_features
        self._weights: list[float] | None = None

    def add(self, features: list[float], value: float) -> None:
        for row, left in zip(self._moments, features, strict=True):
            for column, right in enumerate(features):
                row[column] = row[column] * _DECAY + left * right
        self._products = [
            product * _DECAY + feature * value for product, feature in zip(self._products, features, strict=True)
        ]
        self._weights = None

    def predict(self, features: list[float]) -> float | None:
        if not any(self._products):
            return None
        if self._weights is None:
            self._weights = _solve(self._moments, self._products)
        return sum(weight * feature for weight, feature in zip(self._weights, features, strict=True))


def _features(num_decoding: int, num_draft_tokens: int, num_prefill_tokens: int) -> list[float]:
    """A launch, the rows the target verifies, whether the drafter runs, the requests, the prompt tokens."""
    num_rows = num_decoding * (num_draft_tokens + 1)
    return [1.0, num_rows / 64, float(num_draft_tokens > 0), num_decoding / 16, num_prefill_tokens / 256]


def are_alike(num_decoding: int, other: int) -> bool:
    """Whether two batch sizes share their measurements."""
    return _key(num_decoding, 0) == _key(other, 0)


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
