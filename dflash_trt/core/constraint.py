"""Constraints on the tokens of a request, as the scheduler sees them; `serving/grammar.py` makes them."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol


class TokenMatcher(Protocol):
    """The state of one request in its constraint: it has taken in the tokens that are committed."""

    @property
    def num_mask_words(self) -> int:
        """int32 words of a mask, with a bit for each token."""
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Length of the longest prefix of `token_ids` that may come next. Changes nothing."""
        ...

    def advance(self, token_ids: Sequence[int]) -> int:
        """Advance over emitted tokens, up to the one after which nothing may follow; returns their number.

        Raises:
            ConstraintError: a token is not allowed, or the constraint has become too complex to follow.
        """
        ...

    @property
    def is_finished(self) -> bool:
        """True if nothing may follow."""
        ...

    @staticmethod
    def fill_masks(blocks: "Sequence[MaskedBlock]", bits: Any) -> None:
        """Write the masks of all blocks, concatenated, to `bits`, int32 [rows, num_mask_words] of all ones."""
        ...


class MaskedBlock(NamedTuple):
    """Rows of logits of one request: after its last token and after each of these allowed drafts."""

    matcher: TokenMatcher
    draft_tokens: Sequence[int]

    @property
    def num_rows(self) -> int:
        return 1 + len(self.draft_tokens)


class TokenConstraint(Protocol):
    """A constraint on a request's text. Immutable, so that requests may share it."""

    def start(self, stop_token_ids: Collection[int]) -> TokenMatcher:
        """The state before the first token. Stop tokens are allowed where the text may end."""
        ...


class ConstraintError(Exception):
    """A request's tokens do not follow its constraint. Ends that request."""
