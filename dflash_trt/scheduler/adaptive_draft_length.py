"""The draft length policy that maximizes tokens per second.

    tokens per second of K = requests * (1 + sum over i <= K of the chance that drafts 1 .. i are accepted) / step cost

Both are measured continuously, and now and then a few steps probe another K.
"""

from collections.abc import Sequence

from dflash_trt.core.errors import ConfigError
from dflash_trt.scheduler.acceptance import AcceptanceCounts, expected_num_emitted
from dflash_trt.scheduler.draft_length import StepObservation
from dflash_trt.scheduler.step_cost import StepCosts

_ACCEPTANCE_DECAY = 0.998  # about the last 500 verify blocks count
_PRIOR_RATE, _PRIOR_WEIGHT = 0.7, 4.0  # of the first position; the prior of others is the rate of the one before
_NUM_STEPS_PER_DECISION = 4  # also of a probe, whose first step may still verify the drafts of another K
_NUM_FREE_STEPS = 8  # probes at the start may cost the time of this many steps
_FIRST_LENGTH = 3  # a guess that is rarely far off
_ENOUGH_BLOCKS = 100.0  # verified, to believe the acceptance rates
_NUM_STEPS_TO_STAY, _GAIN_TO_LEAVE_SOON = 16, 0.15
_JUMP = 2.2  # a larger change of the batch size resets its average
_MAX_LOSS = 4.0  # of a probe step, relative to the usual time of its tokens
_STALE_AFTER = 600  # steps
_OPTIMISM_FRACTION = 0.1  # by which estimates are raised to decide if a K is worth a probe


class AdaptiveDraftLength:
    """Implements DraftLengthPolicy.

    K changes only for a gain above `hysteresis_fraction`. Probes cost at most `max_probe_fraction` of the time, except
    at the start. `lengths` are the K to choose from; a GPU may need a graph for each.
    """

    def __init__(
        self,
        max_draft_len: int,
        *,
        lengths: Sequence[int] | None = None,
        hysteresis_fraction: float = 0.03,
        max_probe_fraction: float = 0.015,
    ) -> None:
        self._lengths = default_lengths(max_draft_len) if lengths is None else sorted(set(lengths))
        if not self._lengths or not 0 <= self._lengths[0] <= self._lengths[-1] <= max_draft_len:
            raise ConfigError.about(
                "draft lengths",
                expected=f"numbers from 0 to {max_draft_len}",
                found=str(self._lengths),
                hint="Remove the others, or build the engine with a larger max_draft_len.",
            )
        self._hysteresis_fraction = hysteresis_fraction
        self._max_probe_fraction = max_probe_fraction
        self._acceptance = AcceptanceCounts(max_draft_len, decay=_ACCEPTANCE_DECAY)
        self._costs = StepCosts()
        self._current = max(length for length in self._lengths if length <= max(_FIRST_LENGTH, self._lengths[0]))
        self._probe: int | None = None
        self._measured_s = 0.0
        self._lost_s = 0.0  # to probes
        self._num_steps_to_think = 0
        self._num_steps_since_change = 0
        self._smoothed = 0.0
        self._batch_size = 1

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    def choose(self, num_decoding: int) -> int:
        if not num_decoding:
            return self._current
        has_jumped = self._follow(num_decoding)
        if self._num_steps_to_think == 0 or has_jumped:
            self._settle(self._batch_size, is_free=has_jumped)
            self._probe = self._worth_probing(self._batch_size)
            self._num_steps_to_think = _NUM_STEPS_PER_DECISION
        self._num_steps_to_think -= 1
        self._num_steps_since_change += 1
        return self._current if self._probe is None else self._probe

    def observe(self, step: StepObservation) -> None:
        for num_candidates, num_accepted in step.verified:
            self._acceptance.add(num_candidates, num_accepted)
        if step.elapsed_s is None or not step.num_decoding:
            return
        self._add_loss(step, step.elapsed_s)
        num_full = sum(num_candidates == step.num_draft_tokens for num_candidates, _ in step.verified)
        self._costs.add(
            step.num_decoding,
            step.num_draft_tokens,
            step.elapsed_s,
            num_prefill_tokens=step.num_prefill_tokens,
            is_steady=step.num_draft_tokens == 0 or num_full >= 0.75 * step.num_decoding,
        )

    def tokens_per_second(self, num_decoding: int, num_draft_tokens: int) -> float | None:
        """Estimated throughput of all requests with this K; None before the first measured step."""
        cost_s = self._costs.estimate(num_decoding, num_draft_tokens)
        if cost_s is None:
            return None
        return num_decoding * expected_num_emitted(self._rates(), num_draft_tokens) / cost_s

    def _follow(self, num_decoding: int) -> bool:
        """Update the average batch size; return True if it jumped."""
        has_jumped = not 1 / _JUMP < num_decoding / max(1.0, self._smoothed) < _JUMP
        self._smoothed = num_decoding if has_jumped else 0.9 * self._smoothed + 0.1 * num_decoding
        self._batch_size = max(1, round(self._smoothed))
        return has_jumped

    def _settle(self, num_decoding: int, *, is_free: bool) -> None:
        """Change to the best K if its gain is above noise.

        A change wastes drafts or a step without any, so a change soon after another must gain more, unless `is_free`.
        """
        is_soon = self._num_steps_since_change < _NUM_STEPS_TO_STAY and not is_free
        least_gain = max(_GAIN_TO_LEAVE_SOON * is_soon, self._hysteresis_fraction)
        speeds = {length: self.tokens_per_second(num_decoding, length) or 0.0 for length in self._lengths}
        best = max(self._lengths, key=lambda length: speeds[length])
        if speeds[best] > speeds[self._current] * (1 + least_gain):
            self._current = best
            self._num_steps_since_change = 0

    def _worth_probing(self, num_decoding: int) -> int | None:
        """A K without a recent measurement at this batch size that might be better than the current one, or None."""
        current = self.tokens_per_second(num_decoding, self._current)
        if current is None or self._costs.age(num_decoding, self._current) is None:
            return None  # measure the current K first
        speeds = {
            length: self.tokens_per_second(num_decoding, length) or 0.0
            for length in self._lengths
            if length != self._current and self._is_unknown(num_decoding, length)
        }
        promising = [length for length, speed in speeds.items() if speed * (1 + _OPTIMISM_FRACTION) > current]
        if 0 in speeds and not self._costs.is_known_nearby(num_decoding, 0):
            best = 0  # the cost of autoregressive decoding does not follow from steps that draft
        elif promising:
            best = max(promising, key=lambda length: speeds[length])
        else:
            return None
        return best if self._is_affordable(num_decoding, best, current) else None

    def _is_affordable(self, num_decoding: int, length: int, current: float) -> bool:
        """True if the estimated loss of a probe keeps all probes within `max_probe_fraction`."""
        cost_s = self._costs.estimate(num_decoding, length) or 0.0
        usual_s = self._costs.estimate(num_decoding, self._current) or 0.0
        speed = self.tokens_per_second(num_decoding, length) or 0.0
        expected_loss_s = _NUM_STEPS_PER_DECISION * cost_s * max(0.0, 1 - speed / current)
        allowed_s = _NUM_FREE_STEPS * usual_s + self._max_probe_fraction * self._measured_s
        return self._lost_s + expected_loss_s <= allowed_s

    def _add_loss(self, step: StepObservation, elapsed_s: float) -> None:
        """Add the time that a probe took beyond that of its tokens with the current K."""
        self._measured_s += elapsed_s
        if step.num_draft_tokens == self._current:
            return
        current = self.tokens_per_second(step.num_decoding, self._current)
        if current:
            num_tokens = step.num_decoding + sum(num_accepted for _, num_accepted in step.verified)
            usual_s = num_tokens / current
            self._lost_s += min(max(0.0, elapsed_s - usual_s), _MAX_LOSS * usual_s)  # limits the effect of outliers

    def _is_unknown(self, num_decoding: int, length: int) -> bool:
        age = self._costs.age(num_decoding, length)
        if age is None or age > _STALE_AFTER:
            return True
        return length > 0 and self._acceptance.num_reached[0] < _ENOUGH_BLOCKS

    def _rates(self) -> list[float]:
        rates: list[float] = []
        prior = _PRIOR_RATE
        for accepted, reached in zip(self._acceptance.num_accepted, self._acceptance.num_reached, strict=True):
            prior = (accepted + prior * _PRIOR_WEIGHT) / (reached + _PRIOR_WEIGHT)
            rates.append(prior)
        return rates


def default_lengths(max_draft_len: int) -> list[int]:
    """0 to 4, then steps of about a third, and the maximum: few enough to measure each."""
    return sorted({length for length in (0, 1, 2, 3, 4, 6, 8, 11) if length < max_draft_len} | {max_draft_len})
