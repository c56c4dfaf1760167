"""Rules of one request for its logits: biases, banned tokens and penalties. numpy only.

Every rule is a function of the tokens before a row of logits, so that a verify block has the same distributions as
decoding one token at a time. A device keeps the rules of a slot and its tokens by position. The tokens of a step are
written before its logits are read, as K/V are: a rejected draft is overwritten by the next step, and a step may run
again. In order, with the sources of the definitions:

1. `biases` are added: logit_bias (SequenceBiasLogitsProcessor of transformers for one token), and -inf for bad words
   (NoBadWordsLogitsProcessor) and for tokens that stop before min_tokens (MinNewTokensLengthLogitsProcessor).
2. `repetition_penalty` divides positive and multiplies negative logits of tokens in prompt or output
   (RepetitionPenaltyLogitsProcessor).
3. count * frequency_penalty and presence_penalty are subtracted, for tokens in the output (OpenAI's API reference).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.errors import RequestError, problem, raise_all
from dflash_trt.core.request import Request

ANY_TOKEN: Final = -1  # fills prefixes on the left
MAX_BIASES: Final = 1024  # per request, stop tokens and token ids of bad words included
MAX_BAD_WORD_TOKENS: Final = 32

_FOREVER: Final = 2**31 - 1
_NOT_THERE: Final = -2  # a token before the first one


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LogitRules:
    """Logit rules of a request. A bias applies at positions before its end, after its prefix's tokens."""

    num_prompt_tokens: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    token_ids: Array  # int64 [B]
    biases: Array  # float32 [B]
    ends: Array  # int64 [B]
    prefixes: Array  # int64 [B, L], the last tokens before the row's; ANY_TOKEN matches all, and none

    @classmethod
    def of(cls, request: Request) -> Self | None:
        """None for a request without rules.

        Raises:
            RequestError: too many biases, or too long words.
        """
        sampling = request.sampling
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        biases = list(_biases(request))
        if not biases and penalties == (1.0, 0.0, 0.0):
            return None
        prefix_len = max((len(prefix) for *_, prefix in biases), default=0)
        _check(request, num_biases=len(biases), word_len=prefix_len + 1)
        padded = [(ANY_TOKEN,) * (prefix_len - len(prefix)) + prefix for *_, prefix in biases]
        return cls(
            num_prompt_tokens=len(request.prompt_token_ids),
            repetition_penalty=penalties[0],
            presence_penalty=penalties[1],
            frequency_penalty=penalties[2],
            token_ids=np.array([token for token, *_ in biases], np.int64),
            biases=np.array([bias for _, bias, *_ in biases], np.float32),
            ends=np.array([end for _, _, end, _ in biases], np.int64),
            prefixes=np.array(padded, np.int64).reshape(len(biases), prefix_len),
        )

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def active_biases(
        self,
        tokens: Array,  # int64 [N], by position
        num_known: Array,  # int64 [W], tokens before each row's
    ) -> Array:
        """bool [W, B]."""
        is_active: Array = num_known[:, None] < self.ends
        prefix_len = self.prefixes.shape[1]
        if prefix_len:
            places = num_known[:, None] + np.arange(-prefix_len, 0)
            before = np.where(places >= 0, tokens[np.maximum(places, 0)], _NOT_THERE)  # [W, L]
            is_active &= ((self.prefixes == ANY_TOKEN) | (self.prefixes == before[:, None])).all(2)
        return is_active


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotUpdate:
    """Rules of a slot's new request, None if it has none, and its tokens so far: sent with its first step."""

    slot: int
    rules: LogitRules | None
    token_ids: Array  # int64 [N]


def rules_bytes(num_slots: int, max_positions: int) -> int:
    """Memory of the rules and tokens of a device's slots: `kernels.rule_tensors.RuleTensors`."""
    per_bias = 3 + MAX_BAD_WORD_TOKENS  # token, bias, end and prefix
    per_slot = 6  # flag, length of the prompt, penalties and number of biases
    return 4 * num_slots * (per_slot + MAX_BIASES * per_bias + max_positions)


class RuledSlots:
    """Slots whose requests have rules, on a host, with their tokens by position."""

    def __init__(self, max_positions: int) -> None:
        self._max_positions = max_positions
        self._slots: dict[int, tuple[LogitRules, Array]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def update(self, updates: Sequence[SlotUpdate]) -> None:
        """Applying the same updates again changes nothing."""
        for update in updates:
            if update.rules is None:
                self._slots.pop(update.slot, None)
            else:
                tokens = np.zeros(self._max_positions, np.int64)
                tokens[: len(update.token_ids)] = update.token_ids
                self._slots[update.slot] = (update.rules, tokens)

    def rows(self, slot_ids: Array) -> list[tuple[int, LogitRules, Array]]:
        """Row, rules and tokens of the rows with rules; tokens of a step are written to the array."""
        if not self._slots:
            return []
        ruled = ((row, self._slots.get(slot)) for row, slot in enumerate(slot_ids.tolist()))
        return [(row, *found) for row, found in ruled if found is not None]


_Bias = tuple[int, float, int, tuple[int, ...]]  # token, bias, end, prefix


def _biases(request: Request) -> Iterator[_Bias]:
    sampling = request.sampling
    for token, bias in sampling.logit_bias:
        if bias:
            yield token, bias, _FOREVER, ()
    for word in request.bad_word_ids:
        yield word[-1], -np.inf, _FOREVER, word[:-1]
    if sampling.min_tokens:
        end = len(request.prompt_token_ids) + sampling.min_tokens
        for token in sorted(request.stop_token_ids):
            yield token, -np.inf, end, ()


def _check(request: Request, *, num_biases: int, word_len: int) -> None:
    problems = []
    if num_biases > MAX_BIASES:
        what = "logit_bias, bad_words and (with min_tokens) tokens that stop"
        expected, hint = f"at most {MAX_BIASES} together", "Pass fewer."
        problems.append(problem(f"sampling {what}", expected=expected, found=str(num_biases), hint=hint))
    if word_len > MAX_BAD_WORD_TOKENS:
        expected, hint = f"at most {MAX_BAD_WORD_TOKENS} tokens in a word", "Shorten it."
        problems.append(problem("sampling bad_words", expected=expected, found=str(word_len), hint=hint))
    raise_all(RequestError, f"request {request.request_id!r} sampling", problems)
