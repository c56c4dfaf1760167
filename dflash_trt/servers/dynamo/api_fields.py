"""Request fields that Dynamo's front end drops silently: refused by name, or forwarded to the worker.

The tables know paths and names only; values are checked where they are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dflash_trt.core.checked_values import shown
from dflash_trt.core.errors import RequestError, problem, raise_all
from dflash_trt.core.request import check_token_ids, too_many_tokens
from dflash_trt.core.sampling import SamplingParams, sample_seed
from dflash_trt.engine_dir.template_renderer import conversation_too_long, max_conversation_bytes, text_too_long
from dflash_trt.servers.dynamo.echo import echo_problems
from dflash_trt.servers.dynamo.settings import PromptLimits

CHAT: Final = "chat/completions"
COMPLETIONS: Final = "completions"
RESPONSES: Final = "responses"

ANNOTATION: Final = "dflash-trt:"  # before a JSON object of parameters in our words, among `nvext.annotations`
STRUCTURED_OUTPUTS: Final = "structured_outputs"
ENGINE_DATA: Final = "engine_data"  # the worker's per-request report, among `nvext.extra_fields`
REPORTS_DRAFTS: Final = "reports_drafts"  # asks for the drafts of each chunk

# They name a person, a session or a key, and ask for nothing.
LABELS: Final = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})

_GRAMMARS: Final = ("json_schema", "regex", "choice", "grammar")
# Members of vLLM's `structured_outputs`, with the sampling parameters that serve them.
_STRUCTURED: Final = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_ANY_OBJECT: Final = {"type": "object"}  # stands for `structured_outputs.json_object`
_GUIDED: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format", *_GRAMMARS)

_TEXT_PARTS: Final = (None, "text", "refusal", "input_text", "output_text", "reasoning_text")
_CONVERSATION: Final = ("messages", "input", "instructions", "tools", "chat_template_kwargs")
_PENALTIES: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")

# Parameters in our words that the front end refuses or drops at a path.
ANNOTATED: Final[Mapping[str, frozenset[str]]] = {
    CHAT: frozenset({"logit_bias", "bad_words", *_GRAMMARS, REPORTS_DRAFTS}),
    COMPLETIONS: frozenset({"logit_bias", "bad_words", *_GRAMMARS, REPORTS_DRAFTS}),
    RESPONSES: frozenset({"logit_bias", "bad_words", *_GRAMMARS, *_PENALTIES, "seed", "top_k", "min_p"}),
}

# Fields that ask for something which the front end drops, with the values at which they ask for nothing.
_DROPPED: Final[dict[str, tuple[Any, ...]]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "parallel_tool_calls": (True,),
}
DROPPED: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    CHAT: _DROPPED | {"echo": (False,), "modalities": (["text"],), "prediction": (), "web_search_options": ()},
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
    is_echo: bool = False
    wants_prompt_logprobs: bool = False


def read_api_request(path: str, body: Mapping[str, Any], *, has_tool_call_parser: bool) -> ApiRequest:
    """`body` of a POST to /v1/`path`.

    Raises:
        RequestError: names every field that nothing would read, and an `n` out of range.
    """
    is_echo = path == COMPLETIONS and body.get("echo") is True
    problems = [*_problems(path, body), *_nvext_problems(body), *_part_problems(body)]
    problems += echo_problems(body) if path == COMPLETIONS else []
    raise_all(RequestError, "request", problems + ([] if has_tool_call_parser else _tool_problems(body)))
    annotated = {name: body[name] for name in ANNOTATED[path] if body.get(name) is not None} | _structured(body)
    labels = frozenset() if path == RESPONSES else LABELS  # a response says them again
    left_out = labels | ANNOTATED[path] | DROPPED[path].keys() | {STRUCTURED_OUTPUTS}
    kept = {name: value for name, value in body.items() if name not in left_out}
    if path == COMPLETIONS:
        kept.pop("echo", None)
    if is_echo and kept.get("prompt_logprobs") is None:
        kept["prompt_logprobs"] = body.get("logprobs") or 0
    nvext = dict(body.get("nvext") or {})
    extra = list(nvext.get("extra_fields") or ())
    if annotated:
        nvext["annotations"] = [*(nvext.get("annotations") or ()), ANNOTATION + json.dumps(annotated)]
    if path != RESPONSES:
        nvext["extra_fields"] = [*extra, *({ENGINE_DATA} - set(extra))]
    if nvext:
        kept["nvext"] = nvext
    return ApiRequest(
        bodies=_samples(path, kept),
        is_stream=bool(body.get("stream")),
        wants_engine_data=ENGINE_DATA in extra,
        is_echo=is_echo,
        wants_prompt_logprobs=body.get("prompt_logprobs") is not None,
    )


def _problems(path: str, body: Mapping[str, Any]) -> list[str]:
    unread = {name for name, neutral in DROPPED[path].items() if body.get(name) not in (None, *neutral)}
    if path == RESPONSES:
        known = {*_READ_RESPONSES.split(), STRUCTURED_OUTPUTS}
        unread |= body.keys() - known - ANNOTATED[path] - LABELS - DROPPED[path].keys()
    expected = "nothing, for this server does not implement it"
    problems = [problem(name, expected=expected, found=shown(body[name])) for name in sorted(unread)]
    if path != RESPONSES and body.get(REPORTS_DRAFTS) and not body.get("stream"):
        problems.append(
            problem(REPORTS_DRAFTS, expected="stream as well", found="none", hint="Each chunk has its own.")
        )
    return problems


def _nvext_problems(body: Mapping[str, Any]) -> list[str]:
    nvext = body.get("nvext")
    if nvext is None:
        return []
    if not isinstance(nvext, Mapping):
        return [problem("nvext", expected="an object", found=shown(nvext))]
    return [
        problem(f"nvext.{name}", expected="a list of strings", found=shown(nvext[name]))
        for name in ("annotations", "extra_fields")
        if nvext.get(name) is not None
        and not (isinstance(nvext[name], list) and all(isinstance(item, str) for item in nvext[name]))
    ]


def _part_problems(body: Mapping[str, Any]) -> list[str]:
    """Images, audio and files in messages: the front end drops some of them."""
    problems = []
    for field in ("messages", "input"):
        items = body.get(field)
        for index, item in enumerate(items if isinstance(items, list) else ()):
            parts = item.get("content") if isinstance(item, Mapping) else None
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, Mapping) and part.get("type") not in _TEXT_PARTS:
                    expected, found = "text, for this server reads nothing else", shown(part["type"])
                    problems.append(problem(f"{field}[{index}].content", expected=expected, found=found))
    return problems


def _tool_problems(body: Mapping[str, Any]) -> list[str]:
    if not body.get("tools") or body.get("tool_choice") == "none":
        return []
    expected, hint = "none, for nothing parses tool calls", "Start the server with --tool-call-parser NAME."
    return [problem("tools", expected=expected, found=shown(body["tools"]), hint=hint)]


def _structured(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameter of vLLM's `structured_outputs`. Raises RequestError."""
    value = body.get(STRUCTURED_OUTPUTS)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError.about(STRUCTURED_OUTPUTS, expected="an object", found=shown(value))
    given = {name: item for name, item in value.items() if item is not None and item is not False}
    expected = "nothing, for this server does not implement it"
    unread = sorted(given.keys() - {*_STRUCTURED, "json_object"})
    problems = [problem(f"{STRUCTURED_OUTPUTS}.{name}", expected=expected, found=shown(given[name])) for name in unread]
    raise_all(RequestError, "request", problems)
    others = [name for name in _GUIDED if body.get(name) is not None]
    if len(given) != 1 or others:
        expected = f"exactly one of {', '.join(_STRUCTURED)}, json_object"
        found = " and ".join([*given, *others]) or "none"
        raise RequestError.about(STRUCTURED_OUTPUTS, expected=expected, found=found)
    ((name, item),) = given.items()
    return {"json_schema": _ANY_OBJECT} if name == "json_object" else {_STRUCTURED[name]: item}


def check_prompt(path: str, body: Mapping[str, Any], limits: PromptLimits) -> None:
    """Raise RequestError for a prompt whose size alone shows that it cannot fit, and for token ids out of range.

    The front end would tokenize the first, and would refuse the second without saying why.
    """
    if path == COMPLETIONS:
        prompts: Any = body.get("prompt")
        is_one = not isinstance(prompts, list) or not any(isinstance(item, str | list) for item in prompts)
        for prompt in [prompts] if is_one else prompts:
            if isinstance(prompt, str) and (size := len(prompt.encode(errors="surrogatepass"))) > limits.max_text_bytes:
                raise text_too_long(size, limits.max_text_bytes)
            if isinstance(prompt, list):
                if len(prompt) > limits.max_tokens:
                    raise too_many_tokens(len(prompt), limits.max_tokens)
                check_token_ids(prompt, limits.vocab_size)
        return
    limit = max_conversation_bytes(limits.max_text_bytes)
    found = len(json.dumps([body.get(name) for name in _CONVERSATION]))
    if limit is not None and found > limit:
        raise conversation_too_long(found, limit)


def _samples(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """A body for each of `n`: the front end would close a request with the first of its samples that ends."""
    num_samples = body.get("n")
    if path == RESPONSES or num_samples in (None, 1):
        return (body,)
    seed = body.get("seed")
    num_samples = SamplingParams(n=num_samples, seed=seed).n
    body = {name: value for name, value in body.items() if name != "n"}
    if seed is None:
        return (body,) * num_samples
    return tuple(body | {"seed": sample_seed(seed, index)} for index in range(num_samples))
