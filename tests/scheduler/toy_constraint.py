"""A constraint whose masks follow from every token before them, for executors without a model."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.core.batch import StepSampling
from dflash_trt.core.constraint import ConstraintError, MaskedBlock
from dflash_trt.core.logit_rules import LogitRules
from dflash_trt.core.request import Request
from tests.fake_executor import ToyTarget, fold, fold_rules, next_allowed


@dataclass(frozen=True, kw_only=True)
class ToyConstraint:
    """Texts of `length` tokens; about one token in `one_in` is refused, by a hash of the tokens before it."""

    length: int
    one_in: int
    vocab_size: int

    def start(self, stop_token_ids: Collection[int]) -> "ToyMatcher":
        return ToyMatcher(self, frozenset(stop_token_ids))


class ToyMatcher:
    def __init__(self, constraint: ToyConstraint, stop_token_ids: frozenset[int]) -> None:
        self._constraint = constraint
        self._stop_token_ids = stop_token_ids
        self.tokens: list[int] = []
        self.num_mask_words = -(-constraint.vocab_size // 32)

    @property
    def is_finished(self) -> bool:
        return len(self.tokens) >= self._constraint.length

    def is_allowed(self, before: Sequence[int], token: int) -> bool:
        """At an even number of tokens the text may end."""
        if len(before) >= self._constraint.length:
            return False
        if token in self._stop_token_ids:
            return len(before) % 2 == 0
        mixed = sum((i + 3) * (t + 1) for i, t in enumerate(before)) * 31 + token * 17
        return mixed % self._constraint.one_in != 0

    def allowed(self, before: Sequence[int]) -> list[int]:
        """One token is always allowed, whatever the hash says."""
        stays = [token for token in range(self._constraint.vocab_size) if self.is_allowed(before, token)]
        return stays or [next(t for t in range(self._constraint.vocab_size) if t not in self._stop_token_ids)]

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            before = [*self.tokens, *token_ids[:count]]
            if len(before) >= self._constraint.length or token not in self.allowed(before):
                return count
        return len(token_ids)

    def advance(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if self.is_finished:
                return count
            assert token not in self._stop_token_ids, "it is no part of the text"
            if token not in self.allowed(self.tokens):
                raise ConstraintError(f"token {token} behind {self.tokens}")
            self.tokens.append(token)
        return len(token_ids)

    @staticmethod
    def fill_masks(blocks: Sequence[MaskedBlock], bits: Any) -> None:
        row = 0
        assert (bits == -1).all() and len(bits) == sum(block.num_rows for block in blocks)
        for matcher, draft_tokens in blocks:
            assert isinstance(matcher, ToyMatcher) and not matcher.is_finished
            for count in range(1 + len(draft_tokens)):
                before = [*matcher.tokens, *draft_tokens[:count]]
                if len(before) < matcher._constraint.length:
                    is_allowed = np.zeros(32 * matcher.num_mask_words, np.uint8)
                    is_allowed[matcher.allowed(before)] = 1
                    bits[row] = np.packbits(is_allowed, bitorder="little").view(np.int32)
                row += 1


def constrained_tokens(
    target: ToyTarget, request: Request, num_tokens: int, sampling: StepSampling, rules: LogitRules | None
) -> list[int]:
    """What a request with a ToyConstraint emits alone, one token at a time."""
    assert isinstance(request.constraint, ToyConstraint)
    matcher, history = request.constraint.start(request.stop_token_ids), 0
    for token in request.prompt_token_ids:
        history = fold(history, target.key_value(history, token))
    while len(matcher.tokens) < num_tokens and not matcher.is_finished:
        known = (*request.prompt_token_ids, *matcher.tokens)
        wanted = target.next_token(history, len(known), sampling, fold_rules(rules, known))
        token = next_allowed(wanted, np.array(matcher.allowed(matcher.tokens)))
        matcher.tokens.append(token)
        history = fold(history, target.key_value(history, token))
        if token in request.stop_token_ids:
            break
    return matcher.tokens
