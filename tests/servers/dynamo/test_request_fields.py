"""Requests of Dynamo's front end, as recorded from it, made into sampling parameters; and answers in its form."""

import json
from typing import Any

import pytest

from dflash_trt.core.errors import RequestError
from dflash_trt.core.logprobs import TokenLogprob
from dflash_trt.core.request import GenerationOutput, SamplingParams, TokenEvent
from dflash_trt.servers.dynamo.request_fields import _FOREIGN, FIELDS, read_request
from dflash_trt.servers.dynamo.responses import response, speculation
from dflash_trt.servers.dynamo.settings import sampling_defaults
from dflash_trt.serving.output_processor import StreamChunk


def request(**groups: Any) -> dict[str, Any]:
    """As ai-dynamo 1.6.1 sends it for a request that says nothing."""
    sampling = dict.fromkeys(
        [
            "n",
            "best_of",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "use_beam_search",
            "length_penalty",
            "seed",
            "include_stop_str_in_output",
            "guided_decoding",
        ]
    )
    stop = dict.fromkeys(["max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "min_tokens", "ignore_eos"])
    output = dict.fromkeys(
        ["logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"]
    )
    empty = {"sampling_options": sampling, "stop_conditions": stop | {"stop_token_ids_hidden": [0]}}
    empty |= {"output_options": output, "annotations": [], "routing": {}, "token_ids": [1, 2, 3]}
    return {
        name: value | groups[name] if isinstance(value, dict) and name in groups else groups.get(name, value)
        for name, value in (empty | {key: {} for key in groups if key not in empty}).items()
    }


def read(**groups: Any) -> Any:
    return read_request(request(**groups), defaults={"temperature": 1.0, "top_k": 20}, max_seq_len=64)


def test_a_request_that_says_nothing_has_the_defaults_and_the_whole_context() -> None:
    order = read()
    assert order.prompt_token_ids == [1, 2, 3]
    assert order.sampling == SamplingParams(max_new_tokens=61, temperature=1.0, top_k=20)
    assert (order.cache_salt, order.priority) == ("", 0)


def test_what_a_request_says_replaces_the_defaults() -> None:
    order = read(
        sampling_options={"temperature": 0.0, "top_k": -1, "seed": 7},
        stop_conditions={"max_tokens": 5, "stop": ["a"], "stop_token_ids": [4], "stop_token_ids_visible": [6]},
        output_options={"logprobs": 0},
        routing={"cache_salt": "mine", "priority": 3},
    )
    expected = SamplingParams(max_new_tokens=5, seed=7, stop=("a",), stop_token_ids=(4, 6), logprobs=True)
    assert (order.sampling, order.cache_salt, order.priority) == (expected, "mine", 3)


@pytest.mark.parametrize("field", [field for field in FIELDS if not field.is_served], ids=lambda field: field.path)
def test_every_field_that_is_not_served_is_refused_by_name_but_for_its_neutral_values(field) -> None:
    group, _, key = field.path.rpartition(".")

    def having(value: Any) -> dict[str, Any]:
        whole = request()
        place = whole
        for part in group.split("."):
            place[part] = place.get(part) or {}
            place = place[part]
        place[key] = value
        return whole

    for value in field.neutral:
        read_request(having(value), defaults={}, max_seq_len=64)
    with pytest.raises(RequestError, match=field.name):
        read_request(having("something"), defaults={}, max_seq_len=64)


def test_a_field_that_a_later_front_end_adds_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"new_penalty: expected nothing.*found 2"):
        read(sampling_options={"new_penalty": 2})
    for name in _FOREIGN:
        with pytest.raises(RequestError, match=name):
            read(**{name: {"image_url": ["x"]}})
        for nothing in (None, {}, []):
            assert read_request(request() | {name: nothing}, defaults={}, max_seq_len=64).prompt_token_ids == [1, 2, 3]


def test_all_problems_are_in_one_error() -> None:
    with pytest.raises(RequestError, match=r"(?s)best_of.*length_penalty.*new_field"):
        read(sampling_options={"best_of": 3, "length_penalty": 2.0}, output_options={"new_field": 1})


def test_a_prompt_that_fills_the_context_is_the_engines_to_refuse() -> None:
    for num_tokens, max_new_tokens in ((62, 2), (63, 1), (64, 1), (90, 1)):
        assert read(token_ids=[1] * num_tokens).sampling.max_new_tokens == max_new_tokens


@pytest.mark.parametrize("text", ["{", "5", '{"no_such_field": 1}'])
def test_an_annotation_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"nvext\.annotations: expected"):
        read(annotations=[f"dflash-trt:{text}"])


STEPS = (
    TokenEvent("r", (5,)),
    TokenEvent("r", (6, 7), num_candidates=3, num_accepted=1),
    TokenEvent("r", (8,), num_candidates=2),
)
OUTPUT = GenerationOutput(
    request_id="r",
    text=None,
    token_ids=(5, 6, 7, 8),
    logprobs=(),
    finish_reason="length",
    num_prompt_tokens=9,
    num_verify_steps=2,
    num_draft_tokens=5,
    num_accepted_tokens=1,
    num_emitted_by_verify=3,
    time_to_first_token_s=0.1,
    total_s=0.2,
    steps=STEPS,
)


def test_speculation_is_counted_per_step() -> None:
    assert speculation(OUTPUT, 3) == {
        "num_spec_tokens": 3,
        "num_spec_steps": 2,
        "num_draft_tokens": 5,
        "num_accepted_draft_tokens": 1,
        "mean_acceptance_length": 1.5,
        "draft_acceptance_rate": 0.2,
        "acceptance_histogram": [1, 1, 0, 0],
        "per_step_accepted": [1, 0],
        "per_step_drafted": [3, 2],
    }


def test_a_request_that_failed_raises_with_its_reason() -> None:
    from dataclasses import replace

    failed = replace(OUTPUT, finish_reason="error", error="a row of logits is not finite")
    chunk = StreamChunk(text=None, token_ids=(), finish_reason="error", output=failed)
    with pytest.raises(RuntimeError, match="a row of logits is not finite"):
        response(chunk, max_draft_len=3, has_logprobs=False)


def test_the_most_likely_tokens_are_ranked() -> None:
    top = TokenLogprob(7, -0.5)
    chunk = StreamChunk(text="x", token_ids=(7,), logprobs=(-0.5,), top_logprobs=((top, top),), sample_index=3)
    answer = response(chunk, max_draft_len=3, has_logprobs=True)
    assert [entry["rank"] for entry in answer["top_logprobs"][0]] == [1, 2]
    assert answer["top_logprobs"][0][0] == {"rank": 1, "token_id": 7, "token": None, "logprob": -0.5}


def test_annotations_are_sampling_parameters_that_win() -> None:
    words = ["query_instance_id:1", 'dflash-trt:{"min_tokens": 2, "top_k": 5}', 'dflash-trt:{"bad_words": ["x"]}']
    assert read(sampling_options={"top_k": 3}, annotations=words).sampling == SamplingParams(
        max_new_tokens=61, temperature=1.0, top_k=5, min_tokens=2, bad_words=("x",)
    )


def test_an_annotation_may_ask_for_drafts() -> None:
    assert not read().reports_drafts
    order = read(annotations=['dflash-trt:{"reports_drafts": true, "top_k": 5}'])
    assert order.reports_drafts and order.sampling.top_k == 5
    with pytest.raises(RequestError, match="reports_drafts: expected true or false, found 1"):
        read(annotations=['dflash-trt:{"reports_drafts": 1}'])


def test_defaults_are_every_parameter_of_a_generation_config(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("dflash_trt.servers.dynamo.settings.card_source", lambda engine: tmp_path)
    engine: Any = None
    assert sampling_defaults(engine) == {"temperature": 1.0}
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}
    for fields in (given, given | {"top_k": None}):
        (tmp_path / "generation_config.json").write_text(json.dumps(fields | {"do_sample": True, "max_length": 9}))
        assert sampling_defaults(engine) == {name: value for name, value in fields.items() if value is not None}
