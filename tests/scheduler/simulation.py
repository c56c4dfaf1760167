"""A draft length policy against a made-up device: how many tokens per second it gets."""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.scheduler.draft_length import DraftLengthPolicy, StepObservation

PREFILL_S_PER_TOKEN = 0.1e-3

CostFunction = Callable[[int, float, int], float]  # requests, drafts verified by each, drafts made for each -> seconds


def gpu_cost_s(num_requests: int, num_verified: float, num_drafted: int) -> float:
    """Bound by reading weights until some 300 rows, by arithmetic beyond; a drafter of a tenth of the target."""
    target_s = 8e-3 * max(1.0, num_requests * (num_verified + 1) / 300)
    drafter_s = 0.8e-3 * max(1.0, num_requests * (num_drafted + 1) / 300)
    return target_s + (drafter_s if num_drafted else 0.0)


def cpu_cost_s(num_requests: int, num_verified: float, num_drafted: int) -> float:
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


def observation(
    *,
    num_draft_tokens: int,
    num_decoding: int,
    num_prefill_tokens: int,
    verified: Sequence[tuple[int, int]],
    elapsed_s: float | None,
    first_epoch: int = 0,
) -> StepObservation:
    """`verified` has (num_candidates, num_accepted) of the first requests; the others verify none."""
    blocks = np.array([*verified, *[(0, 0)] * (num_decoding - len(verified))], np.int64).reshape(-1, 2)
    return StepObservation(
        num_draft_tokens=num_draft_tokens,
        num_prefill_tokens=num_prefill_tokens,
        slots=np.arange(num_decoding),
        epochs=np.arange(num_decoding) + first_epoch,
        num_candidates=blocks[:, 0],
        num_accepted=blocks[:, 1],
        elapsed_s=elapsed_s,
    )


@dataclass
class Device:
    """Accepts each draft with the same chance, or one for each request; a step's time has noise and hiccups."""

    cost_s: CostFunction
    acceptance: float | Sequence[float]
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
            requests = np.arange(num_requests)
            available = np.full(num_requests, min(self._num_drafts, length))
            if policy.has_budget:
                available = policy.limit(requests, requests, available, np.full((num_requests, 7), np.nan))
            num_candidates = available.tolist()
            accepted = [self._num_accepted(index, count) for index, count in enumerate(num_candidates)]
            num_prefill_tokens = self._random.randint(10, 60) if self._random.random() < self.prompt_share else 0
            step_s = (
                self.cost_s(num_requests, sum(num_candidates) / num_requests, length)
                + PREFILL_S_PER_TOKEN * num_prefill_tokens
            )
            step_s *= self._random.lognormvariate(0, self.noise)
            if self._random.random() < 0.005:
                step_s *= 20
            else:
                elapsed_s += step_s  # hiccups are noise for the policy to withstand, not part of the score
                num_tokens += num_requests + sum(accepted)
            policy.observe(
                observation(
                    num_draft_tokens=length,
                    num_decoding=num_requests,
                    num_prefill_tokens=num_prefill_tokens,
                    verified=list(zip(num_candidates, accepted, strict=True)),
                    elapsed_s=step_s,
                )
            )
            self._num_drafts = length
        return num_tokens / elapsed_s

    def _num_accepted(self, index: int, num_candidates: int) -> int:
        acceptance = self.acceptance if isinstance(self.acceptance, float) else self.acceptance[index]
        return min(num_candidates, int(math.log(1 - self._random.random()) / math.log(acceptance)))
