"""What a drafter proposes: drafts, and for each what it was drawn from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal(Generic[T]):
    """Drafts behind the bonus token of every request.

    A draft of a request whose `draft_stream` is not 0 was drawn from C `choices`, distinct tokens of the target, by
    their `chances`, which sum to 1; or they are 0, where the logits gave no distribution and the draft is no sample.
    Those of other requests mean nothing. None where no request of the step has any.
    """

    tokens: T  # int32 [R, K]
    choices: T | None = None  # int32 [R, K*C], those of one draft behind those of another
    chances: T | None = None  # float32 [R, K*C]


class _Concat(Protocol[T]):
    def concat(self, xs: Sequence[T]) -> T: ...


def joined(ops: _Concat[T], proposals: Sequence[Proposal[T]]) -> Proposal[T]:
    """The drafts of a chain, one behind another: all of them have choices, or none."""
    choices = [proposal.choices for proposal in proposals if proposal.choices is not None]
    chances = [proposal.chances for proposal in proposals if proposal.chances is not None]
    assert len(choices) == len(chances) and len(choices) in (0, len(proposals))
    return Proposal(
        tokens=ops.concat([proposal.tokens for proposal in proposals]),
        choices=ops.concat(choices) if choices else None,
        chances=ops.concat(chances) if chances else None,
    )
