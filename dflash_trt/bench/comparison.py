"""Distance of an engine from another one of the same pair: the measured cost of quantization.

The baseline's greedy texts are the yardstick: both targets compute their next-token distribution at every position of
them. Arithmetic only; the caller brings the engines.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.core.acceptance import acceptance_length
from dflash_trt.core.request import GenerationOutput

LogitsOf = Callable[[Sequence[int]], NDArray[np.float32]]  # token ids [N] -> the target's logits [N, V]


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Acceptance in one engine's own texts, bonus included; None if no step verified a draft."""

    acceptance_length: float | None
    num_verify_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The candidate against the baseline.

    Over `num_generated_positions`, those where the baseline's greedy text was chosen: `token_agreement_fraction`, the
    share at which both targets would choose the same token, and `kl_nats`, the mean of KL(baseline || candidate) of
    their next-token distributions, with its 99th percentile. Over `num_prompt_positions`, the tokens of the prompts
    that have a token before them: the perplexities. `identical_texts_fraction` is of all prompts, free running. What
    needs the candidate's logits is None for one without.
    """

    num_prompts: int
    num_generated_positions: int
    token_agreement_fraction: float | None
    kl_nats: float | None
    kl_nats_p99: float | None
    identical_texts_fraction: float
    num_prompt_positions: int
    baseline_perplexity: float | None
    candidate_perplexity: float | None
    baseline_acceptance: Acceptance
    candidate_acceptance: Acceptance

    @property
    def acceptance_ratio(self) -> float | None:
        """Candidate / baseline; None when either drafted nothing."""
        lengths = (self.candidate_acceptance.acceptance_length, self.baseline_acceptance.acceptance_length)
        return None if lengths[0] is None or lengths[1] is None else lengths[0] / lengths[1]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "acceptance_ratio": self.acceptance_ratio}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """A bound on one number. `value` None fails: what could not be measured passes no gate."""

    name: str
    bound: float
    value: float | None
    is_upper: bool

    @property
    def has_passed(self) -> bool:
        if self.value is None or math.isnan(self.value):
            return False
        return self.value <= self.bound if self.is_upper else self.value >= self.bound


def compare(
    prompts: Sequence[Sequence[int]],
    baseline_outputs: Sequence[GenerationOutput],
    candidate_outputs: Sequence[GenerationOutput],
    *,
    baseline_logits: LogitsOf,
    candidate_logits: LogitsOf | None,
) -> Comparison:
    """All numbers; without logits of the candidate those of texts. Outputs are greedy, one per prompt, in its order."""
    generated, prompted = _Generated(), _Prompted()
    for prompt, output in zip(prompts, baseline_outputs, strict=True):
        token_ids = [*prompt, *output.token_ids]
        if len(token_ids) < 2:
            continue
        expected = _log_softmax(baseline_logits(token_ids[:-1]))  # row i predicts token i + 1
        found = None if candidate_logits is None else _log_softmax(candidate_logits(token_ids[:-1]))
        prompted.add(expected, found, prompt)
        if found is not None:
            generated.add(expected[len(prompt) - 1 :], found[len(prompt) - 1 :])
    kl = np.concatenate(generated.kl) if generated.kl else np.zeros(0)
    nothing = None if candidate_logits is None else math.nan
    pairs = list(zip(baseline_outputs, candidate_outputs, strict=True))
    return Comparison(
        num_prompts=len(prompts),
        num_generated_positions=len(kl),
        token_agreement_fraction=generated.num_agreeing / len(kl) if len(kl) else nothing,
        kl_nats=float(kl.mean()) if len(kl) else nothing,
        kl_nats_p99=float(np.quantile(kl, 0.99)) if len(kl) else nothing,
        identical_texts_fraction=sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs),
        num_prompt_positions=prompted.num_positions,
        baseline_perplexity=prompted.perplexity(prompted.baseline_nats),
        candidate_perplexity=None if candidate_logits is None else prompted.perplexity(prompted.candidate_nats),
        baseline_acceptance=acceptance_of(baseline_outputs),
        candidate_acceptance=acceptance_of(candidate_outputs),
    )


def acceptance_of(outputs: Sequence[GenerationOutput]) -> Acceptance:
    """Tokens per verify step, all requests together."""
    num_steps = sum(output.num_verify_steps for output in outputs)
    return Acceptance(acceptance_length=acceptance_length(outputs), num_verify_steps=num_steps)


class _Generated:
    """Positions whose next token the baseline chose."""

    def __init__(self) -> None:
        self.kl: list[NDArray[np.float64]] = []
        self.num_agreeing = 0

    def add(self, expected: NDArray[np.float64], found: NDArray[np.float64]) -> None:
        self.kl.append((np.exp(expected) * (expected - found)).sum(axis=1))
        self.num_agreeing += int((expected.argmax(axis=1) == found.argmax(axis=1)).sum())


class _Prompted:
    """Positions whose next token a person wrote."""

    def __init__(self) -> None:
        self.num_positions = 0
        self.baseline_nats = 0.0
        self.candidate_nats = 0.0

    def add(self, expected: NDArray[np.float64], found: NDArray[np.float64] | None, prompt: Sequence[int]) -> None:
        rows, tokens = np.arange(len(prompt) - 1), np.array(prompt[1:], dtype=np.int64)
        self.num_positions += len(rows)
        self.baseline_nats -= float(expected[rows, tokens].sum())
        if found is not None:
            self.candidate_nats -= float(found[rows, tokens].sum())

    def perplexity(self, nats: float) -> float | None:
        return math.exp(nats / self.num_positions) if self.num_positions else None


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """In float64, so that a small KL is not rounding."""
    shifted: NDArray[np.float64] = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
