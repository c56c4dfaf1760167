"""What reaches TensorRT-LLM of a request and of the settings, field by field, and what a lost link leaves behind."""

import dataclasses
import gc
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.core.constraint import ConstraintError
from dflash_trt.core.errors import QueueFullError, RequestError
from dflash_trt.core.logprobs import TokenLogprob
from dflash_trt.core.request import Request
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.sampling import SAMPLING_FIELDS, SamplingParams
from dflash_trt.engine_dir import EngineLimits
from dflash_trt.serving.tensorrt_llm import server, settings
from dflash_trt.serving.tensorrt_llm.engine import TensorRTLLMEngine
from dflash_trt.serving.tensorrt_llm.link import Answer, OnAnswer, OnLost
from dflash_trt.serving.tensorrt_llm.process import WorkerProcess
from dflash_trt.serving.tensorrt_llm.sampling import Abilities, trtllm_params
from dflash_trt.serving.tensorrt_llm.server import Server
from tests.serving.trtllm_stand_in.tensorrt_llm import KNOWN

LIMITS = EngineLimits(max_batch_size=2, max_seq_len=64, max_num_tokens=64, max_draft_len=3, page_size=32)

ABILITIES = Abilities(vocab_size=100, has_drafter=False)
WHITE_SPACE = r'{"whitespace_pattern": "[\\x20\\x0A\\x0D\\x09]{1,32}"}'

# Another value of each parameter, and the field of TensorRT-LLM that has it; None where the parameter is refused. A new
# parameter belongs here.
SENT: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "max_new_tokens": (5, {"max_tokens": 5}),
    "temperature": (0.5, {"temperature": 0.5}),
    "top_k": (3, {"top_k": 3}),
    "top_p": (0.5, {"top_p": 0.5}),
    "min_p": (0.25, {"min_p": 0.25}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "presence_penalty": (0.5, {"presence_penalty": 0.5, "prompt_ignore_length": 3}),
    "frequency_penalty": (0.75, {"frequency_penalty": 0.75, "prompt_ignore_length": 3}),
    "min_tokens": (4, {"min_tokens": 4, "end_id": 9}),
    "logit_bias": ({7: 1.0}, {"embedding_bias": {"vocab_size": 100, "biases": {"7": 1.0}}}),
    "bad_words": (("a", " b"), {"bad": ["a", " a", "b", " b"]}),
    "logprobs": (True, {"logprobs": 0}),
    "top_logprobs": (2, {"logprobs": 2}),
    "prompt_logprobs": (0, {"prompt_logprobs": 0}),
    "json_schema": ('{"a": 1}', {"guided_decoding": {"json": '{"a": 1, "x-guidance": ' + WHITE_SPACE + "}"}}),
    "regex": ("a", {"guided_decoding": {"regex": "a"}}),
    "choice": (("a", 'b"'), {"guided_decoding": {"grammar": 'start: "a" | "b\\""'}}),
    "grammar": ("start: A", {"guided_decoding": {"grammar": "start: A"}}),
    # Done here: a request is resolved before it is sent, and its text is made of the tokens.
    "seed": (3, {}),
    "stop": (("a",), {}),
    "stop_token_ids": ((4,), {}),
    "ignore_eos": (True, {}),
    "n": (2, {}),
}
REQUEST_FIELDS: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "seed": (11, {"seed": 11}),
    "stop_token_ids": (frozenset({14, 4}), {"stop_token_ids": [4, 14]}),
    "priority": (1, None),
    "queue_timeout_s": (1.0, None),
    "reports_drafts": (True, None),
}
# Sent as they are, of a sampling parameter above, or of caches and samples that TensorRT-LLM is not asked for.
OTHER_REQUEST_FIELDS = {"request_id", "prompt_token_ids", "sampling", "bad_word_ids", "is_reproducible"}
OTHER_REQUEST_FIELDS |= {"cache_salt", "sample_index", "shares_prompt_of", "constraint"}


class RecordingLink:
    """Answers what a test says."""

    refused: Mapping[str, str] = {}

    def __init__(self, error: OSError | None = None) -> None:
        self.sent: list[Mapping[str, Any]] = []
        self.cancelled: list[str] = []
        self.error = error
        self.is_closed = False

    def start(self, on_answer: OnAnswer, on_lost: OnLost) -> None:
        self.answer, self.lose = on_answer, on_lost

    def send(self, request_id: str, prompt: Sequence[int], params: Mapping[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(params)

    def cancel(self, request_id: str) -> None:
        if self.error is not None:
            raise self.error
        self.cancelled.append(request_id)

    def close(self) -> None:
        self.is_closed = True


def request(name: str = "a", **fields: Any) -> Request:
    sampling = SamplingParams(**fields.pop("sampling", {}))
    if sampling.grammar_field is not None:
        fields = {"constraint": ONE_TOKEN} | fields
    fields = {"stop_token_ids": frozenset({9})} | fields
    return Request(request_id=name, prompt_token_ids=(1, 2, 3), sampling=sampling, **fields)


class OneOfThese:
    """A constraint: one of its tokens, and nothing after it."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens
        self.is_finished = False

    def start(self, stop_token_ids: Collection[int]) -> Any:
        return OneOfThese(*self._tokens)

    def advance(self, token_ids: Sequence[int]) -> int:
        for token in token_ids[:1]:
            if token not in self._tokens:
                raise ConstraintError(f"token {token}")
            self.is_finished = True
        return len(token_ids[:1])


ONE_TOKEN: Any = OneOfThese(7)


def params_of(given: Request, **abilities: Any) -> dict[str, Any]:
    return trtllm_params(given, dataclasses.replace(ABILITIES, **abilities), max_seq_len=64)


def sent(name: str) -> Request:
    """A request with another value of a parameter."""
    return request(sampling={name: SENT[name][0]} | ({"logprobs": True} if name == "top_logprobs" else {}))


def test_every_sampling_parameter_reaches_tensorrt_llm_or_is_refused() -> None:
    assert set(SENT) == {row.name for row in SAMPLING_FIELDS}
    plain = params_of(request())
    for name, (_, expected) in SENT.items():
        given = sent(name)
        if expected is None:
            with pytest.raises(RequestError, match=f"sampling {name}: expected"):
                params_of(given)
        else:
            assert params_of(given) == plain | expected, name


def test_what_is_sent_while_it_drafts_is_what_its_sampler_takes() -> None:
    """By the lists of the manifest: a parameter that it would refuse is refused here, by name."""
    always, without_penalties = KNOWN["refused_while_drafting"]
    for name, (_, expected) in SENT.items():
        theirs = set(expected or ())
        for has_penalties, refused in ((True, set(always)), (False, {*always, *without_penalties})):
            if expected is None or theirs & refused:
                with pytest.raises(RequestError, match=f"sampling {name}: expected"):
                    params_of(sent(name), has_drafter=True, has_penalties=has_penalties)
            else:
                assert params_of(sent(name), has_drafter=True, has_penalties=has_penalties) == params_of(sent(name))
    assert set(KNOWN["sampling_params"]) >= {field for _, fields in SENT.values() for field in fields or ()}


def test_a_link_refuses_what_it_cannot_carry() -> None:
    """Every other parameter has a field of a completion."""
    assert WorkerProcess.refused == {}
    fields = set()
    for name, (_, expected) in SENT.items():
        if expected is None or name in Server.refused:
            with pytest.raises(RequestError, match=f"sampling {name}: expected"):
                params_of(sent(name), refused=Server.refused)
        else:
            fields |= set(server._fields(params_of(sent(name), refused=Server.refused)))
    assert fields <= set(KNOWN["completion_request"]) and {"logit_bias", "response_format", "logprobs"} <= fields


@pytest.mark.parametrize(
    ("sampling", "fields", "message"),
    [
        ({"min_tokens": 2}, {"stop_token_ids": frozenset({3, 4})}, "min_tokens: expected 0 with 2 tokens that stop"),
        ({"min_tokens": 2}, {"stop_token_ids": frozenset()}, "min_tokens: expected 0 with 0 tokens that stop"),
        ({"regex": "a", "ignore_eos": True}, {}, "ignore_eos: expected False with regex"),
        ({"regex": "a"}, {"constraint": None}, "regex: expected its compiled constraint"),
    ],
)
def test_what_tensorrt_llm_would_read_otherwise_is_refused(
    sampling: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=f"sampling {message}"):
        params_of(request(sampling=sampling, **fields))


def test_an_engine_without_a_tokenizer_has_no_guides() -> None:
    with pytest.raises(RequestError, match="sampling regex: expected none, for this engine has no guided_decoding_b"):
        params_of(sent("regex"), has_guides=False)


def test_every_field_of_a_request_reaches_tensorrt_llm_or_is_refused() -> None:
    assert set(REQUEST_FIELDS) | OTHER_REQUEST_FIELDS == {field.name for field in dataclasses.fields(Request)}
    plain = params_of(request())
    for name, (value, expected) in REQUEST_FIELDS.items():
        if expected is None:
            with pytest.raises(RequestError, match=f"{name}: expected"):
                params_of(request(**{name: value}))
        else:
            assert params_of(request(**{name: value})) == plain | expected, name


def test_a_request_ends_at_the_engines_length() -> None:
    for asked, sent in ((60, 60), (61, 61), (62, 61), (1000, 61)):
        assert params_of(request(sampling={"max_new_tokens": asked}))["max_tokens"] == sent  # after 3 of 64 tokens


@pytest.mark.parametrize(
    ("given", "draft_length"), [({}, {1: 3}), ({"draft_length": 2}, {1: 2}), ({"use_drafter": False}, None)]
)
def test_settings_are_resolved_for_a_gpu_without_our_prefix_cache(monkeypatch, given, draft_length) -> None:
    checked: list[Any] = []
    engine: Any = "engine"
    monkeypatch.setattr(settings, "check_drafting", lambda *words: checked.append(words))
    monkeypatch.setattr(settings, "max_draft_len", lambda engine: 3)
    config = RuntimeConfig(max_queue_len=7, **given)
    resolved = settings.resolved_settings(engine, config, is_running=False)
    ours = {"device": "cuda", "enable_prefix_caching": False, "draft_length": draft_length}
    assert resolved == config.model_copy(update=ours) and checked == [(engine, config)]


# Another value of each setting that TensorRT-LLM does not have, for an engine that is not open yet.
REFUSED_SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "adaptive_draft_length": True,
    "ngram": True,
    "draft_length": {1: 2, 4: 1},
    "draft_window": 8,
    "num_state_snapshots": 2,
    "host_cache_bytes": 1 << 20,
    "disk_cache_dir": "/disk",
    "disk_cache_bytes": 1 << 20,
    "publish_prompts": True,
    "nnodes": 2,
    "master_addr": "10.0.0.1",
    "master_port": 29_777,
    "deterministic": True,
    "num_threads": 2,
    "plugin_library": "library.so",
}
ARGUMENTS = {"use_drafter", "draft_length", "overlap_scheduling", "kv_cache_bytes", "kv_cache_free_memory_fraction"}
OURS = {"max_queue_len", "seed", "enable_prefix_caching"}  # prefix caching is always off


def test_every_setting_is_used_or_refused() -> None:
    assert set(REFUSED_SETTINGS) | ARGUMENTS | OURS == set(RuntimeConfig.model_fields)
    for name, value in REFUSED_SETTINGS.items():
        config = RuntimeConfig().model_copy(update={name: value})
        (found,) = settings._problems(config, is_running=False)
        assert found.startswith(f"{name}: expected")
    for name in ARGUMENTS:
        config = RuntimeConfig().model_copy(update={name: {1: 2} if name == "draft_length" else 0.5})
        assert [line.split(":")[0] for line in settings._problems(config, is_running=True)] == [name]
        assert list(settings._problems(config, is_running=False)) == []


def test_the_queue_is_limited_beside_the_requests_that_run() -> None:
    engine = TensorRTLLMEngine(RecordingLink(), LIMITS, RuntimeConfig(max_queue_len=1), ABILITIES)
    streams = [engine.submit(request(name)) for name in "abc"]  # two run, one waits
    with pytest.raises(QueueFullError):
        engine.submit(request("d"))
    streams[0].cancel()
    engine.submit(request("d"))
    engine.close()


def test_a_request_that_cannot_be_sent_is_not_waited_for() -> None:
    link = RecordingLink(BrokenPipeError("gone"))
    engine = TensorRTLLMEngine(link, LIMITS, RuntimeConfig(), ABILITIES)
    with pytest.raises(RequestError, match="the engine has failed: gone"):
        engine.submit(request("a"))
    assert engine.statistics().num_running_now == 0
    link.error = None
    engine.submit(request("a")).cancel()  # its name is free
    engine.close(drains=True)
    assert link.cancelled == ["a"]


@pytest.fixture
def link() -> RecordingLink:
    return RecordingLink()


@pytest.fixture
def engine(link: RecordingLink) -> TensorRTLLMEngine:
    """K = 2."""
    engine = TensorRTLLMEngine(link, LIMITS, RuntimeConfig(draft_length=2), ABILITIES)
    engine.start()
    return engine


def test_an_answer_of_several_iterations_is_counted_as_them(engine: TensorRTLLMEngine, link: RecordingLink) -> None:
    stream = engine.submit(request("a"))
    for token_ids in ((1, 2, 3, 4, 5), (6, 7)):
        link.answer(Answer(request_id="a", token_ids=token_ids))
    link.answer(Answer(request_id="unknown", token_ids=(9,)))
    link.answer(Answer(request_id="a", finish_reason="length"))
    steps = [(step.token_ids, step.num_candidates, step.num_accepted) for step in stream.result(10).steps]
    assert steps == [((1,), 0, 0), ((2, 3, 4), 2, 2), ((5,), 2, 0), ((6, 7), 2, 1)]
    assert engine.statistics().num_running_now == 0 and engine.statistics().num_emitted_tokens == 7
    engine.check_integrity()
    assert link.cancelled == []


def test_scores_come_with_their_tokens(engine: TensorRTLLMEngine, link: RecordingLink) -> None:
    stream = engine.submit(request("a", sampling={"logprobs": True, "top_logprobs": 1}))
    rows = tuple((TokenLogprob(token, -0.5), TokenLogprob(token + 1, -2.0)) for token in (1, 2, 3))
    link.answer(Answer(request_id="a", token_ids=(1, 2, 3), logprobs=(-0.5, -1.0, -1.5), top=rows))
    link.answer(Answer(request_id="a", finish_reason="length"))
    output = stream.result(10)
    assert output.logprobs == (-0.5, -1.0, -1.5) and [step.logprobs for step in output.steps] == [(-0.5,), (-1.0, -1.5)]
    assert output.top_logprobs == tuple(row[:1] for row in rows)


def test_a_constraint_ends_a_request_before_the_tokens_that_may_not_follow(
    engine: TensorRTLLMEngine, link: RecordingLink
) -> None:
    """Drafts of the last step count as TensorRT-LLM accepted them, before the cut."""
    early, late = (engine.submit(request(name, sampling={"regex": "x"})) for name in "ab")
    link.answer(Answer(request_id="a", token_ids=(7,)))
    link.answer(Answer(request_id="b", token_ids=(7, 9), finish_reason="stop"))
    for stream in (early, late):
        assert (stream.result(10).token_ids, stream.result(10).finish_reason) == ((7,), "stop")
    assert link.cancelled == ["a"]
    assert [step.num_accepted for step in late.result(10).steps] == [0]


def test_a_token_that_a_constraint_refuses_is_an_error(engine: TensorRTLLMEngine, link: RecordingLink) -> None:
    stream = engine.submit(request("a", sampling={"regex": "x"}))
    link.answer(Answer(request_id="a", token_ids=(8,)))
    output = stream.result(10)
    assert (output.token_ids, output.finish_reason, link.cancelled) == ((), "error", ["a"])
    assert (
        output.error is not None and "request 'a' regex: expected tokens that it allows, found token 8" in output.error
    )


def test_a_forgotten_stream_ends_its_own_request_alone(engine: TensorRTLLMEngine, link: RecordingLink) -> None:
    old = engine.submit(request("a"))
    link.answer(Answer(request_id="a", finish_reason="stop"))
    new = engine.submit(request("a"))
    del old
    gc.collect()
    link.answer(Answer(request_id="a", token_ids=(1,)))
    assert not new.is_done and link.cancelled == []
    del new
    gc.collect()
    kept = engine.submit(request("b"))
    assert link.cancelled == ["a"] and not kept.is_done
    del kept
    gc.collect()
    link.answer(Answer(request_id="b", token_ids=(1,)))
    assert link.cancelled == ["a", "b"]


def test_what_an_engine_cannot_take_is_refused(engine: TensorRTLLMEngine, link: RecordingLink) -> None:
    stream = engine.submit(request("a"))
    with pytest.raises(RequestError, match="a request 'a' runs already"):
        engine.submit(request("a"))
    assert not stream.is_done
    engine.close()
    assert stream.result(10).finish_reason == "cancelled" and link.cancelled == ["a"] and link.is_closed
    with pytest.raises(RequestError, match="the engine is closed"):
        engine.submit(request("b"))


def test_a_lost_link_fails_what_runs_and_what_comes(engine: TensorRTLLMEngine, link: RecordingLink) -> None:
    streams = [engine.submit(request(name)) for name in "ab"]
    link.error = BrokenPipeError("gone")
    streams[0].cancel()
    link.lose("it has ended")
    ends = [(output.finish_reason, output.error) for output in (stream.result(10) for stream in streams)]
    assert ends == [("cancelled", None), ("error", "it has ended")]
    assert engine.failure == "it has ended"
    with pytest.raises(RequestError, match="the engine has failed: it has ended"):
        engine.submit(request("c"))
    engine.close(drains=True)
    assert engine.failure is None  # it is closed


def test_a_link_that_ends_with_its_engine_is_no_failure(engine: TensorRTLLMEngine, link: RecordingLink) -> None:
    ended: list[bool] = []
    stream = engine.submit(request("a"))
    stream.call_at_end(lambda: ended.append(True))
    engine.cancel("unknown")
    engine.cancel("a")
    assert ended == [True] and engine.statistics().num_requests_by_finish_reason == {"cancelled": 1}
    engine.close()
    link.lose("it has ended")
    assert engine.failure is None


class Record:
    """The arguments that an engine was built with."""

    def __init__(self, **args: Any) -> None:
        self._args = args

    def resolved_args(self, path: Any) -> dict[str, Any]:
        return {"model": f"{path}/target", **self._args}


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ({}, {}),
        ({"overlap_scheduling": True}, {"disable_overlap_scheduler": False}),
        ({"overlap_scheduling": False}, {"disable_overlap_scheduler": True}),
        ({"kv_cache_bytes": 4096}, {"kv_cache_config": {"dtype": "auto", "max_gpu_total_bytes": 4096}}),
        (
            {"kv_cache_free_memory_fraction": 0.25},
            {"kv_cache_config": {"dtype": "auto", "free_gpu_memory_fraction": 0.25}},
        ),
        ({"draft_length": {1: 2}}, {"speculative_config": {"decoding_type": "DFlash", "max_draft_len": 2}}),
        ({"draft_length": {1: 0}}, {"speculative_config": None}),
        ({"use_drafter": False, "draft_length": None}, {"speculative_config": None}),
    ],
)
def test_each_setting_is_its_own_argument(setting: dict[str, Any], changes: dict[str, Any]) -> None:
    args = {"kv_cache_config": {"dtype": "auto"}, "disable_overlap_scheduler": True}
    args["speculative_config"] = {"decoding_type": "DFlash", "max_draft_len": 3}
    manifest = SimpleNamespace(tensorrt_llm=Record(**args))
    engine: Any = SimpleNamespace(path="/engine", manifest=manifest)
    found = settings.llm_args(engine, RuntimeConfig().model_copy(update={"draft_length": {1: 3}} | setting))
    expected = {"model": "/engine/target", **args} | changes
    assert found == {name: value for name, value in expected.items() if value is not None}
