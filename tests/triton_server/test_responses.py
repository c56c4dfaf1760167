"""Which number of a finished request becomes which output: each of them has a value of its own here."""

import time
from dataclasses import replace
from typing import Any

import pytest

from dflash_trt.core.logprobs import PromptLogprob, TokenLogprob
from dflash_trt.core.request import GenerationOutput, RequestStatistics, SamplingParams
from dflash_trt.servers.triton.request_reader import Order
from dflash_trt.servers.triton.responses import ResponseMaker
from dflash_trt.servers.triton.tensors import OUTPUTS
from dflash_trt.serving.output_processor import StreamChunk

OUTPUT = GenerationOutput(
    request_id="r",
    text="four",
    token_ids=(21, 22, 23, 24),
    logprobs=(-0.5, -0.25, -0.125, -0.125),
    finish_reason="length",
    num_prompt_tokens=16,
    num_verify_steps=2,
    num_draft_tokens=8,
    num_accepted_tokens=3,
    num_emitted_by_verify=5,
    time_to_first_token_s=1.5,
    total_s=9.5,
    statistics=RequestStatistics(queue_time_s=0.25, num_prefix_hit_tokens=12),
)
SCORED = replace(
    OUTPUT,
    top_logprobs=tuple((TokenLogprob(20 + i, -0.5), TokenLogprob(i, -1.5)) for i in range(4)),
    prompt_logprobs=(None, PromptLogprob(2, -3.0, (TokenLogprob(9, -0.75),))),
)
ALL_FLAGS = frozenset({"return_log_probs", "return_cumulative_logprob", "return_stop_reason", "return_perf_metrics"})
_SECOND_NS = 1_000_000_000


def make(asked: frozenset[str] = frozenset(), sampling: SamplingParams | None = None, **options: Any) -> ResponseMaker:
    order = Order(prompt={"prompt": "x"}, sampling=sampling or SamplingParams(), asked=asked, **options)
    return ResponseMaker(
        order=order, prompt_token_ids=(1, 2), prompt_text="ab", decode=lambda ids: "four!!", arrived_ns=5 * _SECOND_NS
    )


def last(maker: ResponseMaker, output: GenerationOutput = OUTPUT) -> dict[str, Any]:
    """The response to a request that does not stream: all tokens came in one chunk."""
    chunk = StreamChunk(text=output.text, token_ids=output.token_ids, logprobs=output.logprobs, output=output)
    arrays = maker.response(chunk)
    assert arrays is not None
    return {name: array.tolist() for name, array in arrays.items()}


def test_every_output_has_its_own_value() -> None:
    found = last(make(ALL_FLAGS, SamplingParams(logprobs=True, top_logprobs=2, prompt_logprobs=1)), SCORED)
    last_token_ns = found.pop("last_token_time_ns")[0]
    assert last_token_ns >= found["first_token_time_ns"][0]
    assert found == {
        "text_output": [b"four"],
        "output_ids": [21, 22, 23, 24],
        "output_log_probs": [[-0.5, -0.25, -0.125, -0.125]],
        "cum_log_probs": [-1.0],
        "cumulative_logprob": [-1.0],
        "finish_reason": [b"length"],
        "stop_reason": [b""],
        "num_input_tokens": [16],
        "num_output_tokens": [4],
        "acceptance_rate": [0.375],
        "total_accepted_draft_tokens": [3],
        "total_draft_tokens": [8],
        "num_verify_steps": [2],
        "acceptance_length": [2.5],
        "kv_cache_hit_rate": [0.75],
        "arrival_time_ns": [5 * _SECOND_NS],
        "first_scheduled_time_ns": [5 * _SECOND_NS + _SECOND_NS // 4],
        "first_token_time_ns": [5 * _SECOND_NS + 3 * _SECOND_NS // 2],
        "batch_index": [0],
        "sequence_index": [0],
        "output_top_token_ids": [[20, 0], [21, 1], [22, 2], [23, 3]],
        "output_top_log_probs": [[-0.5, -1.5]] * 4,
        "prompt_log_probs": [-3.0],
        "prompt_top_token_ids": [[9]],
        "prompt_top_log_probs": [[-0.75]],
    }
    assert {*found, "last_token_time_ns"} == {output.name for output in OUTPUTS}


def test_arrays_are_of_the_declared_types() -> None:
    maker = make(ALL_FLAGS, SamplingParams(logprobs=True, top_logprobs=2, prompt_logprobs=1))
    arrays = maker.response(StreamChunk(text="", token_ids=(), output=SCORED))
    assert arrays is not None
    names = {"STRING": "object", "INT32": "int32", "INT64": "int64", "FP32": "float32"}
    for output in OUTPUTS:
        found = arrays[output.name]
        assert (found.dtype.name, found.ndim) == (names[output.type], len(output.dims)), output.name


@pytest.mark.parametrize("flag", [None, *sorted(ALL_FLAGS)])
def test_what_must_be_asked_for_comes_with_its_flag_alone(flag: str | None) -> None:
    found = last(make(frozenset({flag} if flag else ())))
    assert found.keys() == {output.name for output in OUTPUTS if output.asked_by in (None, flag)}


def test_the_finish_reason_can_be_declined() -> None:
    assert "finish_reason" not in last(make(gives_finish_reason=False))


def test_a_request_without_tokens_or_drafts_has_zeros() -> None:
    empty = replace(
        OUTPUT, text="", token_ids=(), logprobs=(), num_verify_steps=0, num_draft_tokens=0, num_accepted_tokens=0
    )
    found = last(make(ALL_FLAGS), replace(empty, finish_reason="cancelled"))
    for name in ("acceptance_rate", "acceptance_length", "first_token_time_ns", "last_token_time_ns", "cum_log_probs"):
        assert found[name] == [0], name
    assert found["output_ids"] == []
    assert found["stop_reason"] == [b""]


def test_log_probabilities_and_times_add_up_over_the_chunks_of_a_stream() -> None:
    maker = make(ALL_FLAGS, streams=True)
    for logprob in (-0.5, -0.25):
        maker.response(StreamChunk(text="", token_ids=(3,), logprobs=(logprob,)))
    before_ns = time.monotonic_ns()
    late = replace(OUTPUT, time_to_first_token_s=0.0)
    arrays = maker.response(StreamChunk(text="", token_ids=(4,), logprobs=(-0.25,), output=late))
    assert arrays is not None
    assert arrays["cum_log_probs"].tolist() == arrays["cumulative_logprob"].tolist() == [-1.0]
    assert arrays["output_log_probs"].tolist() == [[-0.25]]
    assert arrays["last_token_time_ns"][0] >= before_ns
    assert arrays["first_token_time_ns"].tolist() == [5 * _SECOND_NS]


@pytest.mark.parametrize(
    ("stop", "decoded", "reason"),
    [((), "four!!", b"24"), (("!!", "!"), "four!!", b"!"), (("ur", "!"), "four!!", b"!"), (("?",), "four!!", b"24")],
)
def test_the_stop_reason_is_the_string_that_cut_the_text_or_the_last_token(stop, decoded, reason) -> None:
    """A shorter string is found before a longer one that begins with it."""
    order = Order(prompt="x", sampling=SamplingParams(stop=stop), asked=frozenset({"return_stop_reason"}))
    maker = ResponseMaker(order=order, prompt_token_ids=(), prompt_text="", decode=lambda ids: decoded)
    assert last(maker, replace(OUTPUT, finish_reason="stop"))["stop_reason"] == [reason]


def test_the_prompt_comes_once_and_first_where_it_is_echoed() -> None:
    maker = make(streams=True, echoes_prompt=True)
    first = maker.response(StreamChunk(text="c", token_ids=(3,)))
    second = maker.response(StreamChunk(text="d", token_ids=(4,)))
    assert first is not None and second is not None
    assert (first["text_output"].tolist(), first["output_ids"].tolist()) == ([b"abc"], [1, 2, 3])
    assert (second["text_output"].tolist(), second["output_ids"].tolist()) == ([b"d"], [4])
