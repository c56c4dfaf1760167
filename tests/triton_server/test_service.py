"""The service between a server and the engine, without a server: steps, cancellations, draining, metrics."""

import inspect
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_trt.core.request import SamplingParams
from dflash_trt.core.sampling import sample_seed
from dflash_trt.servers.triton import prompt_lanes
from dflash_trt.servers.triton.metrics import REFUSED, MetricBook
from dflash_trt.servers.triton.service import EngineService
from dflash_trt.servers.triton.settings import ModelSettings
from dflash_trt.servers.triton.tensors import INPUTS_BY_NAME
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.text import TextCodec
from tests.scheduler.driver import make_limits
from tests.serving.engines import VOCAB_SIZE, GatedExecutor, make_codec, make_executor, make_generator, until
from tests.serving.tokenizers import CHAT_TEMPLATE, write_byte_level
from tests.triton_server.fake_series import FakeSeries


class Client:
    """A Channel that remembers. `leaves` makes it cancelled from now on."""

    def __init__(self) -> None:
        self.responses: list[dict[str, Any]] = []
        self.error: tuple[str, str] | None = None
        self.ended = threading.Event()
        self.leaves = threading.Event()
        self.on_response: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self.num_asked = 0

    def send(self, arrays: dict[str, Any], *, is_last: bool) -> None:
        assert not self.ended.is_set(), "nothing comes after the last response"
        self.on_response()
        self.responses.append(arrays)
        if is_last:
            self.on_end()
            self.ended.set()

    def fail(self, message: str, code: str) -> None:
        self.error = (message, code)
        self.ended.set()

    def is_cancelled(self) -> bool:
        self.num_asked += 1
        return self.leaves.is_set()

    @property
    def token_ids(self) -> list[int]:
        return [int(token_id) for response in self.responses for token_id in response["output_ids"]]


@pytest.fixture
def series() -> FakeSeries:
    return FakeSeries()


@pytest.fixture
def executor() -> GatedExecutor:
    """Steps run one by one."""
    return GatedExecutor(make_limits(), vocab_size=VOCAB_SIZE)


@pytest.fixture
def gated(executor, series) -> Iterator[tuple[EngineService, Generator]]:
    yield from serving(make_generator(executor), series)
    executor.open()


def serving(generator: Generator, series: FakeSeries, **settings: Any) -> Iterator[tuple[EngineService, Generator]]:
    book = MetricBook(series, max_draft_len=generator.limits.max_draft_len)  # type: ignore[arg-type]
    service = EngineService(generator, ModelSettings(engine_dir="", **settings), vocab_size=VOCAB_SIZE, book=book)
    yield service, generator
    if isinstance(generator._engine._runner._executor, GatedExecutor):  # type: ignore[attr-defined]
        generator._engine._runner._executor.open()  # type: ignore[attr-defined]
    service.close()
    generator.close()
    assert generator.statistics.scheduler.num_pages_in_use_now == 0


def inputs(**fields: Any) -> dict[str, Any]:
    dtypes = {"STRING": np.object_, "BOOL": np.bool_, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64}
    types = {name: dtypes[INPUTS_BY_NAME[name].type] for name in fields}
    return {name: np.atleast_1d(np.array(value, dtype=types[name])) for name, value in fields.items()}


def ask(service: EngineService, *, client_id: str = "", **fields: Any) -> Client:
    client = Client()
    service.take(inputs(**fields), "", client_id, client)  # type: ignore[arg-type]
    return client


def test_a_stream_has_one_response_per_step_even_when_nobody_takes_them(series) -> None:
    for service, generator in serving(make_generator(make_executor()), series):
        client = ask(service, input_ids=[5, 6, 7], max_tokens=30, stream=True)
        assert client.ended.wait(30)
        num_steps = generator.statistics.scheduler.num_steps
        whole = ask(service, input_ids=[5, 6, 7], max_tokens=30)
        assert whole.ended.wait(30)
    assert len(whole.responses) == 1
    assert client.token_ids == whole.token_ids
    assert len(client.responses) == num_steps < 30
    assert all(len(response["output_ids"]) for response in client.responses)


def test_a_client_that_leaves_takes_part_in_one_more_step_at_most(gated, executor) -> None:
    service, generator = gated
    client = ask(service, input_ids=[5, 6, 7], max_tokens=60, stream=True)
    executor.gate.release(2)
    until(lambda: len(client.responses) == 2)
    client.leaves.set()
    executor.gate.release(1)  # the step that ran already; with its response the departure is seen
    assert client.ended.wait(30)
    until(lambda: generator.statistics.scheduler.num_pages_in_use_now == 0)
    assert generator.statistics.scheduler.num_steps <= 4
    assert generator.statistics.num_requests_by_finish_reason == {"cancelled": 1}


def test_a_client_that_leaves_the_queue_is_noticed_without_a_step(gated) -> None:
    service, generator = gated
    client = ask(service, input_ids=[5, 6, 7], max_tokens=60)
    until(lambda: client.num_asked >= 2)  # again and again, not only at first
    client.leaves.set()
    assert client.ended.wait(30)
    assert generator.statistics.num_requests_by_finish_reason == {"cancelled": 1}


def test_the_request_of_an_id_ends_by_stop(gated, executor) -> None:
    service, _ = gated
    client = ask(service, client_id="a", input_ids=[5, 6, 7], max_tokens=60, stream=True)
    other = ask(service, client_id="b", stop=True)
    assert other.error is not None
    assert other.error[1] == "NOT_FOUND"
    assert not client.ended.is_set()
    namesake = ask(service, client_id="a", input_ids=[5, 6, 7], max_tokens=60)
    assert ask(service, client_id="a", stop=True).responses[0]["finish_reason"] == [b"cancelled"]
    assert client.ended.wait(30)
    assert namesake.ended.wait(30)


def test_stop_without_an_id_ends_nobody(gated, executor) -> None:
    service, _ = gated
    client = ask(service, input_ids=[5, 6, 7], max_tokens=5)
    refused = ask(service, stop=True)
    assert refused.error is not None and refused.error[1] == "NOT_FOUND"
    executor.open()
    assert client.ended.wait(30)
    assert len(client.token_ids) == 5


class FakeWatch:
    """A server whose state the test sets."""

    def __init__(self) -> None:
        self.num_told = 0
        self.stops = self.has_gone = False

    def requests_come(self) -> None:
        self.num_told += 1

    def is_stopping(self) -> bool:
        return self.stops

    def is_gone(self) -> bool:
        return self.has_gone


def test_the_watch_is_told_of_the_first_request_and_its_word_ends_the_service(executor) -> None:
    watch, gone = FakeWatch(), threading.Event()
    generator = make_generator(executor)
    settings = ModelSettings(engine_dir="", drain_timeout_s=0.05)
    service = EngineService(generator, settings, vocab_size=VOCAB_SIZE, watch=watch, on_server_gone=gone.set)
    clients = [ask(service, input_ids=[5, 6, 7], max_tokens=5) for _ in range(2)]
    assert watch.num_told == 1
    assert not gone.is_set()
    watch.stops = True
    for client in clients:
        assert client.ended.wait(30)
        assert client.responses[-1]["finish_reason"] == [b"cancelled"]
    watch.has_gone = True
    assert gone.wait(30)
    executor.open()
    service.close()
    generator.close()


def test_an_engine_that_has_failed_is_reported_when_its_requests_have_ended(executor, monkeypatch) -> None:
    generator, failures = make_generator(executor), list[str]()
    settings = ModelSettings(engine_dir="")
    service = EngineService(generator, settings, vocab_size=VOCAB_SIZE, on_engine_failed=failures.append)
    client = ask(service, input_ids=[5, 6, 7], max_tokens=5)
    monkeypatch.setattr(Generator, "failure", "the device is lost")
    service._look_after_engine()
    assert failures == []
    executor.open()
    assert client.ended.wait(30)
    until(lambda: failures)
    assert set(failures) == {"the device is lost"}
    service.close()
    generator.close()


def test_a_server_that_takes_no_response_loses_that_request_alone(gated, executor, monkeypatch) -> None:
    service, generator = gated
    submit, is_cancelled = generator.submit_samples, threading.Event()

    def submitting(*args: Any, **kwargs: Any) -> Any:
        stream = submit(*args, **kwargs)
        return SimpleNamespace(cancel=lambda: (stream.cancel(), is_cancelled.set()), take_steps=stream.take_steps)

    def fail() -> None:
        raise OSError("no way back")

    monkeypatch.setattr(generator, "submit_samples", submitting)
    broken = Client()
    broken.on_response = fail
    service.take(inputs(input_ids=[5, 6], max_tokens=40, stream=True), "", "", broken)  # type: ignore[arg-type]
    executor.gate.release(1)
    assert is_cancelled.wait(30)
    executor.open()
    until(lambda: generator.statistics.num_requests_by_finish_reason == {"cancelled": 1})
    assert service.num_open == 0
    assert ask(service, input_ids=[5, 6], max_tokens=3).ended.wait(30)


def test_a_server_that_stops_lets_requests_finish_and_takes_no_more(gated, executor, caplog) -> None:
    service, _ = gated
    client = ask(service, input_ids=[5, 6, 7], max_tokens=5)
    for _ in range(2):
        service.drain()
    assert caplog.text.count("the server is stopping: 1 requests may run for 5 s more") == 1
    refused = ask(service, input_ids=[5], max_tokens=5)
    assert refused.error is not None
    assert refused.error[1] == "UNAVAILABLE"
    executor.open()
    assert client.ended.wait(30)
    assert len(client.token_ids) == 5


def test_a_server_that_stops_ends_what_takes_too_long(executor, series) -> None:
    for service, _ in serving(make_generator(executor), series, drain_timeout_s=0.1):
        client = ask(service, input_ids=[5, 6, 7], max_tokens=5)
        service.drain()
        assert client.ended.wait(30)
        assert client.responses[-1]["finish_reason"] == [b"cancelled"]


def test_a_step_that_fails_fails_its_request_alone(series) -> None:
    executor = make_executor(fails_on=lambda batch: any(9 in row.token_ids for row in batch.requests))
    for service, _ in serving(make_generator(executor), series):
        good, bad = ask(service, input_ids=[1, 2], max_tokens=3), ask(service, input_ids=[9], max_tokens=3)
        assert good.ended.wait(30)
        assert bad.ended.wait(30)
        assert good.error is None
        assert bad.error is not None
        assert bad.error[1] == "INTERNAL"


def test_what_a_request_asks_for_is_what_the_engine_is_asked_for(series, monkeypatch) -> None:
    generator = make_generator(make_executor())
    submit, asked = generator.submit_samples, []

    def recording(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(submit).bind(*args, **kwargs)
        call.apply_defaults()
        asked.append({**call.arguments, **call.arguments["fields"]})
        del asked[-1]["fields"]
        return submit(*args, **kwargs)

    monkeypatch.setattr(generator, "submit_samples", recording)
    fields = {"input_ids": [5, 6], "max_tokens": 3, "seed": 11, "priority": -3, "queue_timeout_s": 7.5}
    for service, _ in serving(generator, series):
        assert ask(service, client_id="mine", cache_salt=b"tenant", **fields).ended.wait(30)
    (call,) = asked
    assert callable(call.pop("on_ready"))
    assert call == {
        "prompt": {"prompt_token_ids": (5, 6)},
        "sampling_params": SamplingParams(max_new_tokens=3, seed=11),
        "priority": -3,
        "queue_timeout_s": 7.5,
        "cache_salt": "tenant",
        "request_id": None,  # a client's id need not be unique
        "max_pending_tokens": None,  # responses are sent, never kept
    }


@pytest.mark.parametrize("stream", [False, True])
def test_samples_come_under_their_sequence_index(series, stream) -> None:
    generator = make_generator(make_executor())
    request = {"input_ids": [5, 6, 7], "max_tokens": 9, "temperature": 0.8, "seed": 11}
    for service, _ in serving(generator, series):
        client = ask(service, n=3, stream=stream, top_logprobs=0, **request)
        assert client.ended.wait(30)
        alone = [
            ask(service, **request | {"seed": sample_seed(11, index)}, num_return_sequences=1) for index in range(3)
        ]
        assert all(each.ended.wait(30) for each in alone)
        assert service.num_open == 0
    found: dict[int, list[int]] = {}
    for response in client.responses:
        found.setdefault(int(response["sequence_index"][0]), []).extend(response["output_ids"].tolist())
    assert [found[index] for index in range(3)] == [each.token_ids for each in alone]
    assert sum("finish_reason" in response for response in client.responses) == 3
    if not stream:
        assert len(client.responses) == 3


def test_a_sample_that_fails_is_the_answer_for_all(series, caplog, monkeypatch) -> None:
    executor = make_executor(fails_on=lambda batch: any(row.request_id.endswith("/1") for row in batch.requests))
    run = executor.run_rows  # slowly, so that the others do not end before anybody has read of the failure
    monkeypatch.setattr(executor, "run_rows", lambda batch: time.sleep(0.05) or run(batch))
    generator = make_generator(executor)
    for service, _ in serving(generator, series):
        client = ask(service, input_ids=[5, 6], max_tokens=30, n=3)
        assert client.ended.wait(30)
        assert client.error is not None and client.error[1] == "INTERNAL"
        until(lambda: generator.statistics.scheduler.num_pages_in_use_now == 0)
        assert service.num_open == 0
    assert client.responses == [] and series.values["responses_total", ""] == 1  # the ends of the others are no answers
    assert "a response could not be sent" not in caplog.text


def test_prefixes_are_shared_within_a_tenant_alone(series) -> None:
    prompt = list(range(5, 25))
    hits = []
    for service, generator in serving(make_generator(make_executor()), series):
        for salt in (b"a", b"b", b"", b"a"):
            assert ask(service, input_ids=prompt, max_tokens=2, cache_salt=salt).ended.wait(30)
            hits.append(generator.statistics.scheduler.num_prefix_hit_tokens)
    assert hits[:3] == [0, 0, 0]
    assert hits[3] > 0


def test_requests_of_higher_priority_go_first(series) -> None:
    executor = GatedExecutor(make_limits(max_batch_size=1), vocab_size=VOCAB_SIZE)
    for service, _ in serving(make_generator(executor), series):
        ask(service, input_ids=[5], max_tokens=1)
        assert executor.entered.wait(30)
        ended: list[int] = []
        clients = [ask(service, input_ids=[6], max_tokens=1, priority=priority) for priority in (-1, 2, 1)]
        for index, client in enumerate(clients):
            client.on_end = partial(ended.append, index)
        executor.open()
        for client in clients:
            assert client.ended.wait(30)
        assert ended == [1, 2, 0]


def test_a_request_that_waits_too_long_is_told_to_come_back(series) -> None:
    executor = GatedExecutor(make_limits(max_batch_size=1), vocab_size=VOCAB_SIZE)
    for service, _ in serving(make_generator(executor, clock=time.monotonic), series):
        running = ask(service, input_ids=[5], max_tokens=1)
        assert executor.entered.wait(30)
        patient = ask(service, input_ids=[6], max_tokens=1, queue_timeout_s=60.0)
        hasty = ask(service, input_ids=[6], max_tokens=1, queue_timeout_s=0.01)
        time.sleep(0.02)
        executor.open()
        for client in (running, patient, hasty):
            assert client.ended.wait(30)
        assert running.error is None and patient.error is None
        assert hasty.error is not None and hasty.responses == []
        assert hasty.error[1] == "UNAVAILABLE"
        assert "time" in hasty.error[0]
    assert series.values["requests_total", "timeout"] == 1
    assert series.values["requests_total", "error"] == 0


def test_a_full_queue_and_a_wrong_request_have_different_codes(series) -> None:
    executor = GatedExecutor(make_limits(max_batch_size=1), vocab_size=VOCAB_SIZE)
    for service, _ in serving(make_generator(executor, max_queue_len=1), series):
        ask(service, input_ids=[5], max_tokens=1)
        assert executor.entered.wait(30)
        ask(service, input_ids=[5], max_tokens=1)
        refused, wrong = ask(service, input_ids=[5], max_tokens=1), ask(service, input_ids=[5], max_tokens=0)
        assert refused.error is not None and refused.error[1] == "UNAVAILABLE"
        assert wrong.error is not None and wrong.error[1] == "INVALID_ARG"
    assert series.values["requests_total", REFUSED] == 2
    assert series.values["responses_total", ""] == 4


def test_requests_that_run_and_wait_are_published_while_they_do(gated, executor, series) -> None:
    service, _ = gated
    clients = [ask(service, input_ids=[5, 6], max_tokens=30) for _ in range(7)]
    executor.gate.release(1)
    until(lambda: (series.values["requests_running", ""], series.values["requests_waiting", ""]) == (4, 3))
    assert series.values["pages_in_use", ""] > 0
    assert series.values["pages", ""] == make_limits().num_pages
    executor.open()
    for client in clients:
        assert client.ended.wait(30)
    until(lambda: (series.values["requests_running", ""], series.values["requests_waiting", ""]) == (0, 0))


def test_metrics_that_fail_once_end_neither_the_service_nor_the_metrics(gated, executor, series, monkeypatch) -> None:
    service, _ = gated
    failures = [RuntimeError("no series"), RuntimeError("none again")]
    publish = service._publish
    monkeypatch.setattr(service, "_publish", lambda: publish() if not failures else _raise(failures.pop()))
    client = ask(service, input_ids=[5, 6], max_tokens=30)
    until(lambda: not failures)
    until(lambda: series.values["requests_running", ""] == 1)
    executor.open()
    assert client.ended.wait(30)


def _raise(error: Exception) -> None:
    raise error


def test_metrics_are_the_sum_of_what_was_answered(series) -> None:
    for service, _ in serving(make_generator(make_executor()), series):
        clients = [ask(service, input_ids=[5, 6, i], max_tokens=20, stream=True) for i in range(6)]
        for client in clients:
            assert client.ended.wait(30)
        refused = ask(service, input_ids=[VOCAB_SIZE], max_tokens=20)
        assert refused.error is not None
    lasts = [client.responses[-1] for client in clients]
    value = series.values
    assert value["requests_total", "length"] == 6
    assert value["requests_total", REFUSED] == 1
    assert value["responses_total", ""] == 1 + sum(len(client.responses) for client in clients)
    assert value["output_tokens_total", ""] == 120
    assert value["prompt_tokens_total", ""] == 18
    assert value["draft_tokens_total", ""] == sum(last["total_draft_tokens"][0] for last in lasts) > 0
    assert value["accepted_tokens_total", ""] == sum(last["total_accepted_draft_tokens"][0] for last in lasts) > 0
    assert value["verify_blocks_total", ""] == sum(last["num_verify_steps"][0] for last in lasts)
    at = {name: [count for (each, _), count in value.items() if each == name] for name, _ in value}
    assert sum(at["draft_tokens_at_position_total"]) == value["draft_tokens_total", ""]
    assert sum(at["accepted_tokens_at_position_total"]) == value["accepted_tokens_total", ""]
    assert [name for name, _ in series.observed].count("time_to_first_token_seconds") == 6
    assert value["pages_in_use", ""] == 0
    assert value["steps_total", ""] > 0


def test_text_needs_a_tokenizer_and_conversations_a_template(tmp_path, series) -> None:
    generator = make_generator(make_executor(), codec=make_codec(tmp_path))
    for service, _ in serving(generator, series, wraps_in_chat=True):
        client = Client()
        service.take({"text_input": np.array([b"Hello"], dtype=np.object_)}, '{"max_tokens": 3}', "", client)  # type: ignore[arg-type]
        assert client.ended.wait(30)
        messages = [{"role": "user", "content": "Hello"}]
        assert client.responses[0]["num_input_tokens"] == [len(generator.codec.encode_chat(messages))]
        client = Client()
        message = {"messages": np.array([b'[{"role": "user", "content": "Hello"}]'], dtype=np.object_)}
        echo = '{"max_tokens": 3, "exclude_input_in_output": false}'
        service.take(message, echo, "", client)  # type: ignore[arg-type]
        assert client.ended.wait(30)
        conversation = generator.codec.decode(generator.codec.encode_chat(messages))
        assert client.responses[0]["text_output"][0].decode().startswith(conversation)
    for service, _ in serving(make_generator(make_executor()), series):
        client = Client()
        service.take({"text_input": np.array([b"Hello"], dtype=np.object_)}, "", "", client)  # type: ignore[arg-type]
        assert client.ended.wait(30)
        assert client.error is not None
        assert "no tokenizer" in client.error[0]


# Prompts are read beside the server's thread


class GatedCodec:
    """A codec whose `encode` waits until the test lets it run, and remembers what it was given."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.entered: list[str] = []
        self.gate = threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        self.entered.append(text)
        assert self.gate.acquire(timeout=30), "the test forgot to let a prompt be read"
        return self._codec.encode(text, max_tokens=max_tokens)


@pytest.fixture
def codec(tmp_path) -> GatedCodec:
    return GatedCodec(make_codec(tmp_path))


@pytest.fixture
def reading(codec, series, monkeypatch) -> Iterator[EngineService]:
    """What has more than 60 bytes, parameters included, is a long one."""
    monkeypatch.setattr(prompt_lanes, "SHORT_BYTES", 60 + prompt_lanes._OVERHEAD_BYTES)
    limits = make_limits(max_seq_len=200, num_pages=80)
    for service, _ in serving(make_generator(make_executor(limits), codec=codec), series):
        yield service
        codec.gate.release(1000)


def ask_text(service: EngineService, text: str, *, client_id: str = "", **fields: str) -> Client:
    client = Client()
    given = {"text_input": text, **fields}
    arrays = {name: np.array([value.encode()], dtype=np.object_) for name, value in given.items() if value}
    service.take(arrays, '{"max_tokens": 3}', client_id, client)  # type: ignore[arg-type]
    return client


LONG = "one two three " * 5


def test_a_long_prompt_that_is_being_read_holds_up_neither_the_server_nor_short_prompts(reading, codec) -> None:
    long = ask_text(reading, LONG)
    until(lambda: codec.entered == [LONG])
    ids = ask(reading, input_ids=[5, 6], max_tokens=3)
    assert ids.ended.wait(30) and ids.error is None
    short = ask_text(reading, "one")
    until(lambda: codec.entered == [LONG, "one"])
    assert not long.ended.is_set() and not short.ended.is_set()
    codec.gate.release(2)
    assert long.ended.wait(30) and short.ended.wait(30)
    assert long.responses[0]["num_input_tokens"] == [len(codec._codec.encode(LONG))]
    assert short.responses[0]["num_input_tokens"] == [len(codec._codec.encode("one"))]


def test_a_chat_template_that_takes_long_holds_up_no_text(reading, codec, monkeypatch) -> None:
    template = threading.Semaphore(0)
    encode_chat = codec._codec.encode_chat

    def wait(*words: Any, **options: Any) -> list[int]:
        codec.entered.append("chat")
        assert template.acquire(timeout=30)
        return encode_chat(*words, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(codec, "encode_chat", wait, raising=False)
    codec.gate.release(1)
    chats = [ask_text(reading, "", messages='[{"role": "user", "content": ""}]') for _ in range(3)]
    until(lambda: codec.entered == ["chat", "chat"])  # the third waits for them
    text = ask_text(reading, "one")
    assert text.ended.wait(30) and text.error is None
    assert not any(chat.ended.is_set() for chat in chats)
    template.release(3)
    assert all(chat.ended.wait(60) and chat.error is None for chat in chats)


def test_a_client_that_leaves_before_its_prompt_is_read_costs_no_step(reading, codec, series) -> None:
    being_read, waiting = ask_text(reading, "one"), ask_text(reading, "two")
    until(lambda: codec.entered == ["one"])
    waiting.leaves.set()
    assert waiting.ended.wait(30)
    being_read.leaves.set()
    until(lambda: all(request.is_cancelled for request in reading._copy_of_open()))
    codec.gate.release(2)
    assert being_read.ended.wait(30)
    assert [client.responses[0]["finish_reason"] for client in (being_read, waiting)] == [[b"cancelled"]] * 2
    assert codec.entered == ["one"]
    until(lambda: reading.num_open == 0)
    reading._publish()
    assert series.values["steps_total", ""] == 0
    assert series.values["requests_total", "cancelled"] == 2


def test_a_prompt_that_waits_to_be_read_ends_by_stop(reading, codec) -> None:
    ask_text(reading, "one")
    waiting = ask_text(reading, "two", client_id="a")
    assert ask(reading, client_id="a", stop=True).error is None
    assert waiting.ended.wait(30)
    assert waiting.responses[0]["finish_reason"] == [b"cancelled"]


def test_a_prompt_too_long_by_its_bytes_is_refused_before_anybody_reads_it(reading, codec) -> None:
    too_long = ask_text(reading, "x" * 5000)
    assert too_long.error is not None  # at once, in the server's thread
    assert "expected at most 4577 bytes, as more text does not fit into max_seq_len" in too_long.error[0]
    assert too_long.error[1] == "INVALID_ARG"
    conversation = ask_text(reading, "", messages='[{"role": "user", "content": "' + "x" * 1_100_000 + '"}]')
    assert conversation.error is not None and "at most 1048576 bytes" in conversation.error[0]
    assert codec.entered == []


def test_prompts_that_wait_are_bounded_in_bytes(reading, codec, monkeypatch) -> None:
    monkeypatch.setattr(reading._lanes, "_max_waiting_bytes", 4000)
    clients = [ask_text(reading, LONG) for _ in range(5)]
    assert [client.error is not None for client in clients] == [False] * 3 + [True] * 2
    assert clients[-1].error is not None and clients[-1].error[1] == "UNAVAILABLE"
    assert "at most 4000 bytes waiting to be tokenized" in clients[-1].error[0]
    codec.gate.release(4)
    assert all(client.ended.wait(30) for client in clients)
    until(lambda: reading._lanes._num_bytes == 0)
    assert reading.num_open == 0  # those that were refused, too
    assert ask_text(reading, LONG).ended.wait(30)


def test_what_a_prompt_raises_is_its_own_answer(reading, codec, caplog) -> None:
    codec.gate = None  # what it raises is a bug
    broken = ask_text(reading, "one")
    assert broken.ended.wait(30)
    assert broken.error is not None and broken.error[1] == "INTERNAL"
    assert "AttributeError" in broken.error[0]
    codec.gate = threading.Semaphore(5)
    assert ask_text(reading, "one").ended.wait(30)
    no_json = ask_text(reading, "", messages="[")
    assert no_json.ended.wait(30)
    assert no_json.error is not None and no_json.error[1] == "INVALID_ARG"
    assert "input 'messages': expected a JSON list" in no_json.error[0]


def test_conversations_have_the_engines_template_options(tmp_path, series) -> None:
    codec = TextCodec.open(
        write_byte_level(tmp_path, chat_template=CHAT_TEMPLATE), chat_template_options={"shout": True}
    )
    messages = [{"role": "user", "content": "Hi"}]
    numbers = {options: len(codec.encode_chat(messages, json.loads(options))) for options in ("{}", '{"shout": false}')}
    assert len(set(numbers.values())) == 2
    for service, _ in serving(make_generator(make_executor(), codec=codec), series):
        for options, expected in numbers.items():
            client = ask_text(service, "", messages=json.dumps(messages), chat_template_kwargs=options)
            assert client.ended.wait(30)
            assert client.responses[0]["num_input_tokens"] == [expected]


def test_template_options_reach_the_template(tmp_path, series) -> None:
    generator = make_generator(make_executor(), codec=make_codec(tmp_path))
    messages, options = [{"role": "user", "content": "Hi"}], '{"shout": true}'
    expected = len(generator.codec.encode_chat(messages, {"shout": True}))  # type: ignore[union-attr]
    for service, _ in serving(generator, series):
        client = ask_text(service, "", messages=json.dumps(messages), chat_template_kwargs=options)
        assert client.ended.wait(30)
        assert client.responses[0]["num_input_tokens"] == [expected]
        for text, kwargs, said in (
            ("Hi", options, "chat_template_kwargs: expected with messages only, found with prompt"),
            ("", "[1]", "chat_template_kwargs: expected an object"),
            ("", "{", "input 'chat_template_kwargs': expected a JSON object"),
            ("", '{"tokenize": false}', "found tokenize, decided by the engine"),
        ):
            fields = {} if text else {"messages": json.dumps(messages)}
            refused = ask_text(service, text, chat_template_kwargs=kwargs, **fields)
            assert refused.ended.wait(30)
            assert refused.error is not None and said in refused.error[0]
