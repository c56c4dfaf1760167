"""Distance of an engine from another one of the same pair: the measured cost of quantization.

The baseline's greedy texts are the yardstick: both targets compute their next-token distribution at every position of
them. Arithmetic only; the caller brings the engines.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dflash_trt.core.acceptance import acceptance_length
from dflash_trt.core.request import GenerationOutput

LogitsOf = Callable[[Sequence[int]], NDArray[np.float32]]  # token ids [N] -> the target's logits [N, V]
_NO_REST: Final = 1e-7  # a probability that sums of float32 do not tell from zero


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scores:
    """The candidate's next-token distributions against the baseline's, after each of N tokens."""

    kl_nats: NDArray[np.float64]  # [N]
    is_agreeing: NDArray[np.bool_]  # [N]: the same token is the most likely one
    next_logprobs: NDArray[np.float64]  # [N]: of the token that follows


# Log probabilities [N, V] of the baseline after each token, and these tokens with one more [N + 1].
ScoresOf = Callable[[NDArray[np.float64], Sequence[int]], Scores]


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Acceptance in one engine's own texts, bonus included; None if no step verified a draft."""

    acceptance_length: float | None
    num_verify_steps: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ComparedText:
    """The texts of one prompt. `num_equal_tokens` are those before the first that differs, of `num_tokens`.

    `kl_nats` float64 [num_tokens] and `is_agreeing` bool [num_tokens] are of each position; None without scores of the
    candidate.
    """

    num_tokens: int  # of the baseline
    num_equal_tokens: int
    is_identical: bool
    kl_nats: NDArray[np.float64] | None
    is_agreeing: NDArray[np.bool_] | None
    baseline_acceptance_length: float | None
    candidate_acceptance_length: float | None

    def as_row(self) -> dict[str, Any]:
        """With means in place of positions."""
        kl_nats, is_agreeing = self.kl_nats, self.is_agreeing
        return {
            "num_tokens": self.num_tokens,
            "num_equal_tokens": self.num_equal_tokens,
            "is_identical": self.is_identical,
            "kl_nats": float(kl_nats.mean()) if kl_nats is not None and len(kl_nats) else None,
            "token_agreement_fraction": (
                float(is_agreeing.mean()) if is_agreeing is not None and len(is_agreeing) else None
            ),
            "baseline_acceptance_length": self.baseline_acceptance_length,
            "candidate_acceptance_length": self.candidate_acceptance_length,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The candidate against the baseline.

    Over `num_generated_positions`, those where the baseline's greedy text was chosen: `token_agreement_fraction`, the
    share at which both targets would choose the same token, and `kl_nats`, the mean of KL(baseline || candidate) of
    their next-token distributions, with its 99th percentile. With `kl_num_top` the distributions have so many tokens,
    the candidate's most likely ones, and all others as one: their divergence is at most the whole. Over
    `num_prompt_positions`, the tokens of the prompts that have a token before them: the perplexities.
    `identical_texts_fraction` is of all prompts, free running. What needs scores of the candidate is None for one
    without.
    """

    num_prompts: int
    num_generated_positions: int
    token_agreement_fraction: float | None
    kl_nats: float | None
    kl_nats_p99: float | None
    kl_num_top: int | None  # None: all tokens
    identical_texts_fraction: float
    num_prompt_positions: int
    baseline_perplexity: float | None
    candidate_perplexity: float | None
    baseline_acceptance: Acceptance
    candidate_acceptance: Acceptance
    texts: tuple[ComparedText, ...]  # of each prompt

    @property
    def kl_name(self) -> str:
        return "KL divergence" if self.kl_num_top is None else f"KL divergence of top {self.kl_num_top}"

    @property
    def acceptance_ratio(self) -> float | None:
        """Candidate / baseline; None when either drafted nothing."""
        lengths = (self.candidate_acceptance.acceptance_length, self.baseline_acceptance.acceptance_length)
        return None if lengths[0] is None or lengths[1] is None else lengths[0] / lengths[1]

    def as_json(self) -> dict[str, Any]:
        """Without the texts."""
        fields = asdict(replace(self, texts=()))
        del fields["texts"]
        return {**fields, "acceptance_ratio": self.acceptance_ratio}


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
    candidate_scores: ScoresOf | None,
    kl_num_top: int | None = None,
) -> Comparison:
    """All numbers; without scores of the candidate those of texts. Outputs are greedy, one per prompt, in its order."""
    prompted, texts = _Prompted(), list[ComparedText]()
    for prompt, *outputs in zip(prompts, baseline_outputs, candidate_outputs, strict=True):
        token_ids = [*prompt, *outputs[0].token_ids]
        if len(token_ids) < 2:
            texts.append(_text(outputs[0], outputs[1], None))
            continue
        expected = _log_softmax(baseline_logits(token_ids[:-1]))  # row i predicts token i + 1
        scores = None if candidate_scores is None else candidate_scores(expected, token_ids)
        prompted.add(expected, scores, prompt)
        texts.append(_text(outputs[0], outputs[1], scores, first=len(prompt) - 1))
    kl = _joined([text.kl_nats for text in texts])
    nothing = None if candidate_scores is None else math.nan
    return Comparison(
        num_prompts=len(prompts),
        num_generated_positions=len(kl),
        token_agreement_fraction=float(_joined([text.is_agreeing for text in texts]).mean()) if len(kl) else nothing,
        kl_nats=float(kl.mean()) if len(kl) else nothing,
        kl_nats_p99=float(np.quantile(kl, 0.99)) if len(kl) else nothing,
        kl_num_top=kl_num_top,
        identical_texts_fraction=sum(text.is_identical for text in texts) / len(texts),
        num_prompt_positions=prompted.num_positions,
        baseline_perplexity=prompted.perplexity(prompted.baseline_nats),
        candidate_perplexity=None if candidate_scores is None else prompted.perplexity(prompted.candidate_nats),
        baseline_acceptance=acceptance_of(baseline_outputs),
        candidate_acceptance=acceptance_of(candidate_outputs),
        texts=tuple(texts),
    )


def scores_of_logits(logits: LogitsOf) -> ScoresOf:
    """Of whole distributions."""

    def scores(expected: NDArray[np.float64], token_ids: Sequence[int]) -> Scores:
        found = _log_softmax(logits(token_ids[:-1]))
        return Scores(
            kl_nats=(np.exp(expected) * (expected - found)).sum(axis=1),
            is_agreeing=expected.argmax(axis=1) == found.argmax(axis=1),
            next_logprobs=found[np.arange(len(found)), np.array(token_ids[1:], dtype=np.int64)],
        )

    return scores


def scores_of_top_tokens(outputs: Mapping[tuple[int, ...], GenerationOutput]) -> ScoresOf:
    """Of the candidate's most likely tokens, with all others as one.

    `outputs` have log probabilities of prompts, by the prompts: these are the tokens compared, maybe without the last
    one, so that one token was generated there, with its own most likely ones.
    """

    def scores(expected: NDArray[np.float64], token_ids: Sequence[int]) -> Scores:
        output = outputs.get(tuple(token_ids)) or outputs[tuple(token_ids[:-1])]
        assert output.prompt_logprobs is not None
        entries = [entry for entry in output.prompt_logprobs if entry is not None]
        tops = [*(entry.top_logprobs for entry in entries), *output.top_logprobs][: len(expected)]
        ids = np.array([[top.token_id for top in row] for row in tops])
        found = np.array([[top.logprob for top in row] for row in tops])
        known = np.take_along_axis(expected, ids, axis=1)
        rest, found_rest = (np.maximum(1 - np.exp(part).sum(axis=1), _NO_REST) for part in (known, found))
        return Scores(
            kl_nats=(np.exp(known) * (known - found)).sum(axis=1) + rest * np.log(rest / found_rest),
            is_agreeing=expected.argmax(axis=1) == ids[:, 0],
            next_logprobs=np.array([entry.logprob for entry in entries]),
        )

    return scores


def acceptance_of(outputs: Sequence[GenerationOutput]) -> Acceptance:
    """Tokens per verify step, all requests together."""
    num_steps = sum(output.num_verify_steps for output in outputs)
    return Acceptance(acceptance_length=acceptance_length(outputs), num_verify_steps=num_steps)


def _text(
    baseline: GenerationOutput, candidate: GenerationOutput, scores: Scores | None, *, first: int = 0
) -> ComparedText:
    """Scores count from position `first` on: the baseline chose the tokens that follow."""
    ours, theirs = candidate.token_ids, baseline.token_ids
    equal = (a == b for a, b in zip(ours, theirs, strict=False))
    return ComparedText(
        num_tokens=len(theirs),
        num_equal_tokens=sum(itertools.takewhile(bool, equal)),
        is_identical=ours == theirs,
        kl_nats=None if scores is None else scores.kl_nats[first:],
        is_agreeing=None if scores is None else scores.is_agreeing[first:],
        baseline_acceptance_length=acceptance_length([baseline]),
        candidate_acceptance_length=acceptance_length([candidate]),
    )


def _joined(parts: Sequence[NDArray[Any] | None]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0), *(part for part in parts if part is not None)])


class _Prompted:
    """Positions whose next token a person wrote."""

    def __init__(self) -> None:
        self.num_positions = 0
        self.baseline_nats = 0.0
        self.candidate_nats = 0.0

    def add(self, expected: NDArray[np.float64], scores: Scores | None, prompt: Sequence[int]) -> None:
        rows, tokens = np.arange(len(prompt) - 1), np.array(prompt[1:], dtype=np.int64)
        self.num_positions += len(rows)
        self.baseline_nats -= float(expected[rows, tokens].sum())
        if scores is not None:
            self.candidate_nats -= float(scores.next_logprobs[rows].sum())

    def perplexity(self, nats: float) -> float | None:
        return math.exp(nats / self.num_positions) if self.num_positions else None


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """In float64, so that a small KL is not rounding."""
    shifted: NDArray[np.float64] = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
