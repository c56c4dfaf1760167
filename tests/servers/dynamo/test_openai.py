"""The openai client against two replicas: every text equals that of the same engine in this process."""

import asyncio
import json
import re
from typing import Any

import openai
import pytest

from dflash_trt.core.request import SamplingParams
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.marked_texts import marked_texts
from tests.servers.dynamo.serving import Server

PROMPT = "def fibonacci(n):\n"
MESSAGES: list[Any] = [{"role": "user", "content": "import os"}]
GREEDY: dict[str, Any] = {"model": "demo", "max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


def alone(offline: LLM, prompt: Any = PROMPT, **fields: Any) -> Any:
    return offline.generate(prompt, SamplingParams(**{"max_new_tokens": 40} | fields))


def test_a_completion_is_the_text_of_the_engine(client, offline) -> None:
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    expected = alone(offline)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == expected.num_prompt_tokens
    assert answer.usage.completion_tokens == len(expected.token_ids)


def test_a_conversation_goes_through_the_chat_template(client, offline) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    expected = offline.chat(MESSAGES, SamplingParams(max_new_tokens=40))
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == expected.num_prompt_tokens


def test_the_responses_api_answers(client, offline) -> None:
    answer = client.responses.create(model="demo", input="import os", max_output_tokens=40, temperature=0)
    assert answer.output_text == offline.chat(MESSAGES, SamplingParams(max_new_tokens=40)).text


def test_a_response_says_its_metadata_again(client) -> None:
    labels: dict[str, Any] = {"metadata": {"team": "a"}, "safety_identifier": "b"}
    answer = client.responses.create(model="demo", input="x", max_output_tokens=4, **labels)
    assert answer.metadata == labels["metadata"]


def test_the_models_are_listed(client) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_a_stream_has_one_chunk_for_each_step_and_the_usage_at_its_end(client, offline) -> None:
    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, logprobs=True, **GREEDY
        )
    )
    expected = offline.chat(MESSAGES, SamplingParams(max_new_tokens=40))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == expected.text
    lengths = [len(choice.logprobs.content) for choice in choices if choice.logprobs and choice.logprobs.content]
    assert lengths == [len(step.token_ids) for step in expected.steps]
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens == expected.num_accepted_tokens


def test_the_chunks_of_a_stream_report_their_drafts(client, offline) -> None:
    chunks = list(
        client.chat.completions.create(messages=MESSAGES, stream=True, extra_body={"reports_drafts": True}, **GREEDY)
    )
    expected = offline.generate({"messages": MESSAGES}, SamplingParams(max_new_tokens=40), reports_drafts=True)
    drafts = [chunk.drafts for chunk in chunks]
    texts = [(text["origin"], text["text"]) for each in drafts for text in each["texts"]]
    assert texts == [(text.origin, text.text) for text in marked_texts(expected, offline.codec)]
    counts = [(each["num_draft_tokens"], each["num_accepted_tokens"], each["num_tokens"]) for each in drafts]
    steps = [(step.num_candidates, step.num_accepted, len(step.token_ids)) for step in expected.steps]
    assert counts == steps
    assert not any(hasattr(chunk, "nvext") for chunk in chunks)


@pytest.mark.parametrize(("first", "last"), [(20, 23), (41, 42), (60, 75)])
def test_a_stop_string_ends_the_text_before_it(client, offline, first, last) -> None:
    fields = GREEDY | {"max_tokens": 100, "stop": [alone(offline, max_new_tokens=100).text[first:last], "never"]}
    expected = alone(offline, stop=fields["stop"], max_new_tokens=100)
    assert expected.finish_reason == "stop"
    answer = client.completions.create(prompt=PROMPT, **fields)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, "stop")
    assert answer.usage.completion_tokens == len(expected.token_ids)
    streamed = client.completions.create(prompt=PROMPT, stream=True, **fields)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected.text


def test_log_probabilities_are_those_of_the_engine(client, offline) -> None:
    expected = alone(offline, logprobs=True)
    answer = client.completions.create(prompt=PROMPT, logprobs=1, **GREEDY)
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, **GREEDY)
    expected = offline.chat(MESSAGES, SamplingParams(max_new_tokens=40, logprobs=True))
    found = [entry.logprob for entry in chat.choices[0].logprobs.content]
    assert found == pytest.approx(expected.logprobs, abs=1e-4)


SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 5}


def test_a_seed_gives_the_same_text_as_in_the_engine(client, offline) -> None:
    fields = GREEDY | SAMPLED | {"extra_body": {"top_k": 20, "min_p": 0.01}}
    texts = [client.completions.create(prompt=PROMPT, **fields).choices[0].text for _ in range(3)]
    expected = alone(offline, **SAMPLED, top_k=20, min_p=0.01).text
    assert texts == [expected] * 3


def test_penalties_and_most_likely_tokens_are_those_of_the_engine(client, offline) -> None:
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    expected = alone(offline, logprobs=True, top_logprobs=2, **penalties)
    assert expected.text != alone(offline).text
    answer = client.completions.create(prompt=PROMPT, logprobs=2, **penalties, **GREEDY)
    assert answer.choices[0].text == expected.text
    found = [sorted(top.values(), reverse=True)[0] for top in answer.choices[0].logprobs.top_logprobs]
    assert found == pytest.approx([top[0].logprob for top in expected.top_logprobs], abs=1e-5)


def test_structured_output_is_that_of_the_engine(client, offline) -> None:
    schema = {
        "type": "object",
        "properties": {"port": {"type": "integer", "minimum": 1, "maximum": 65535}},
        "required": ["port"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "port", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(messages=MESSAGES, response_format=form, **GREEDY | {"max_tokens": 100})
    content = answer.choices[0].message.content
    assert content == offline.chat(MESSAGES, SamplingParams(json_schema=schema, max_new_tokens=100)).text
    assert 1 <= json.loads(content)["port"] <= 65535
    expected = alone(offline, regex="[a-c]{5}").text
    for form in ({"guided_regex": "[a-c]{5}"}, {"structured_outputs": {"regex": "[a-c]{5}"}}):
        assert client.completions.create(prompt=PROMPT, extra_body=form, **GREEDY).choices[0].text == expected


def test_a_schema_of_structured_outputs_is_that_of_response_format(client) -> None:
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True, "regex": None}},
        {"structured_outputs": {"json": {"type": "object"}}},
        {"structured_outputs": {"json": '{"type": "object"}'}},
    ]
    answers = [client.chat.completions.create(messages=MESSAGES, extra_body=form, **GREEDY) for form in forms]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert answers[0].choices[0].message.content.startswith("{")


def test_a_request_that_does_not_say_is_sampled_at_temperature_one(client, offline) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=40, seed=9)
    assert answer.choices[0].text == alone(offline, temperature=1.0, seed=9).text


def test_eos_ends_a_text_unless_it_is_ignored(client, offline) -> None:
    eos = offline.engine.manifest.target.eos_token_ids[0]
    prompt = {"prompt_token_ids": [*offline.codec.encode("x = 1\n"), eos]}
    first = alone(offline, prompt, max_new_tokens=1).token_ids[0]
    answer = client.completions.create(
        prompt=PROMPT, extra_body={"stop_token_ids": [first], "ignore_eos": True}, **GREEDY
    )
    expected = alone(offline, stop_token_ids=[first], ignore_eos=True)
    assert answer.usage.completion_tokens == len(expected.token_ids)


def test_prompts_of_token_ids_are_taken_as_they_are(client, offline) -> None:
    token_ids = [int(token) for token in offline.codec.encode(PROMPT)]
    answer = client.completions.create(prompt=token_ids, **GREEDY)
    assert answer.choices[0].text == alone(offline, token_ids).text


def test_biases_and_bad_words_are_those_of_the_engine(client, offline) -> None:
    first = alone(offline, max_new_tokens=1)
    banned = {"logit_bias": {str(first.token_ids[0]): -100}}
    expected = alone(offline, logit_bias={first.token_ids[0]: -100.0}).text
    assert expected != alone(offline).text
    assert client.completions.create(prompt=PROMPT, **banned, **GREEDY).choices[0].text == expected
    word = re.findall(r"\w{4,}", alone(offline).text)[0]
    words = [f" {word}", word]
    expected = alone(offline, bad_words=words).text
    assert expected != alone(offline).text
    answer = client.completions.create(prompt=PROMPT, extra_body={"bad_words": words}, **GREEDY)
    assert answer.choices[0].text == expected


def test_samples_of_a_prompt_are_those_of_the_engine(client, offline) -> None:
    fields = GREEDY | SAMPLED | {"n": 3}
    samples = alone(offline, **SAMPLED, n=3)
    samples = [samples, *samples.other_samples]
    expected = [output.text for output in samples]
    assert len(set(expected)) == 3
    answer = client.completions.create(prompt=PROMPT, **fields)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == samples[0].num_prompt_tokens
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in samples)
    found = answer.model_extra["metrics"]["speculative_decoding"]
    num_steps = sum(output.num_verify_steps for output in samples)
    assert abs(found["num_spec_steps"] - num_steps) <= 3, "roundings of a batch may change a draft"
    emitted = sum(output.num_emitted_by_verify for output in samples)
    assert found["mean_acceptance_length"] == pytest.approx(emitted / num_steps, rel=0.1)


def test_samples_are_streamed_side_by_side(client, offline) -> None:
    fields = GREEDY | SAMPLED | {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    first = offline.chat(MESSAGES, SamplingParams(max_new_tokens=40, n=3, **SAMPLED))
    samples = [first, *first.other_samples]
    chunks = list(client.chat.completions.create(messages=MESSAGES, **fields))
    texts, ends = ["", "", ""], []
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert texts == [output.text for output in samples]
    assert sorted(ends) == [0, 1, 2]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == sum(len(output.token_ids) for output in samples)


def test_a_sample_that_is_refused_refuses_the_request(client) -> None:
    for fields, word in (({"n": 0}, "n"), ({"n": 3, "top_p": -1.0}, "top_p"), ({"n": 100_000}, "n")):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=f"(?i){word}"):
                client.completions.create(prompt=PROMPT, stream=stream, **GREEDY | fields)


def test_what_speculation_did_comes_with_the_answer(client, offline) -> None:
    expected = alone(offline)
    verified = [step for step in expected.steps if step.num_candidates]
    streamed = list(client.completions.create(prompt=PROMPT, stream=True, **GREEDY))
    for answer in (client.completions.create(prompt=PROMPT, **GREEDY), streamed[-1]):
        found = answer.model_extra["metrics"]["speculative_decoding"]
        accepted = found["per_step_accepted"]
        assert found["num_spec_steps"] == len(accepted) == sum(found["acceptance_histogram"])
        # A prefix that is found in the cache rounds drafts otherwise, and one of them may be another.
        assert abs(len(accepted) - len(verified)) <= 2
        assert abs(found["num_draft_tokens"] - expected.num_draft_tokens) <= 2 * 7
        assert found["mean_acceptance_length"] == pytest.approx(expected.acceptance_length, rel=0.2)
        assert "nvext" not in answer.model_extra


def test_what_the_engine_tells_stays_where_a_client_has_asked_for_it(client) -> None:
    asked = {"nvext": {"extra_fields": ["engine_data"]}}
    answer = client.completions.create(prompt=PROMPT, extra_body=asked | {"prompt_logprobs": 1}, **GREEDY)
    found = answer.model_extra["nvext"]["engine_data"]
    assert found["metrics"] == answer.model_extra["metrics"]
    assert found["prompt_logprobs"] == answer.model_extra["prompt_logprobs"]
    assert len(found["prompt_logprobs"]) == answer.usage.prompt_tokens


@pytest.mark.parametrize("as_ids", [True, False])
def test_a_prompt_is_echoed_with_its_log_probabilities(client, offline, as_ids: bool) -> None:
    """As an evaluation harness asks: the text scored token by token, and the likeliest token at each place."""
    text = "def größe(x):\n    return"
    ids = [int(token_id) for token_id in offline.codec.encode(text)]
    sampling = SamplingParams(max_new_tokens=2, prompt_logprobs=1)
    (expected,) = offline.generate([ids], sampling)
    fields = {"max_tokens": 2, "temperature": 0, "echo": True, "model": "demo"}
    answer = client.completions.create(prompt=[ids] if as_ids else text, logprobs=1, **fields)
    (choice,) = answer.choices
    found = choice.logprobs
    assert choice.text == "".join(found.tokens) == text + expected.text
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(ids) + 2
    places = zip(found.text_offset, found.tokens, strict=True)
    assert all(choice.text.startswith(token, start) for start, token in places) and found.text_offset[-1] > 0
    first, *others = expected.prompt_logprobs
    assert first is None and (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    own, tops = found.token_logprobs[1 : len(ids)], found.top_logprobs[1 : len(ids)]
    assert own == pytest.approx([token.logprob for token in others], abs=1e-4)
    best = [token.top_logprobs[0].logprob for token in others]
    assert [max(top.values()) for top in tops] == pytest.approx(best, abs=1e-4)
    assert "prompt_logprobs" not in answer.model_extra and "prompt_tokens" not in answer.model_extra
    twice = client.completions.create(prompt=text, n=2, extra_body={"prompt_logprobs": 0}, **fields)
    assert [choice.text for choice in twice.choices] == [text + expected.text] * 2
    assert twice.choices[0].logprobs is None and len(twice.model_extra["prompt_logprobs"]) == len(ids)


def test_sixty_four_concurrent_streams_have_the_texts_of_the_engine(server, offline) -> None:
    prompts = [f"def function_{index}(x):\n" for index in range(64)]

    async def text(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(text(client, prompt) for prompt in prompts))

    expected = [output.text for output in offline.generate(prompts, SamplingParams(max_new_tokens=40))]
    assert asyncio.run(texts()) == expected
    assert all(server.metric("dflash_trt:requests_total", replica) for replica in range(2))  # both had work
