"""A draft length policy against a made-up device: how many tokens per second it gets."""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dflash_trt.scheduler.draft_length import DraftLengthPolicy, StepObservation

PREFILL_S_PER_TOKEN = 0.1e-3

CostFunction = Callable[[int, int, int], float]  # requests, drafts verified by each, drafts made for each -> seconds


def gpu_cost_s(num_requests: int, num_verified: int, num_drafted: int) -> float:
    """Bound by reading weights until some 300 rows, by arithmetic beyond; a drafter of a tenth of the target."""
    target_s = 8e-3 * max(1.0, num_requests * (num_verified + 1) / 300)
    drafter_s = 0.8e-3 * max(1.0, num_requests * (num_drafted + 1) / 300)
    return target_s + (drafter_s if num_drafted else 0.0)


def cpu_cost_s(num_requests: int, num_verified: int, num_drafted: int) -> float:
    """Every row costs; the first is dear."""
    target_s = 4e-3 + 0.7e-3 * num_requests * (num_verified + 1)
    drafter_s = 1e-3 + 0.1e-3 * num_requests * (num_drafted + 1)
    return target_s + (drafter_s if num_drafted else 0.0)


def best_tokens_per_second(cost_s: CostFunction, acceptance: float, num_requests: int, max_draft_len: int) -> float:
    """What the best fixed K gets, in expectation."""
    return max(
        num_requests * sum(acceptance**i for i in range(length + 1)) / cost_s(num_requests, length, length)
        for length in range(max_draft_len + 1)
    )


@dataclass
class Device:
    """Accepts each draft with the same chance; a step's time has some noise, and a hiccup now and then."""

    cost_s: CostFunction
    acceptance: float
    noise: float = 0.08
    seed: int = 0
    prompt_share: float = 0.0  # of the steps, which then compute some prompt tokens, too

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._num_drafts = 0

    def run(self, policy: DraftLengthPolicy, batch_sizes: Iterable[int]) -> float:
        """Tokens per second over one step per entry of `batch_sizes`."""
        num_tokens, elapsed_s = 0, 0.0
        for num_requests in batch_sizes:
            length = policy.choose(num_requests)
            num_candidates = min(self._num_drafts, length)
            accepted = [self._num_accepted(num_candidates) for _ in range(num_requests)]
            num_prefill_tokens = self._random.randint(10, 60) if self._random.random() < self.prompt_share else 0
            step_s = self.cost_s(num_requests, num_candidates, length) + PREFILL_S_PER_TOKEN * num_prefill_tokens
            step_s *= self._random.lognormvariate(0, self.noise)
            if self._random.random() < 0.005:
                step_s *= 20
            else:
                elapsed_s += step_s  # hiccups are noise for the policy to withstand, not part of the score
                num_tokens += num_requests + sum(accepted)
            policy.observe(
                StepObservation(
                    num_draft_tokens=length,
                    num_decoding=num_requests,
                    num_prefill_tokens=num_prefill_tokens,
                    verified=tuple((num_candidates, count) for count in accepted) if num_candidates else (),
                    elapsed_s=step_s,
                )
            )
            self._num_drafts = length
        return num_tokens / elapsed_s

    def _num_accepted(self, num_candidates: int) -> int:
        return min(num_candidates, int(math.log(1 - self._random.random()) / math.log(self.acceptance)))
