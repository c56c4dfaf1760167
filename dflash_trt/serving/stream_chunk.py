"""A piece of a request's answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.core.logprobs import TokenLogprob
from dflash_trt.core.request import FinishReason, GenerationOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamChunk:
    """Tokens and text since the last chunk. `text` is None without a tokenizer; the last chunk has the `output`.

    Text may lag behind the tokens, while it could be part of a character or of a stop string. `num_draft_tokens` were
    verified for these tokens, of which the target agreed with `num_accepted_tokens`. `top_logprobs` has an entry for
    each token, where they are asked for.
    """

    text: str | None
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finish_reason: FinishReason | None = None
    output: GenerationOutput | None = None
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    sample_index: int = 0


def merged(chunks: Sequence[StreamChunk]) -> StreamChunk:
    """Several chunks of one request, at least one, as one."""
    if len(chunks) == 1:
        return chunks[0]
    return StreamChunk(
        text=None if chunks[0].text is None else "".join(chunk.text or "" for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        num_draft_tokens=sum(chunk.num_draft_tokens for chunk in chunks),
        num_accepted_tokens=sum(chunk.num_accepted_tokens for chunk in chunks),
        finish_reason=chunks[-1].finish_reason,
        output=chunks[-1].output,
        top_logprobs=tuple(top for chunk in chunks for top in chunk.top_logprobs),
        sample_index=chunks[0].sample_index,
    )
