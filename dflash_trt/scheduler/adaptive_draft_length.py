"""The draft length policy that maximizes tokens per second.

    tokens per second of K = (requests + drafts that will be accepted) / step cost

It starts from what both usually are, measures them continuously, and now and then probes another K for two steps. Of
K drafts a request verifies those that are worth it (`verify_budget`).
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.draft_lengths import NUM_FIXED_ROWS, USUAL_RATE
from dflash_trt.core.errors import ConfigError
from dflash_trt.scheduler.acceptance import AcceptanceCounts
from dflash_trt.scheduler.draft_length import DraftLengthPolicy, StepObservation
from dflash_trt.scheduler.step_cost import StepCosts
from dflash_trt.scheduler.verify_budget import ConfidenceRates, RequestRates, VerifyBudget, best_budget

_ACCEPTANCE_DECAY = 0.998  # about the last 500 verify blocks count
# prior of position 0; later ones start from the rate of the previous one
_PRIOR_WEIGHT = 6.0
_NUM_STEPS_PER_DECISION = 4
_SETTLED_INTERVAL = 4  # of K that stays: to decide and to measure takes some 50 us each
_NUM_STEPS_PER_PROBE = 2  # the first of which may still verify the drafts of another K
_NUM_FREE_STEPS = 0.5  # probes at the start may cost the time of this many steps
_ENOUGH_BLOCKS = 100.0  # verified, to believe the acceptance rates
_NUM_STEPS_TO_STAY, _GAIN_TO_LEAVE_SOON = 16, 0.15
_JUMP = 2.2  # a larger change of the batch size resets its average
_MAX_LOSS = 4.0  # maximum in a probe step, relative to the usual time of its tokens
# A back end may leave tokens to the drafter until it drafts again.
_OBSERVE_FRACTION, _MAX_UNOBSERVED = 0.05, 256  # of a prompt token's time; tokens per request
_STALE_AFTER = 600  # steps
_MAX_VERIFIED_PART = 0.9  # of a step's time, for all drafts that it could verify
_NUM_RECENT = 128
_GAIN_TO_LEAVE_OUT, _GAIN_TO_STOP = 0.04, 0.02  # estimated, beside what the choice takes
_NUM_STEPS_TO_LEARN = 32
_CHOICE_S = 0.3e-3  # of the host in a step: 0.1 ms to choose and to learn, 0.2 ms for a plan that cannot repeat
_NO_ROWS = np.zeros(0, np.int64)
_OPTIMISM_FRACTION = 0.1  # by which estimates are raised to decide if a K is worth a probe


class AdaptiveDraftLength(DraftLengthPolicy):
    """Implements DraftLengthPolicy.

    Chooses K for all requests, and the drafts that each verifies. K changes only for a gain above
    `hysteresis_fraction`. Probes cost at most `max_probe_fraction` of the time, plus half a step. `lengths` are the K
    to choose from; a GPU may need a graph for each. `device` sets the costs to start from. On "cuda" no drafts are left
    out: it would gain too little (docs/design/drafts.md).
    """

    def __init__(
        self,
        max_draft_len: int,
        *,
        lengths: Sequence[int] | None = None,
        hysteresis_fraction: float = 0.03,
        max_probe_fraction: float = 0.015,
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        self.lengths = tuple(default_lengths(max_draft_len) if lengths is None else sorted(set(lengths)))
        if not self.lengths or not 0 <= self.lengths[0] <= self.lengths[-1] <= max_draft_len:
            raise ConfigError.about(
                "draft lengths",
                expected=f"numbers from 0 to {max_draft_len}",
                found=str(list(self.lengths)),
                hint="Remove the others, or build the engine with a larger max_draft_len.",
            )
        self._hysteresis_fraction = hysteresis_fraction
        self._max_probe_fraction = max_probe_fraction
        self._may_leave_out = device == "cpu"
        self._leaves_out, self._num_to_learn = False, _NUM_STEPS_TO_LEARN
        self._acceptance = AcceptanceCounts(max_draft_len, decay=_ACCEPTANCE_DECAY)
        self._requests = RequestRates()
        self._confidences = ConfidenceRates()
        self._nothing_asked = _NO_ROWS, _NO_ROWS, np.zeros((0, max_draft_len)), np.zeros((0, max_draft_len))
        self._asked = self._nothing_asked
        self._recent = np.zeros((0, max_draft_len))  # what `limit` knew of the last requests it was asked of
        self._slots = self._epochs = _NO_ROWS  # of the last step
        self._was_drafting = False
        self._costs = StepCosts(num_fixed_rows=NUM_FIXED_ROWS[device])
        self._current = self.lengths[-1]
        self._probe: int | None = None
        self._measured_s = 0.0
        self._lost_s = 0.0  # to probes
        self._num_unobserved = 0  # tokens since the last step that drafted
        self._num_steps_to_think = 0
        self._num_steps_since_change = _NUM_STEPS_TO_STAY
        self._smoothed = 0.0  # before the first step
        self._batch_size = 1

    @property
    def has_budget(self) -> bool:
        """True while leaving out drafts pays; to know whether it does, in the first steps, and before a decision."""
        return self._may_leave_out and (self._leaves_out or self._num_to_learn > 0 or not self._num_steps_to_think)

    def choose(self, num_decoding: int) -> int:
        if not num_decoding:
            return self._current
        has_jumped = self._follow(num_decoding)
        if self._num_steps_to_think == 0 or has_jumped:
            self._settle(self._batch_size, is_free=has_jumped)
            self._probe = self._worth_probing(self._batch_size)
            self._num_steps_to_think = self._num_steps_of_decision()
        self._num_steps_to_think -= 1
        self._num_steps_since_change += 1
        return self._current if self._probe is None else self._probe

    def limit(self, slots: Array, epochs: Array, num_candidates: Array, confidence: Array) -> Array:
        if not num_candidates.any():
            return num_candidates
        usual = self._usual_rates()
        confidence = _with_width(confidence, len(usual))
        rates = self._confidences.rates(confidence, usual)
        self._asked = slots, epochs, confidence, rates
        length = self._current if self._probe is None else self._probe
        is_measured = self._costs.age(len(slots), length) is not None
        reach = self._requests.reach(slots, epochs, rates)
        self._recent = np.concatenate((self._recent, reach[~np.isnan(confidence[:, 0])]))[-_NUM_RECENT:]
        if not is_measured or not self._leaves_out:
            return num_candidates
        reach = np.where(np.arange(reach.shape[1]) < num_candidates[:, None], reach, 0.0)
        return self._budget(len(slots), length, reach).num_candidates(reach)

    def observe(self, step: StepObservation) -> None:
        is_block = step.num_candidates > 0
        blocks = zip(step.num_candidates[is_block].tolist(), step.num_accepted[is_block].tolist(), strict=True)
        for num_candidates, num_accepted in blocks:
            self._acceptance.add(num_candidates, num_accepted)
        self._slots, self._epochs = step.slots, step.epochs
        if self._leaves_out or len(self._asked[0]):
            self._learn(step)
        was_drafting, self._was_drafting = self._was_drafting, step.num_draft_tokens > 0
        if step.elapsed_s is None:
            return
        self._measured_s += step.elapsed_s
        num_tokens = step.num_decoding + step.num_prefill_tokens
        self._num_unobserved = 0 if step.num_draft_tokens else self._num_unobserved + num_tokens
        if self._is_settled and self._num_steps_to_think % _SETTLED_INTERVAL:
            return
        if step.num_decoding and step.num_draft_tokens != self._current:
            self._add_loss(step, step.elapsed_s)
        self._costs.add(
            step.num_decoding,
            step.num_draft_tokens,
            step.elapsed_s,
            num_verified=int(step.num_candidates.sum()),
            num_prefill_tokens=step.num_prefill_tokens,
            is_steady=step.num_draft_tokens == 0 or was_drafting,
        )

    def _learn(self, step: StepObservation) -> None:
        """What the verify blocks say of requests, and of the drafter's confidence if it was known before the step."""
        blocks = step.num_candidates, step.num_accepted
        slots, epochs, confidence, rates = self._asked
        self._asked = self._nothing_asked
        known, usual = slice(len(slots)), rates
        is_known = np.array_equal(step.slots[known], slots) and np.array_equal(step.epochs[known], epochs)
        if not is_known or len(slots) < step.num_decoding:
            usual = np.tile(self._usual_rates(), (step.num_decoding, 1))
        if is_known:
            usual[known] = rates
            self._confidences.observe(confidence, *(counts[known] for counts in blocks))
        self._requests.observe(step.slots, step.epochs, *blocks, usual)
        self._num_to_learn -= 1

    def tokens_per_second(self, num_decoding: int, num_draft_tokens: int) -> float:
        """Estimated throughput of all requests with this K; tokens per row before the first measured step."""
        if self._leaves_out:
            return self._budget(num_decoding, num_draft_tokens, self._usual_reach()).tokens_per_second
        # What confidences are worth is learned now and then only, while all drafts are verified.
        reach = np.cumprod(self._usual_rates())[None] if len(self._recent) else self._usual_reach()
        return self._speed_of_all(num_decoding, num_draft_tokens, reach)

    def _speed_of_all(self, num_decoding: int, num_draft_tokens: int, reach: Array) -> float:
        """Estimated throughput if all drafts are verified, of requests of which these are some: `reach` [any, any]."""
        num_tokens = 1 + float(reach[:, :num_draft_tokens].sum()) / len(reach)
        return num_decoding * num_tokens / self._costs.estimate(num_decoding, num_draft_tokens)

    def _budget(self, num_decoding: int, num_draft_tokens: int, reach: Array) -> VerifyBudget:
        """Of a step with this K: what to verify of `reach` [any, any], of that many steps' requests together."""
        full_s, num_drafts = self._costs.estimate(num_decoding, num_draft_tokens), num_decoding * num_draft_tokens
        row_s = min(self._costs.row_s(), _MAX_VERIFIED_PART * full_s / max(1, num_drafts))
        return best_budget(
            reach[:, :num_draft_tokens],
            fixed_s=(full_s - num_drafts * row_s + _CHOICE_S) * len(reach) / max(1, num_decoding),
            row_s=row_s,
        )

    def _usual_reach(self) -> Array:
        """Of the last requests whose drafts had a confidence, or those of the last step."""
        usual, known = self._usual_rates(), len(self._slots)
        if len(self._recent):
            return self._recent
        if known:
            return self._requests.reach(self._slots, self._epochs, np.tile(usual, (known, 1)))
        return np.cumprod(usual)[None]

    def _num_steps_of_decision(self) -> int:
        if self._probe is not None:
            return _NUM_STEPS_PER_PROBE
        return _NUM_STEPS_PER_DECISION * (_SETTLED_INTERVAL if self._is_settled else 1)

    @property
    def _is_settled(self) -> bool:
        return self._probe is None and self._num_steps_since_change >= 2 * _NUM_STEPS_TO_STAY

    def _follow(self, num_decoding: int) -> bool:
        """Update the average batch size; return True if it jumped."""
        has_jumped = not self._smoothed / _JUMP < num_decoding < self._smoothed * _JUMP
        self._smoothed = num_decoding if has_jumped else 0.9 * self._smoothed + 0.1 * num_decoding
        self._batch_size = max(1, round(self._smoothed))
        return has_jumped

    def _settle(self, num_decoding: int, *, is_free: bool) -> None:
        """Change to the best K if its gain is above noise.

        A change wastes drafts or a step without any, so a change soon after another must gain more, unless `is_free`.
        """
        is_soon = self._num_steps_since_change < _NUM_STEPS_TO_STAY
        self._leaves_out = self._may_leave_out and self._is_worth_leaving_out(num_decoding)
        speeds = {length: self.tokens_per_second(num_decoding, length) for length in self.lengths}

        def is_worth(length: int) -> bool:
            is_sure = is_free or (not is_soon and self._costs.age(num_decoding, length) is not None)
            least_gain = self._hysteresis_fraction if is_sure else max(_GAIN_TO_LEAVE_SOON, self._hysteresis_fraction)
            return speeds[length] > speeds[self._current] * (1 + least_gain)

        best = max(filter(is_worth, self.lengths), key=lambda length: speeds[length], default=self._current)
        if best != self._current:
            self._current = best
            self._num_steps_since_change = 0

    def _is_worth_leaving_out(self, num_decoding: int) -> bool:
        """True if the choice of drafts pays for itself."""
        reach = self._usual_reach()
        with_all = max(self._speed_of_all(num_decoding, length, reach) for length in self.lengths)
        with_some = max(self._budget(num_decoding, length, reach).tokens_per_second for length in self.lengths)
        return with_some / with_all - 1 > (_GAIN_TO_STOP if self._leaves_out else _GAIN_TO_LEAVE_OUT)

    def _worth_probing(self, num_decoding: int) -> int | None:
        """A K without a recent measurement at this batch size that might beat the current one, or None."""
        if self._costs.age(num_decoding, self._current) is None:
            return None  # measure the current K first
        current = self.tokens_per_second(num_decoding, self._current)
        speeds = {
            length: self.tokens_per_second(num_decoding, length)
            for length in self.lengths
            if length != self._current and self._is_unknown(num_decoding, length)
        }
        # What drafting costs does not follow from steps that decode autoregressively, nor the reverse.
        is_known = {bool(length) for length in self.lengths if self._costs.is_known_nearby(num_decoding, length)}
        worth = [length for length in speeds if bool(length) not in is_known] or [
            length for length, speed in speeds.items() if speed * (1 + _OPTIMISM_FRACTION) > current
        ]
        best = max(worth, key=lambda length: speeds[length], default=None)
        return best if best is not None and self._is_affordable(num_decoding, best, current) else None

    def _is_affordable(self, num_decoding: int, length: int, current: float) -> bool:
        """True if the estimated loss of a probe keeps all probes within `max_probe_fraction`."""
        cost_s = self._costs.estimate(num_decoding, length)
        usual_s = self._costs.estimate(num_decoding, self._current)
        speed = self.tokens_per_second(num_decoding, length)
        lost_fraction = max(0.0, 1 - speed / current)
        expected_loss_s = _NUM_STEPS_PER_PROBE * cost_s * lost_fraction
        if not length:  # the step after it would draft, and verify nothing
            expected_loss_s += max(0.0, usual_s - cost_s) * min(1.0, 2 * lost_fraction)
        if not self._current:
            expected_loss_s += max(0.0, cost_s - usual_s) / 2  # the last drafts are not verified
            num_unobserved = min(self._num_unobserved, _MAX_UNOBSERVED * num_decoding)
            expected_loss_s += _OBSERVE_FRACTION * self._costs.prefill_s(num_unobserved)
        allowed_s = _NUM_FREE_STEPS * usual_s + self._max_probe_fraction * self._measured_s
        return self._lost_s + expected_loss_s <= allowed_s

    def _add_loss(self, step: StepObservation, elapsed_s: float) -> None:
        """Add a probe's time in excess of the usual time of its tokens with the current K."""
        num_tokens = step.num_decoding + int(step.num_accepted.sum())
        usual_s = num_tokens / self.tokens_per_second(step.num_decoding, self._current)
        usual_s += self._costs.prefill_s(step.num_prefill_tokens)
        is_catching_up = not self._current and not step.num_candidates.any()
        most_s = math.inf if is_catching_up else _MAX_LOSS * usual_s  # limits the effect of outliers
        self._lost_s += min(max(0.0, elapsed_s - usual_s), most_s)

    def _is_unknown(self, num_decoding: int, length: int) -> bool:
        age = self._costs.age(num_decoding, length)
        if age is None or age > _STALE_AFTER:
            return True
        return length > 0 and self._acceptance.num_reached[0] < _ENOUGH_BLOCKS

    def _usual_rates(self) -> Array:
        """By position, of all requests."""
        rates: list[float] = []
        prior = USUAL_RATE
        for accepted, reached in zip(self._acceptance.num_accepted, self._acceptance.num_reached, strict=True):
            prior = (accepted + prior * _PRIOR_WEIGHT) / (reached + _PRIOR_WEIGHT)
            rates.append(prior)
        return np.array(rates)


def _with_width(confidence: Array, width: int) -> Array:
    """[R, width]: an engine may make more drafts than the policy chooses from, or fewer."""
    missing = width - confidence.shape[1]
    return np.pad(confidence, ((0, 0), (0, missing)), constant_values=np.nan) if missing > 0 else confidence[:, :width]


def default_lengths(max_draft_len: int) -> list[int]:
    """0 to 4, then steps of about a third, and the maximum: few enough to measure each."""
    return sorted({length for length in (0, 1, 2, 3, 4, 6, 8, 11) if length < max_draft_len} | {max_draft_len})
