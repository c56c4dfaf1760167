"""What clients get from a real server: every transport, both contracts, tokens equal to the engine's own."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from typing import Any

import httpx
import numpy as np
import pytest

from dflash_trt import SamplingParams
from tests.triton_server.clients import (
    GrpcStream,
    as_list,
    counter,
    generate,
    grpc_fields,
    grpc_inputs,
    load,
    sse,
    stream,
    unload,
    until,
)

PROMPT = "def fibonacci(n):"


def reference(offline: Any, prompt: Any = PROMPT, **sampling: Any) -> Any:
    (output,) = offline.generate([prompt], SamplingParams(**sampling))
    assert output.error is None
    return output


def test_generate_gives_what_the_engine_gives(server, offline) -> None:
    expected = reference(offline, max_new_tokens=24)
    answer = generate(server, text_input=PROMPT, max_tokens=24)
    assert answer["status"] == 200
    assert answer["output_ids"] == list(expected.token_ids)
    assert answer["text_output"] == expected.text
    assert answer["finish_reason"] == "length"
    assert answer["num_input_tokens"] == expected.num_prompt_tokens
    assert answer["num_output_tokens"] == 24
    assert answer["total_draft_tokens"] == expected.num_draft_tokens
    assert answer["total_accepted_draft_tokens"] == expected.num_accepted_tokens
    assert answer["num_verify_steps"] == expected.num_verify_steps
    rate = expected.num_accepted_tokens / expected.num_draft_tokens
    assert answer["acceptance_rate"] == pytest.approx(rate, rel=1e-6)


def test_another_prompt_gives_other_tokens(server, offline) -> None:
    expected = reference(offline, max_new_tokens=24)
    assert generate(server, text_input="import os", max_tokens=24)["output_ids"] != list(expected.token_ids)


def test_a_stream_has_one_response_per_step(server, offline) -> None:
    expected = reference(offline, max_new_tokens=40)
    answer = stream(server, text_input=PROMPT, max_tokens=40, stream=True)
    assert [len(as_list(response["output_ids"])) for response in answer.responses] == [
        len(event.token_ids) for event in expected.steps
    ]
    assert answer.token_ids == list(expected.token_ids)
    assert answer.text == expected.text
    assert answer.last["finish_reason"] == "length"
    assert all("finish_reason" not in response for response in answer.responses[:-1])


def test_without_stream_the_streaming_endpoint_gives_one_response(server) -> None:
    assert len(stream(server, text_input=PROMPT, max_tokens=8).responses) == 1


def test_grpc_streams_the_same_tokens(server, offline, tritonclient) -> None:
    expected = reference(offline, max_new_tokens=24)
    connection = GrpcStream(tritonclient, server, text_input=PROMPT, max_tokens=24, stream=True)
    answer = connection.rest()
    connection.close()
    assert answer.token_ids == list(expected.token_ids)
    assert [response["is_final"] for response in answer.responses] == [False] * (len(expected.steps) - 1) + [True]


def test_the_asyncio_client_streams_the_same_tokens(server, offline, tritonclient) -> None:
    expected = reference(offline, max_new_tokens=24)
    fields = {"text_input": PROMPT, "max_tokens": 24, "stream": True}

    async def ask() -> list[int]:
        async with tritonclient.aio.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:

            async def requests():
                yield {"model_name": "dflash", "inputs": grpc_inputs(tritonclient.grpc, fields)}

            token_ids: list[int] = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                token_ids += grpc_fields(result)["output_ids"]
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
            return token_ids

    assert asyncio.run(ask()) == list(expected.token_ids)


def test_the_http_client_reads_the_model_and_its_tensors(server, tritonclient) -> None:
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}")
    metadata = client.get_model_metadata("dflash")
    names = {tensor["name"] for tensor in metadata["inputs"]}
    assert {"text_input", "max_tokens", "sampling_param_max_tokens"} <= names
    assert client.get_model_config("dflash")["model_transaction_policy"] == {"decoupled": True}
    client.close()


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"max_tokens": 12, "temperature": 0.75, "top_k": 20, "top_p": 0.5, "seed": 7}, None),
        (
            {
                "sampling_param_max_tokens": 12,
                "sampling_param_temperature": 0.75,
                "sampling_param_top_k": 20,
                "sampling_param_top_p": 0.5,
                "sampling_param_seed": 7,
            },
            None,
        ),
        (
            {"max_tokens": 12, "end_id": -1, "beam_width": 1, "repetition_penalty": 1.0, "pad_id": 5},
            {"ignore_eos": True},
        ),
        ({"max_tokens": 12, "top_p": 0.5, "seed": 3}, {"temperature": 1.0, "top_p": 0.5, "seed": 3}),
    ],
    ids=["bls", "llmapi", "neutral", "a filter samples"],
)
def test_both_contracts_sample_as_the_engine_does(server, offline, fields, sampling) -> None:
    if sampling is None:
        sampling = {"temperature": 0.75, "top_k": 20, "top_p": 0.5, "seed": 7}
    expected = reference(offline, max_new_tokens=12, **sampling)
    assert generate(server, text_input=PROMPT, **fields)["output_ids"] == list(expected.token_ids)


def test_a_seed_decides_what_is_sampled(server) -> None:
    texts = {
        generate(server, text_input=PROMPT, max_tokens=12, temperature=1.0, seed=seed)["text_output"]
        for seed in range(4)
    }
    assert len(texts) > 1


def test_parameters_of_the_generate_endpoint_are_inputs(server, offline) -> None:
    expected = reference(offline, max_new_tokens=6)
    answer = generate(server, text_input=PROMPT, parameters={"max_tokens": 6, "temperature": 0})
    assert answer["output_ids"] == list(expected.token_ids)


def test_token_ids_and_conversations_are_prompts(server, offline) -> None:
    ids = [40, 50, 60, 70]
    expected = reference(offline, {"prompt_token_ids": ids}, max_new_tokens=8)
    assert generate(server, input_ids=ids, max_tokens=8)["output_ids"] == list(expected.token_ids)
    messages = [{"role": "user", "content": "Hello"}]
    expected = reference(offline, {"messages": messages}, max_new_tokens=8)
    answer = generate(server, messages=json.dumps(messages), max_tokens=8)
    assert answer["output_ids"] == list(expected.token_ids)


def test_stop_strings_and_stop_tokens_end_a_text(server, offline) -> None:
    whole = reference(offline, max_new_tokens=40)
    stop_id = whole.token_ids[20]
    cut = reference(offline, max_new_tokens=40, stop_token_ids=(stop_id,))
    answer = generate(server, text_input=PROMPT, max_tokens=40, stop_token_ids=[stop_id], return_stop_reason=True)
    assert answer["output_ids"] == list(cut.token_ids)
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", str(stop_id))
    stop = next(text for token in whole.token_ids if (text := offline.codec.decode([token])).isprintable() and text)
    cut = reference(offline, max_new_tokens=40, stop=(stop,))
    for name in ("stop_words", "sampling_param_stop"):
        fields = {name: ["never this one", stop], "max_tokens": 40, "return_stop_reason": True}
        answer = generate(server, text_input=PROMPT, **fields)
        assert answer["text_output"] == cut.text
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)


def test_the_prompt_comes_first_where_asked_for(server, offline) -> None:
    prompt_ids = offline.codec.encode(PROMPT)
    expected = reference(offline, max_new_tokens=12)
    for name in ("exclude_input_in_output", "sampling_param_exclude_input_from_output"):
        answer = stream(server, text_input=PROMPT, max_tokens=12, stream=True, **{name: False})
        assert answer.text == PROMPT + expected.text
        assert answer.token_ids == [*prompt_ids, *expected.token_ids]


def test_log_probabilities_and_times_come_where_asked_for(server, offline) -> None:
    expected = reference(offline, max_new_tokens=12, logprobs=True)
    answer = generate(
        server,
        text_input=PROMPT,
        max_tokens=12,
        return_log_probs=True,
        return_cumulative_logprob=True,
        return_perf_metrics=True,
    )
    assert answer["output_log_probs"] == pytest.approx(expected.logprobs, rel=1e-4)
    assert answer["cum_log_probs"] == pytest.approx(sum(expected.logprobs), rel=1e-4)
    assert answer["cumulative_logprob"] == answer["cum_log_probs"]
    times = [answer[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)
    assert times[-1] - times[0] < 60e9
    plain = generate(server, text_input=PROMPT, max_tokens=12)
    assert not {"output_log_probs", "cum_log_probs", "arrival_time_ns"} & plain.keys()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "exactly one of the inputs text_input, messages, input_ids, found none"),
        ({"text_input": PROMPT, "input_ids": [1]}, "found text_input and input_ids"),
        ({"text_input": PROMPT, "max_tokenz": 5}, "'max_tokenz': expected a known one"),
        ({"text_input": PROMPT, "max_tokens": 0}, "max_new_tokens: expected an integer of 1 or more"),
        ({"text_input": PROMPT, "temperature": -1.0}, "temperature: expected 0 (greedy) to"),
        ({"text_input": PROMPT, "beam_width": 4}, "'beam_width': expected nothing"),
        ({"text_input": PROMPT, "max_tokens": 4, "sampling_param_max_tokens": 5}, "'max_tokens' and 'sampling_param"),
        ({"text_input": "x" * 3000}, f"at most {2047} tokens"),
        ({"input_ids": [1, 999]}, "prompt token: expected an integer from 0 to 271, found 999"),
        ({"messages": "no JSON"}, "input 'messages': expected a JSON list"),
        ({"messages": '[{"role": "nobody", "content": ""}]'}, "unknown role nobody"),
        ({"text_input": PROMPT, "stop": True}, "request id ''"),
    ],
)
def test_a_wrong_request_is_refused_by_name_and_alone(server, fields, said) -> None:
    refused = counter(server, "requests_total", finish_reason="refused")
    with sse(server, text_input=PROMPT, max_tokens=200, stream=True) as running:
        next(running)
        answer = generate(server, **fields)
        assert 400 <= answer["status"] < 500
        assert said in answer["error"]
        assert next(running)["output_ids"]
    until(lambda: counter(server, "requests_total", finish_reason="refused") == refused + 1, "the refusal is counted")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"id": "\xff", "text_input": "x"}', "request: expected UTF-8 text, found b'{"),
        (b'{"id": "\xff", "stop": true}', "request: expected UTF-8 text"),
        (b'{"text_input": "x", "\xff": 1}', "request: expected UTF-8 text"),
        (b'{"text_input": "\xff"}', "input 'text_input': expected UTF-8 text"),
        (b'{"text_input": "x", "parameters": {"cache_salt": "\xed\xa0\x80"}}', "input 'cache_salt': expected UTF-8"),
    ],
)
def test_bytes_that_are_no_text_are_a_refusal_and_no_failure_of_the_model(server, body, said) -> None:
    refused = counter(server, "requests_total", finish_reason="refused")
    answer = httpx.post(f"{server.url}/v2/models/dflash/generate", content=body, timeout=30)
    assert answer.status_code == 400
    assert said in answer.json()["error"]
    assert "Traceback" not in answer.text and "model.py" not in answer.text
    until(lambda: counter(server, "requests_total", finish_reason="refused") == refused + 1, "the refusal is counted")


def test_grpc_errors_have_their_message_and_status(server, tritonclient) -> None:
    connection = GrpcStream(tritonclient, server, text_input=PROMPT, top_p=7.0)
    with pytest.raises(Exception, match=r"top_p: expected a number in \(0, 1\], found 7"):
        connection.next()
    connection.close()


def test_unknown_tensors_are_refused_by_name(server, tritonclient) -> None:
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
    errors: list[Any] = []
    client.start_stream(lambda result, error: errors.append(error))
    array = np.array([b"x"], dtype=np.object_)
    tensors = []
    for name in ("text_input", "lora_name"):
        tensor = tritonclient.grpc.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    client.async_stream_infer("dflash", tensors)
    until(lambda: bool(errors), "an answer")
    client.stop_stream()
    client.close()
    assert "lora_name" in str(errors[0])


def test_stop_ends_the_request_of_the_same_id(server, tritonclient) -> None:
    connection = GrpcStream(tritonclient, server, text_input=PROMPT, max_tokens=2000, stream=True, request_id="mine")
    connection.next()
    other = GrpcStream(tritonclient, server, stop=True, request_id="another")
    with pytest.raises(Exception, match="the id of a running request"):
        other.next()
    other.close()
    assert generate(server, id="mine", stop=True)["finish_reason"] == "cancelled"
    assert connection.rest().last["finish_reason"] == "cancelled"
    connection.close()


def test_a_full_queue_refuses_alone_and_the_others_finish(server, tritonclient) -> None:
    """`narrow` runs one request and lets one wait."""
    assert load(server, "narrow") is None
    running = GrpcStream(tritonclient, server, "narrow", text_input=PROMPT, max_tokens=2000, stream=True, end_id=-1)
    running.next()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(generate, server, "narrow", text_input=PROMPT, max_tokens=9) for _ in range(4)]
        refused = [answer.result() for answer in islice(as_completed(asked), 3)]
        running.cancel()
        answers = [answer.result() for answer in asked]
    assert all("fewer than 1 waiting requests" in answer["error"] for answer in refused)
    assert sum(answer["status"] == 200 and answer["num_output_tokens"] == 9 for answer in answers) == 1
    until(lambda: counter(server, "pages_in_use", "narrow") == 0, "all pages are free")
    unload(server, "narrow")


def test_a_batch_dimension_and_a_chat_template(server, offline, tritonclient) -> None:
    assert load(server, "chat") is None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = reference(offline, {"messages": messages}, max_new_tokens=8)
    connection = GrpcStream(
        tritonclient, server, "chat", text_input="Hello", max_tokens=8, stream=True, has_batch_dimension=True
    )
    assert connection.rest().token_ids == list(expected.token_ids)
    connection.close()
    assert as_list(generate(server, "chat", text_input="Hello", max_tokens=8)["output_ids"]) == list(expected.token_ids)
    unload(server, "chat")
