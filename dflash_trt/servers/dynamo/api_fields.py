"""Fields of OpenAI requests that Dynamo's front end drops without a word: refused by name, or sent on to the worker.

The tables know paths and names only; values are checked where they are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dflash_trt.core.errors import RequestError, problem, raise_all
from dflash_trt.core.sampling import SamplingParams, sample_seed

CHAT: Final = "chat/completions"
COMPLETIONS: Final = "completions"
RESPONSES: Final = "responses"

ANNOTATION: Final = "dflash-trt:"  # before a JSON object of sampling parameters, among `nvext.annotations`
ENGINE_DATA: Final = "engine_data"  # what a worker tells of a request, among `nvext.extra_fields`

# They name a person, a session or a key, and ask for nothing.
LABELS: Final = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})

_GRAMMARS: Final = ("json_schema", "regex", "choice", "grammar")
_PENALTIES: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")

# Sampling parameters in our words that the front end refuses or drops at a path.
ANNOTATED: Final[Mapping[str, frozenset[str]]] = {
    CHAT: frozenset({"logit_bias", "bad_words", *_GRAMMARS}),
    COMPLETIONS: frozenset({"logit_bias", "bad_words", *_GRAMMARS}),
    RESPONSES: frozenset({"logit_bias", "bad_words", *_GRAMMARS, *_PENALTIES, "seed", "top_k", "min_p"}),
}

# Fields that ask for something which the front end drops, with the values at which they ask for nothing.
_DROPPED: Final[dict[str, tuple[Any, ...]]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "parallel_tool_calls": (True,),
}
DROPPED: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    CHAT: _DROPPED | {"modalities": (["text"],), "prediction": (), "web_search_options": ()},
    COMPLETIONS: _DROPPED | {"suffix": ("",)},
    RESPONSES: _DROPPED | {"truncation": ("disabled",), "conversation": (), "top_logprobs": (0,), "include": ([],)},
}

# At this path the front end takes any name; those that it reads, and those that it refuses itself.
_READ_RESPONSES: Final = (
    "model input instructions max_output_tokens temperature top_p stream tools tool_choice text reasoning nvext "
    "background previous_response_id prompt max_tool_calls stream_options"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiRequest:
    """One body for each sample, as the front end gets it, and what the client has asked for itself."""

    bodies: tuple[dict[str, Any], ...]
    is_stream: bool
    wants_engine_data: bool


def read_api_request(path: str, body: Mapping[str, Any]) -> ApiRequest:
    """`body` of a POST to /v1/`path`.

    Raises:
        RequestError: names every field that nobody would read, and an `n` out of range.
    """
    raise_all(RequestError, "request", _problems(path, body))
    annotated = {name: body[name] for name in ANNOTATED[path] if body.get(name) is not None}
    labels = frozenset() if path == RESPONSES else LABELS  # a response says them again
    kept = {name: value for name, value in body.items() if name not in labels | ANNOTATED[path] | DROPPED[path].keys()}
    nvext = dict(body.get("nvext") or {})
    extra = list(nvext.get("extra_fields") or ())
    if annotated:
        nvext["annotations"] = [*(nvext.get("annotations") or ()), ANNOTATION + json.dumps(annotated)]
    if path != RESPONSES:
        nvext["extra_fields"] = [*extra, *({ENGINE_DATA} - set(extra))]
    if nvext:
        kept["nvext"] = nvext
    return ApiRequest(
        bodies=_samples(path, kept), is_stream=bool(body.get("stream")), wants_engine_data=ENGINE_DATA in extra
    )


def _problems(path: str, body: Mapping[str, Any]) -> list[str]:
    unread = {name for name, neutral in DROPPED[path].items() if body.get(name) not in (None, *neutral)}
    if path == RESPONSES:
        unread |= body.keys() - set(_READ_RESPONSES.split()) - ANNOTATED[path] - LABELS - DROPPED[path].keys()
    expected = "nothing, for this server does not implement it"
    return [problem(name, expected=expected, found=f"{body[name]!r:.80}") for name in sorted(unread)]


def _samples(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """A body for each of `n`: the front end would close a request with the first of its samples that ends."""
    num_samples = body.get("n")
    if path == RESPONSES or num_samples in (None, 1):
        return (body,)
    num_samples = SamplingParams(n=num_samples).n
    body = {name: value for name, value in body.items() if name != "n"}
    seed = body.get("seed")
    if seed is None:
        return (body,) * num_samples
    return tuple(body | {"seed": sample_seed(seed, index)} for index in range(num_samples))
