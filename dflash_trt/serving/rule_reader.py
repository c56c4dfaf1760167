"""What logit rules need of a tokenizer and a vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_trt.core.errors import RequestError
from dflash_trt.core.sampling import SamplingParams

if TYPE_CHECKING:  # tokenizers is loaded only for an engine with one
    from dflash_trt.serving.text import TextCodec


class RuleReader:
    """`codec` None: the engine has no tokenizer, and takes no bad_words."""

    def __init__(self, codec: TextCodec | None, *, vocab_size: int) -> None:
        self._codec = codec
        self._vocab_size = vocab_size

    def bad_word_ids(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of every spelling of the words.

        Raises:
            RequestError: there is no tokenizer for bad_words, or logit_bias names a token that is not there.
        """
        beyond = [token for token, _ in sampling.logit_bias if token >= self._vocab_size]
        if beyond:
            expected, hint = f"token ids from 0 to {self._vocab_size - 1}", "Use the tokenizer of the target."
            raise RequestError.about("sampling logit_bias", expected=expected, found=str(beyond[0]), hint=hint)
        if not sampling.bad_words:
            return ()
        if self._codec is None:
            raise RequestError.about(
                "sampling bad_words",
                expected="none, for this engine has no tokenizer",
                found=repr(sampling.bad_words),
                hint="Use logit_bias, or build the engine from a target directory with a tokenizer.",
            )
        return tuple(ids for word in sampling.bad_words for ids in self._codec.spellings(word))
