"""A drafter's proposal: drafts, and the top-k candidates that each was sampled from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal(Generic[T]):
    """Drafts after the bonus token of every request.

    With `draft_stream` not 0, a request's draft is sampled from C `draft_topk_ids`, distinct tokens of the target, by
    their `draft_topk_probs`, which sum to 1; they are 0 where the logits gave no distribution and the draft is no
    sample. For other requests both are undefined. None if no request of the step uses them.

    `confidence` are the drafter's own estimates that the target accepts a draft if it accepts those before: of a head,
    or the probability of its most likely token. They know the drafts before, not the draft. None where nobody asked.
    """

    tokens: T  # int32 [R, K]
    draft_topk_ids: T | None = None  # int32 [R, K*C], draft by draft
    draft_topk_probs: T | None = None  # float32 [R, K*C]
    confidence: T | None = None  # float32 [R, K]


class _Concat(Protocol[T]):
    def concat(self, xs: Sequence[T]) -> T: ...


def joined(ops: _Concat[T], proposals: Sequence[Proposal[T]]) -> Proposal[T]:
    """Drafts that were made one by one, concatenated: all of them have candidates, or none."""
    draft_topk_ids = [proposal.draft_topk_ids for proposal in proposals if proposal.draft_topk_ids is not None]
    draft_topk_probs = [proposal.draft_topk_probs for proposal in proposals if proposal.draft_topk_probs is not None]
    confidence = [proposal.confidence for proposal in proposals if proposal.confidence is not None]
    assert len(draft_topk_ids) == len(draft_topk_probs) and len(draft_topk_ids) in (0, len(proposals))
    return Proposal(
        tokens=ops.concat([proposal.tokens for proposal in proposals]),
        draft_topk_ids=ops.concat(draft_topk_ids) if draft_topk_ids else None,
        draft_topk_probs=ops.concat(draft_topk_probs) if draft_topk_probs else None,
        confidence=ops.concat(confidence) if confidence else None,
    )
