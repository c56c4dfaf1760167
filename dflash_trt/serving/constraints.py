"""Constraints of requests on their texts. llguidance is imported when the first request asks for one."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dflash_trt.core.constraint import TokenConstraint
from dflash_trt.core.errors import RequestError
from dflash_trt.core.sampling import SamplingParams

if TYPE_CHECKING:
    from dflash_trt.serving.grammar import GrammarCompiler
    from dflash_trt.serving.text import TextCodec


class Constraints:
    """Compiles what requests ask for with the tokenizer of an engine, if it has one."""

    def __init__(self, codec: TextCodec | None, *, vocab_size: int) -> None:
        self._codec = codec
        self._vocab_size = vocab_size

    def compile(self, sampling: SamplingParams) -> TokenConstraint | None:
        """None for parameters that allow any text.

        Raises:
            RequestError: there is no tokenizer, or what they ask for is wrong or not implemented.
        """
        field = sampling.grammar_field
        if field is None:
            return None
        if self._codec is None:
            raise RequestError.about(
                f"sampling {field}",
                expected="none, for this engine has no tokenizer",
                found=f"{getattr(sampling, field)!r:.80}",
                hint="Build the engine from a target directory with a tokenizer.",
            )
        return self._compiler.compile(sampling)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        from dflash_trt.serving.grammar import GrammarCompiler

        assert self._codec is not None
        return GrammarCompiler(self._codec.backend, vocab_size=self._vocab_size)
