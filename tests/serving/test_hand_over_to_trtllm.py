"""What reaches TensorRT-LLM of a request and of the settings, field by field, and what a lost link leaves behind."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dflash_trt.core.errors import QueueFullError, RequestError
from dflash_trt.core.request import Request
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.sampling import SAMPLING_FIELDS, SamplingParams
from dflash_trt.engine_dir import EngineLimits
from dflash_trt.serving.tensorrt_llm import settings
from dflash_trt.serving.tensorrt_llm.engine import TensorRTLLMEngine
from dflash_trt.serving.tensorrt_llm.link import OnAnswer, OnLost
from dflash_trt.serving.tensorrt_llm.sampling import trtllm_params

LIMITS = EngineLimits(max_batch_size=2, max_seq_len=64, max_num_tokens=64, max_draft_len=3, page_size=32)

# Another value of each parameter, and the field of TensorRT-LLM that has it; None where the parameter is refused. A new
# parameter belongs here.
SENT: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "max_new_tokens": (5, {"max_tokens": 5}),
    "temperature": (0.5, {"temperature": 0.5}),
    "top_k": (3, {"top_k": 3}),
    "top_p": (0.5, {"top_p": 0.5}),
    "min_p": (0.25, {"min_p": 0.25}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "presence_penalty": (0.5, {"presence_penalty": 0.5}),
    "frequency_penalty": (0.75, {"frequency_penalty": 0.75}),
    "min_tokens": (4, {"min_tokens": 4}),
    "logit_bias": ({7: 1.0}, None),
    "bad_words": (("a",), None),
    "logprobs": (True, None),
    "top_logprobs": (2, None),
    "prompt_logprobs": (0, None),
    "json_schema": ("{}", None),
    "regex": ("a", None),
    "choice": (("a", "b"), None),
    "grammar": ("start: A", None),
    # Done here: a request is resolved before it is sent, and its text is made of the tokens.
    "seed": (3, {}),
    "stop": (("a",), {}),
    "stop_token_ids": ((4,), {}),
    "ignore_eos": (True, {}),
    "n": (2, {}),
}
REQUEST_FIELDS: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "seed": (11, {"seed": 11}),
    "stop_token_ids": (frozenset({9, 4}), {"stop_token_ids": [4, 9]}),
    "priority": (1, None),
    "queue_timeout_s": (1.0, None),
}
# Sent as they are, of a sampling parameter above, or of caches and samples that TensorRT-LLM is not asked for.
OTHER_REQUEST_FIELDS = {"request_id", "prompt_token_ids", "sampling", "bad_word_ids", "is_reproducible"}
OTHER_REQUEST_FIELDS |= {"cache_salt", "sample_index", "shares_prompt_of", "constraint"}


class RecordingLink:
    """Answers nothing."""

    def __init__(self, error: OSError | None = None) -> None:
        self.sent: list[Mapping[str, Any]] = []
        self.cancelled: list[str] = []
        self.error = error

    def start(self, on_answer: OnAnswer, on_lost: OnLost) -> None: ...

    def send(self, request_id: str, prompt: Sequence[int], params: Mapping[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(params)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def close(self) -> None: ...


def request(name: str = "a", **fields: Any) -> Request:
    sampling = fields.pop("sampling", {})
    return Request(request_id=name, prompt_token_ids=(1, 2, 3), sampling=SamplingParams(**sampling), **fields)


def params_of(given: Request) -> dict[str, Any]:
    return trtllm_params(given, max_seq_len=64, has_drafter=False)


def test_every_sampling_parameter_reaches_tensorrt_llm_or_is_refused() -> None:
    assert set(SENT) == {row.name for row in SAMPLING_FIELDS}
    plain = params_of(request())
    for name, (value, expected) in SENT.items():
        given = request(sampling={name: value} | ({"logprobs": True} if name == "top_logprobs" else {}))
        if expected is None:
            with pytest.raises(RequestError, match=f"sampling {name}: expected"):
                params_of(given)
        else:
            assert params_of(given) == plain | expected, name


def test_every_field_of_a_request_reaches_tensorrt_llm_or_is_refused() -> None:
    assert set(REQUEST_FIELDS) | OTHER_REQUEST_FIELDS == {field.name for field in dataclasses.fields(Request)}
    plain = params_of(request())
    for name, (value, expected) in REQUEST_FIELDS.items():
        if expected is None:
            with pytest.raises(RequestError, match=f"{name}: expected"):
                params_of(request(**{name: value}))
        else:
            assert params_of(request(**{name: value})) == plain | expected, name


# Another value of each setting that TensorRT-LLM does not have, for an engine that is not open yet.
REFUSED_SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "adaptive_draft_length": True,
    "draft_length": {1: 2},
    "draft_length_by_context": {1: 2},
    "draft_window": 8,
    "num_state_snapshots": 2,
    "deterministic": True,
    "num_threads": 2,
    "plugin_library": "library.so",
}
ARGUMENTS = {"use_drafter", "num_draft_tokens", "overlap_scheduling", "kv_cache_bytes", "kv_cache_free_memory_fraction"}
OURS = {"max_queue_len", "seed", "enable_prefix_caching"}  # prefix caching is always off


def test_every_setting_is_used_or_refused() -> None:
    assert set(REFUSED_SETTINGS) | ARGUMENTS | OURS == set(RuntimeConfig.model_fields)
    for name, value in REFUSED_SETTINGS.items():
        config = RuntimeConfig().model_copy(update={name: value})
        (found,) = settings._problems(config, is_running=False)
        assert found.startswith(f"{name}: expected")
    for name in ARGUMENTS:
        config = RuntimeConfig().model_copy(update={name: 0.5})
        assert [line.split(":")[0] for line in settings._problems(config, is_running=True)] == [name]
        assert list(settings._problems(config, is_running=False)) == []


def test_the_queue_is_limited_beside_the_requests_that_run() -> None:
    engine = TensorRTLLMEngine(RecordingLink(), LIMITS, RuntimeConfig(max_queue_len=1))
    streams = [engine.submit(request(name)) for name in "abc"]  # two run, one waits
    with pytest.raises(QueueFullError):
        engine.submit(request("d"))
    streams[0].cancel()
    engine.submit(request("d"))
    engine.close()


def test_a_request_that_cannot_be_sent_is_not_waited_for() -> None:
    link = RecordingLink(BrokenPipeError("gone"))
    engine = TensorRTLLMEngine(link, LIMITS, RuntimeConfig())
    with pytest.raises(RequestError, match="the engine has failed: gone"):
        engine.submit(request("a"))
    assert engine.statistics().num_running_now == 0
    link.error = None
    engine.submit(request("a")).cancel()  # its name is free
    engine.close(drains=True)
    assert link.cancelled == ["a"]
