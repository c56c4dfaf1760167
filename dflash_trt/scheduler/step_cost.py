"""What a step costs, learned from the steps that ran.

Two views of the same measurements: a table of medians per (number of decoding requests, K), and a linear model that
fills the table's gaps and takes the prompt tokens out of mixed steps. Seconds everywhere.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

_NUM_SAMPLES = 35  # per table entry: a median of these ignores hiccups
_KEYS_PER_DOUBLING = 4
_DECAY = 0.998  # of the model's evidence, per step
_RIDGE = 1e-3
_MODEL_WEIGHT = 2  # samples that the model's word counts for: one hiccup alone is not believed
_NUM_TO_BELIEVE = 3  # measurements that make a K known
_LEAST_S = 1e-5
_PACE_GAIN = 0.15  # of a step's word on how fast the machine is
_PACE_MEMORY = 0.96  # a pace that stays is what is usual
_MOST_CHANGE = 0.25  # of one step's word, as a logarithm: hiccups say nothing
_MAX_PATIENCE = 8
_MAX_OUTLIER = 8.0  # a step this many times dearer than expected says nothing about its shape


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
    """Entries are shared by batch sizes that differ by less than about a fifth."""

    def __init__(self) -> None:
        self._table: dict[tuple[int, int], _Entry] = {}
        self._model = _LinearModel(num_features=len(_features(1, 0, 0)))
        self._num_steps = 0
        self._pace = 1.0  # how long steps take these days, in times of what they are recorded as

    def add(
        self, num_decoding: int, num_draft_tokens: int, elapsed_s: float, *, num_prefill_tokens: int, is_steady: bool
    ) -> None:
        """Take in a step. `is_steady`: every decoding request verified num_draft_tokens drafts."""
        self._num_steps += 1
        if not is_steady:
            return
        features = _features(num_decoding, num_draft_tokens, num_prefill_tokens)
        usual_s = elapsed_s / self._pace
        expected_s = self._model.predict(features)
        if expected_s is None or usual_s < _MAX_OUTLIER * max(expected_s, _LEAST_S):
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
            self._hear_of_pace(entry, decode_s)
        entry.samples.append(decode_s)
        entry.median_s = _median(entry.samples)

    def estimate(self, num_decoding: int, num_draft_tokens: int) -> float | None:
        """Seconds of a step without prompt tokens, at the present pace; None as long as nothing is known."""
        expected_s = self._model.predict(_features(num_decoding, num_draft_tokens, 0))
        if expected_s is None:
            return None
        expected_s = max(expected_s, self._least_s(num_decoding, num_draft_tokens))
        expected_s = min(expected_s, self._most_s(num_decoding, num_draft_tokens))
        entry = self._table.get(_key(num_decoding, num_draft_tokens))
        samples = entry.samples if entry is not None else ()
        return self._pace * _median([*samples, *[expected_s] * _MODEL_WEIGHT])

    def age(self, num_decoding: int, num_draft_tokens: int) -> int | None:
        """Steps since such a step was last measured; None when it never was, or too seldom."""
        entry = self._table.get(_key(num_decoding, num_draft_tokens))
        if entry is None or entry.num_steps < _NUM_TO_BELIEVE:
            return None
        return self._num_steps - entry.last_step

    def is_known_nearby(self, num_decoding: int, num_draft_tokens: int) -> bool:
        """True if this K was measured with half to twice as many requests: then the model can tell."""
        center, _ = _key(num_decoding, num_draft_tokens)
        nearby = range(center - _KEYS_PER_DOUBLING, center + _KEYS_PER_DOUBLING + 1)
        return any((key, num_draft_tokens) in self._table for key in nearby)

    def _hear_of_pace(self, entry: _Entry, decode_s: float) -> None:
        """A step that is known well tells how fast the machine is at the moment.

        Machines drift: clocks, heat, neighbours. A K that was measured in a bad moment would look dear for long.
        """
        change = math.log(max(decode_s, _LEAST_S) / max(entry.median_s, _LEAST_S))
        change = min(max(change, -_MOST_CHANGE), _MOST_CHANGE)
        self._pace = math.exp((math.log(self._pace) + _PACE_GAIN * change) * _PACE_MEMORY)

    def _without_prefill(self, features: list[float], elapsed_s: float) -> float | None:
        """The part of a step that is not prompt work; None when that is the smaller one."""
        if not features[-1]:
            return elapsed_s
        prefill_s = self._model.part(features, len(features) - 1)
        return elapsed_s - prefill_s if 0 < prefill_s < elapsed_s / 2 else None

    def _least_s(self, num_decoding: int, num_draft_tokens: int) -> float:
        """More drafts never make a step cheaper: what fewer were measured to cost."""
        fewer = (self._table.get(_key(num_decoding, length)) for length in range(num_draft_tokens))
        return max((entry.median_s for entry in fewer if entry is not None and entry.is_sure), default=_LEAST_S)

    def _most_s(self, num_decoding: int, num_draft_tokens: int) -> float:
        """What more drafts were measured to cost."""
        key, _ = _key(num_decoding, num_draft_tokens)
        more = (
            entry.median_s
            for (k, length), entry in self._table.items()
            if k == key and length > num_draft_tokens and entry.is_sure
        )
        return min(more, default=math.inf)


class _LinearModel:
    """Least squares of the relative error over all steps, the old ones fading. Features should be of order 1."""

    def __init__(self, num_features: int) -> None:
        self._moments = [[0.0] * num_features for _ in range(num_features)]
        self._products = [0.0] * num_features
        self._weights: list[float] | None = None
        self._num_unheard = 0  # values since the weights were solved for
        self._patience = 1  # values that may go unheard; solving takes some 50 us

    def add(self, features: list[float], value: float) -> None:
        """Take in a positive value."""
        features = [feature / value for feature in features]
        for row, left in zip(self._moments, features, strict=True):
            for column, right in enumerate(features):
                row[column] = row[column] * _DECAY + left * right
        self._products = [product * _DECAY + feature for product, feature in zip(self._products, features, strict=True)]
        self._num_unheard += 1

    def predict(self, features: list[float]) -> float | None:
        if not any(self._products):
            return None
        return sum(self.part(features, index) for index in range(len(features)))

    def part(self, features: list[float], index: int) -> float:
        """What one feature adds to the prediction."""
        if self._weights is None or self._num_unheard >= self._patience:
            self._weights = _solve(self._moments, self._products)
            self._patience = min(2 * self._patience, _MAX_PATIENCE)
            self._num_unheard = 0
        return self._weights[index] * features[index]


def _features(num_decoding: int, num_draft_tokens: int, num_prefill_tokens: int) -> list[float]:
    """A launch, requests, rows beyond one each, a drafter that runs, requests it runs for, and last prompt tokens."""
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
    """The lower one of two in the middle: what disturbs a measurement only ever adds time."""
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
