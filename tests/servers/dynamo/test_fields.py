"""Every field of the OpenAI API, sent to a server: it is served, refused by name, or a label that asks for nothing.

The table of docs/serving_openai.md is this one.
"""

import re
from typing import Any

import pytest

from dflash_trt.core.sampling import SAMPLING_FIELDS
from tests.docs.pages import ROOT
from tests.servers.dynamo.serving import Server

PAGE = ROOT / "docs" / "serving_openai.md"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}]
PATHS = {"completions": {"prompt": "x = "}, "chat/completions": {"messages": [{"role": "user", "content": "x"}]}}
COMPLETIONS, CHAT = PATHS
BOTH = (COMPLETIONS, CHAT)

SERVED = "served"
LABEL = "a label"
REFUSED = "refused"

# Field: a value that asks for something, what becomes of it, at which of the two paths. A name of SamplingParams is
# the parameter that serves the field, once there is one; until then it is refused.
FIELDS: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "max_tokens": (3, SERVED, BOTH),
    "max_completion_tokens": (3, SERVED, (CHAT,)),
    "temperature": (0.5, SERVED, BOTH),
    "top_p": (0.5, SERVED, BOTH),
    "top_k": (5, SERVED, BOTH),
    "min_p": (0.1, SERVED, BOTH),
    "seed": (3, SERVED, BOTH),
    "stop": (["x"], SERVED, BOTH),
    "stop_token_ids": ([5], SERVED, BOTH),
    "ignore_eos": (True, SERVED, BOTH),
    "stream": (True, SERVED, BOTH),
    "cache_salt": ("mine", SERVED, BOTH),
    "skip_special_tokens": (False, SERVED, BOTH),
    "chat_template_kwargs": ({"thinks": True}, SERVED, (CHAT,)),
    "reasoning_effort": ("low", SERVED, (CHAT,)),
    "add_generation_prompt": (False, SERVED, (CHAT,)),
    "tools": (TOOLS, SERVED, (CHAT,)),
    "logprobs": (True, SERVED, (CHAT,)),
    "n": (2, "n", BOTH),
    "min_tokens": (2, "min_tokens", BOTH),
    "presence_penalty": (0.5, "presence_penalty", BOTH),
    "frequency_penalty": (0.5, "frequency_penalty", BOTH),
    "repetition_penalty": (1.5, "repetition_penalty", BOTH),
    "response_format": ({"type": "json_object"}, "json_schema", (CHAT,)),
    "guided_regex": ("a+", "regex", BOTH),
    "guided_choice": (["a", "b"], "choice", BOTH),
    "guided_grammar": ('start: "a"', "grammar", BOTH),
    "prompt_logprobs": (1, "prompt_logprobs", BOTH),
    "echo": (True, "prompt_logprobs", (COMPLETIONS,)),
    "best_of": (2, REFUSED, BOTH),
    "include_stop_str_in_output": (True, REFUSED, BOTH),
    "allowed_token_ids": ([3], REFUSED, BOTH),
    "bad_words_token_ids": ([[3]], REFUSED, BOTH),
    "detokenize": (False, REFUSED, BOTH),
    "bad_words": (["x"], "bad_words", BOTH),
    "regex": ("a+", "regex", BOTH),
    "choice": (["a", "b"], "choice", BOTH),
    "grammar": ('start: "a"', "grammar", BOTH),
    "json_schema": (SCHEMA, "json_schema", BOTH),
    "use_beam_search": (True, REFUSED, BOTH),
    "length_penalty": (1.5, REFUSED, BOTH),
    "priority": (1, REFUSED, BOTH),
    "structured_outputs": ({"regex": "a"}, SERVED, BOTH),
    "functions": ([{"name": "f", "parameters": SCHEMA}], REFUSED, (CHAT,)),
    "unknown_field": (1, REFUSED, BOTH),
    "logit_bias": ({"5": 1}, "logit_bias", BOTH),
    "suffix": ("x", REFUSED, (COMPLETIONS,)),
    "user": ("me", LABEL, BOTH),
    "metadata": ({"a": "b"}, LABEL, BOTH),
    "store": (True, REFUSED, (CHAT,)),
    "service_tier": ("flex", REFUSED, (CHAT,)),
    "parallel_tool_calls": (False, REFUSED, (CHAT,)),
    "modalities": (["audio"], REFUSED, (CHAT,)),
    "prediction": ({"type": "content", "content": "x"}, REFUSED, (CHAT,)),
    "web_search_options": ({}, REFUSED, (CHAT,)),
    "prompt_cache_key": ("k", LABEL, (CHAT,)),
    "safety_identifier": ("k", LABEL, BOTH),
    "reports_drafts": (True, SERVED, BOTH),
}
NEEDED = {"reports_drafts": {"stream": True}}
NAMES = {row.name for row in SAMPLING_FIELDS}


def is_refused(outcome: str) -> bool:
    return outcome == REFUSED or (outcome not in (SERVED, LABEL) and outcome not in NAMES)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_served_or_refused_by_its_name(server: Server, name: str) -> None:
    value, outcome, paths = FIELDS[name]
    for path in paths:
        answer = server.post(path, **PATHS[path] | {"max_tokens": 4} | NEEDED.get(name, {}) | {name: value})
        if is_refused(outcome):
            assert answer.status_code in (400, 501), answer.text
            assert name in answer.json()["error"]["message"]
        else:
            assert answer.status_code == 200, answer.text


NEUTRAL = {
    "n": 1, "suffix": "", "store": False, "service_tier": "auto", "parallel_tool_calls": True,
    "modalities": ["text"], "logit_bias": {}, "presence_penalty": 0, "stop": None, "metadata": None,
    "echo": False, "structured_outputs": None,
}  # fmt: skip


def test_values_that_ask_for_nothing_are_taken(server: Server) -> None:
    for path in BOTH:
        neutral = {name: value for name, value in NEUTRAL.items() if path in FIELDS[name][2]}
        answer = server.post(path, **PATHS[path] | {"max_tokens": 4} | neutral)
        assert answer.status_code == 200, answer.text


# The same for /v1/responses, whose front end takes any name.
RESPONSES: dict[str, tuple[Any, str]] = {
    "temperature": (0.5, SERVED),
    "top_p": (0.5, SERVED),
    "stream": (True, SERVED),
    "instructions": ("be kind", SERVED),
    "tools": ([{"type": "function", "name": "f", "parameters": SCHEMA}], SERVED),
    "text": ({"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, SERVED),
    "seed": (3, "seed"),
    "presence_penalty": (0.5, "presence_penalty"),
    "logit_bias": ({"5": 1}, "logit_bias"),
    "regex": ("a+", "regex"),
    "structured_outputs": ({"choice": ["a", "b"]}, SERVED),
    "user": ("me", LABEL),
    "metadata": ({"a": "b"}, LABEL),
    "store": (True, REFUSED),
    "service_tier": ("flex", REFUSED),
    "parallel_tool_calls": (False, REFUSED),
    "truncation": ("auto", REFUSED),
    "conversation": ("x", REFUSED),
    "include": (["message.output_text.logprobs"], REFUSED),
    "top_logprobs": (2, REFUSED),
    "background": (True, REFUSED),
    "previous_response_id": ("x", REFUSED),
    "max_tool_calls": (3, REFUSED),
    "prompt": ({"id": "x"}, REFUSED),
    "n": (2, REFUSED),
    "unknown_field": (1, REFUSED),
    "reports_drafts": (True, REFUSED),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_a_field_of_a_response_is_served_or_refused_by_its_name(server: Server, name: str) -> None:
    value, outcome = RESPONSES[name]
    answer = server.post("responses", **{"input": "x", "max_output_tokens": 12} | {name: value})
    if outcome == REFUSED:
        assert answer.status_code in (400, 501), answer.text
        assert name in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200, answer.text


def test_a_refusal_of_a_stream_has_the_same_status(server: Server) -> None:
    answer = server.post("completions", prompt="x = ", stream=True, include_stop_str_in_output=True)
    assert answer.status_code == 400
    assert "include_stop_str_in_output" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max tokens"),
        ({"seed": -1}, "seed"),
        ({"prompt": "x " * 3000}, "at most 2047 tokens"),
        ({"prompt": [5] * 2048}, "at most 2047 tokens"),
        ({"stop": [f"s{index}" for index in range(33)]}, "maximum of 32"),
        ({"prompt": ""}, "prompt"),
        ({"stop": ["s" * 300]}, "stop"),
        ({"reports_drafts": True}, "reports_drafts: expected stream as well"),
        ({"reports_drafts": 3, "stream": True}, "reports_drafts: expected true or false"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(server: Server, fields: dict[str, Any], words: str) -> None:
    answer = server.post("completions", **{"prompt": "x = ", "max_tokens": 4} | fields)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"].lower()


def test_annotations_carry_what_the_front_end_drops(server: Server) -> None:
    plain = server.post("completions", prompt="x = ", max_tokens=12, temperature=0).json()["choices"][0]["text"]
    told = {"annotations": ['dflash-trt:{"max_new_tokens": 2}']}
    short = server.post("completions", prompt="x = ", max_tokens=12, temperature=0, nvext=told)
    assert plain.startswith(short.json()["choices"][0]["text"])
    assert short.json()["usage"]["completion_tokens"] == 2
    for text in ("dflash-trt:{", 'dflash-trt:{"no_such_field": 1}'):
        wrong = server.post("completions", prompt="x = ", max_tokens=2, nvext={"annotations": [text]})
        assert wrong.status_code == 400
        assert "nvext.annotations" in wrong.json()["error"]["message"]


def test_the_documentation_has_every_field() -> None:
    section = PAGE.read_text().partition("## Fields of a request")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section, flags=re.MULTILINE))
    assert rows == {name: shown(outcome) for name, (_, outcome, _) in FIELDS.items()}


def shown(outcome: str) -> str:
    return outcome if outcome in (SERVED, LABEL, REFUSED) else f"as `{outcome}`"
