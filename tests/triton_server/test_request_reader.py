"""Requests as arrays: what they mean, and what is refused."""

import json
import math
from typing import Any

import numpy as np
import pytest

from dflash_trt.core.errors import RequestError
from dflash_trt.core.sampling import SamplingParams
from dflash_trt.servers.triton.request_reader import CancelOrder, Order, read_request
from dflash_trt.servers.triton.settings import ModelSettings
from dflash_trt.servers.triton.tensors import INPUTS, INPUTS_BY_NAME

SETTINGS = ModelSettings(engine_dir="engine", default_max_tokens=17)
_DTYPES = {"STRING": np.object_, "BOOL": np.bool_, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64}


def arrays(**fields: Any) -> dict[str, Any]:
    found = {}
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        encoded = [item.encode() if isinstance(item, str) else item for item in values]
        found[name] = np.array(encoded, dtype=_DTYPES[INPUTS_BY_NAME[name].type])
    return found


def read(parameters: str = "", settings: ModelSettings = SETTINGS, **fields: Any) -> Order:
    order = read_request(arrays(**fields), parameters, settings)
    assert isinstance(order, Order)
    return order


def test_what_is_not_said_is_the_default() -> None:
    order = read(text_input="Hi")
    assert order.prompt == {"prompt": "Hi"}
    assert order.sampling.max_new_tokens == 17
    assert order.sampling.temperature == 0.0
    assert not order.streams
    assert not order.echoes_prompt


def test_both_contracts_mean_the_same() -> None:
    bls = read(
        text_input="Hi",
        max_tokens=9,
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        seed=2**40,
        stop_words=["a", "b"],
        stream=True,
    )
    llmapi = read(
        text_input="Hi",
        sampling_param_max_tokens=9,
        sampling_param_temperature=0.5,
        sampling_param_top_k=4,
        sampling_param_top_p=0.25,
        sampling_param_seed=2**40,
        sampling_param_stop=["a", "b"],
        streaming=True,
    )
    assert bls == llmapi
    assert bls.sampling.stop == ("a", "b")
    assert bls.sampling.seed == 2**40
    assert read(text_input="Hi", max_tokens=10, temperature=0.5) != bls


def test_plain_text_becomes_a_conversation_where_the_model_is_told_to_chat() -> None:
    user = {"role": "user", "content": "Hi"}
    for system, messages in ((None, [user]), ("Be brief.", [{"role": "system", "content": "Be brief."}, user])):
        settings = ModelSettings(engine_dir="engine", wraps_in_chat=True, system=system)
        order = read("", settings, text_input="Hi")
        assert (order.prompt, order.text, order.is_conversation) == ({"messages": messages}, None, True)
        assert read("", settings, input_ids=[4, 2]).prompt == {"prompt_token_ids": (4, 2)}
        assert read("", settings, messages="[]").prompt == {}


def test_messages_and_template_options_are_parsed_when_they_are_needed() -> None:
    order = read(messages='[{"role": "user", "content": "Hi"}]', chat_template_kwargs='{"thinks": false}')
    assert order.is_conversation and not read(text_input="Hi").is_conversation
    assert order.parsed_prompt() == {
        "messages": [{"role": "user", "content": "Hi"}],
        "chat_template_kwargs": {"thinks": False},
    }
    for fields, said in (
        ({"messages": "{"}, "input 'messages': expected a JSON list"),
        ({"messages": "[]", "chat_template_kwargs": "{"}, "input 'chat_template_kwargs': expected a JSON object"),
    ):
        with pytest.raises(RequestError, match=said):
            read(**fields).parsed_prompt()


def test_flags_that_ask_for_outputs_are_those_that_are_set() -> None:
    order = read(text_input="Hi", return_log_probs=False, return_cumulative_logprob=True, exclude_input_in_output=True)
    assert order.asked == {"return_cumulative_logprob"}
    assert order.sampling.logprobs and not order.echoes_prompt and order.gives_finish_reason


def test_empty_stop_words_are_none() -> None:
    assert read(text_input="Hi", stop_words=["", "a"]).sampling.stop == ("a",)


def test_a_batch_dimension_changes_nothing() -> None:
    flat = arrays(text_input="Hi", stop_words=["a", "b"], max_tokens=3)
    batched = {name: array[np.newaxis] for name, array in flat.items()}
    assert read_request(flat, "", SETTINGS) == read_request(batched, "", SETTINGS)


def test_a_filter_without_a_temperature_samples() -> None:
    assert read(text_input="Hi", top_p=0.5).sampling.temperature == 1.0
    assert read(text_input="Hi", top_k=1).sampling.temperature == 0.0
    assert read(text_input="Hi", min_p=0.5).sampling.temperature == 1.0
    assert read(text_input="Hi", top_p=1.0, min_p=0.0, top_k=0).sampling.temperature == 0.0
    assert read(text_input="Hi", top_p=0.5, temperature=0.0).sampling.temperature == 0.0


def test_end_id_stops_beside_the_ids_that_stop() -> None:
    sampling = read(text_input="Hi", end_id=7, stop_token_ids=[4, 5]).sampling
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((4, 5, 7), True)


@pytest.mark.parametrize(("end_id", "stops", "ignores"), [(-1, (), True), (7, (7,), True), (None, (), False)])
def test_end_id_takes_the_place_of_the_models_own(end_id, stops, ignores) -> None:
    fields = {} if end_id is None else {"end_id": end_id}
    sampling = read(text_input="Hi", **fields).sampling
    assert (sampling.stop_token_ids, sampling.ignore_eos) == (stops, ignores)


def test_parameters_are_inputs_and_what_triton_adds_is_not() -> None:
    settings = ModelSettings(engine_dir="engine", accepted_request_parameters=("x-trace",))
    assert read('{"max_tokens": 3, "x-trace": "1"}', settings, text_input="Hi").sampling.max_new_tokens == 3
    order = read('{"max_tokens": 3, "temperature": 1, "id": "x", "stop_words": "a"}', text_input="Hi")
    assert (order.sampling.max_new_tokens, order.sampling.temperature, order.sampling.stop) == (3, 1, ("a",))
    assert read('{"x-trace": "1"}', settings, text_input="Hi") == Order(
        prompt={"prompt": "Hi"}, text="Hi", sampling=read("", settings, text_input="Hi").sampling
    )


def test_what_triton_adds_to_a_request_is_no_input() -> None:
    plain = read(text_input="Hi")
    for name in ("id", "sequence_id", "sequence_start", "sequence_end", "binary_data_output", "triton_final_response"):
        assert read(json.dumps({name: 1}), text_input="Hi") == plain
    assert read('{"triton_enable_empty_final_response": true}', text_input="Hi") == plain


@pytest.mark.parametrize(
    ("parameters", "fields", "said"),
    [
        ('{"x-trace": "1"}', {"text_input": "Hi"}, "input 'x-trace': expected a known one"),
        ('{"max_tokens": "3"}', {"text_input": "Hi"}, "input 'max_tokens': expected INT32 as its JSON type, found '3'"),
        ('{"max_tokens": true}', {"text_input": "Hi"}, "input 'max_tokens': expected INT32"),
        ('{"max_tokens": 4}', {"text_input": "Hi", "max_tokens": 3}, "input 'max_tokens', given twice: expected equal"),
        ("", {"text_input": "Hi", "stream": True, "streaming": False}, "inputs 'stream' and 'streaming'"),
        ("", {"text_input": ["a", "b"]}, "input 'text_input': expected exactly one value"),
        ("", {"text_input": b"\xff"}, "input 'text_input': expected UTF-8 text"),
        ("", {"text_input": "Hi", "end_id": 3, "ignore_eos": False}, "inputs 'end_id' and 'ignore_eos'"),
        ("", {"text_input": "Hi", "end_id": 3, "ignore_eos": True}, "inputs 'end_id' and 'ignore_eos'"),
        ("", {"text_input": "Hi", "end_id": -1, "ignore_eos": False}, "inputs 'end_id' and 'ignore_eos'"),
        ("", {"text_input": "Hi", "return_context_logits": True}, "input 'return_context_logits': expected nothing"),
        ("", {"text_input": "Hi", "queue_timeout_s": math.nan}, "input 'queue_timeout_s': expected 0 or more"),
        ("", {"text_input": "Hi", "messages": "[]"}, "exactly one of the inputs text_input, messages, input_ids"),
        ("", {"text_input": "Hi", "length_penalty": 0.5}, "input 'length_penalty': expected nothing"),
        ("", {"text_input": "Hi", "logit_bias": ["7"]}, "logit_bias: expected biases from -100 to 100 by token id"),
        ("", {"text_input": "Hi", "queue_timeout_s": -1.0}, "input 'queue_timeout_s': expected 0 or more"),
        ("", {"text_input": "Hi", "seed": 2**64 - 1}, "seed: expected an integer from 0 to"),
        ("", {"max_tokens": 3}, "exactly one of the inputs text_input, messages, input_ids, found none"),
    ],
)
def test_what_is_wrong_is_refused_by_name(parameters, fields, said) -> None:
    with pytest.raises(RequestError) as refusal:
        read(parameters, **fields)
    assert said in str(refusal.value)


def test_all_problems_come_in_one_error() -> None:
    with pytest.raises(RequestError, match="3 problems") as refusal:
        read('{"max_tokenz": 3}', text_input="Hi", beam_width=2, top_k=1, sampling_param_top_k=2)
    for name in ("'max_tokenz'", "'beam_width'", "'top_k' and 'sampling_param_top_k'"):
        assert name in str(refusal.value)


def test_a_long_wrong_value_is_shown_in_part() -> None:
    with pytest.raises(RequestError) as refusal:
        read(text_input="Hi", logit_bias="x" * 10_000)
    assert "xxx..." in str(refusal.value) and len(str(refusal.value)) < 300


def test_penalties_and_bans_come_under_the_names_of_both_contracts() -> None:
    expected = SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25, min_tokens=2, max_new_tokens=16)
    names = {"presence_penalty": 0.5, "frequency_penalty": -0.25}
    llmapi = {f"sampling_param_{name}": value for name, value in names.items()}
    for given in (names, llmapi):
        order = read('{"max_tokens": 16}', text_input="Hi", min_tokens=2, **given)
        assert isinstance(order, Order) and order.sampling == expected
    order = read("", text_input="Hi", bad_words=["", "x"], logit_bias=["7=-1", "3=2.5"], repetition_penalty=1.5)
    assert isinstance(order, Order)
    assert (order.sampling.bad_words, order.sampling.logit_bias) == (("x",), ((3, 2.5), (7, -1.0)))
    assert order.sampling.repetition_penalty == 1.5


def test_stop_is_no_request_for_text() -> None:
    assert read_request(arrays(stop=True), "", SETTINGS) == CancelOrder()
    assert isinstance(read_request(arrays(stop=False, text_input="Hi"), "", SETTINGS), Order)


def test_every_input_of_the_table_is_read() -> None:
    """An input that the reader forgot would be accepted and ignored."""
    plain = read(text_input="Hi")
    values: dict[str, Any] = {"messages": '[{"role": "user", "content": "Hi"}]', "input_ids": [1], "end_id": 3}
    values |= {"exclude_input_in_output": False, "sampling_param_exclude_input_from_output": False}
    values |= {"return_finish_reason": False, "logit_bias": "3=1.5", "json_schema": '{"type": "null"}'}
    by_type: dict[str, Any] = {"STRING": "x", "BOOL": True, "INT32": 5, "FP32": 0.5, "UINT64": 5}
    ignored, refused = [], []
    for tensor in INPUTS:
        if tensor.name in ("text_input", "stop"):
            continue
        value = values.get(tensor.name, by_type[tensor.type])
        text = {} if tensor.field in ("messages", "input_ids") else {"text_input": "Hi"}
        try:
            if read(**text, **{tensor.name: value}) == plain:
                ignored.append(tensor.name)
        except RequestError:
            refused.append(tensor.name)
    assert refused == [tensor.name for tensor in INPUTS if tensor.neutral is not None]
    assert ignored == ["pad_id"]
