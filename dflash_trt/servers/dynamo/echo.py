"""`echo` of /v1/completions: the prompt before the answer, with its log probabilities where `logprobs` are asked for.

OpenAI's completions had it; evaluation harnesses score texts with it. The front end does not implement it, so the
gateway asks the worker for `prompt_logprobs`, whose report has the texts of the prompt's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from dflash_trt.core.checked_values import shown
from dflash_trt.core.errors import problem

if TYPE_CHECKING:
    from dflash_trt.serving.text import TextCodec

_LOGPROBS: Final = "prompt_logprobs"
_TEXTS: Final = "prompt_tokens"


def tell_texts(engine_data: dict[str, Any], prompt_token_ids: Sequence[int], codec: TextCodec) -> None:
    """Add the texts of tokens to a worker's report of prompt log probabilities, if there is one."""
    if _LOGPROBS not in engine_data:
        return
    texts = codec.detokenizer()  # a character of several tokens belongs to the last
    engine_data[_TEXTS] = [texts.push([token_id]) for token_id in prompt_token_ids]
    for tokens in engine_data[_LOGPROBS]:
        for token_id, token in (tokens or {}).items():
            token["decoded_token"] = codec.decode([int(token_id)])


def echo_problems(body: Mapping[str, Any]) -> Iterator[str]:
    """What cannot be echoed."""
    echo = body.get("echo")
    if echo is None or echo is False:
        return
    prompt = body.get("prompt")
    if body.get("stream"):
        yield problem("echo", expected="an answer that is not streamed", found="stream")
    if isinstance(prompt, list) and len(prompt) != 1 and any(isinstance(item, str | list) for item in prompt):
        yield problem("echo", expected="one prompt", found=f"a list of {len(prompt)}")
    if echo is not True:
        yield problem("echo", expected="true or false", found=shown(echo))


def with_prompt(answer: Mapping[str, Any], *, keeps_prompt_logprobs: bool) -> dict[str, Any]:
    """The prompt in front of every choice."""
    texts, found = answer[_TEXTS], answer[_LOGPROBS]
    left_out = {_TEXTS} if keeps_prompt_logprobs else {_TEXTS, _LOGPROBS}
    rest = {name: value for name, value in answer.items() if name not in left_out}
    return rest | {"choices": [_after(choice, texts, found) for choice in answer["choices"]]}


def _after(choice: Mapping[str, Any], texts: list[str], found: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    joined = {**choice, "text": "".join(texts) + choice["text"]}
    given = choice.get("logprobs")
    if given is None:
        return joined
    tokens = [*texts, *given["tokens"]]
    own = [None if ranked is None else next(iter(ranked.values()))["logprob"] for ranked in found]
    tops = [
        None if ranked is None else {token["decoded_token"]: token["logprob"] for token in ranked.values()}
        for ranked in found
    ]
    return joined | {
        "logprobs": given
        | {
            "tokens": tokens,
            "token_logprobs": [*own, *given["token_logprobs"]],
            "top_logprobs": [*tops, *given["top_logprobs"]],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)),
        }
    }
