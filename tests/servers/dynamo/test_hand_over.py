"""What a worker hands over, field by field: to the engine, to its client, to Prometheus and to Dynamo."""

import asyncio
import dataclasses
import inspect
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("dynamo.common.backend", reason="needs the extra 'serve'")

from dflash_trt.core.errors import QueueFullError, RequestError
from dflash_trt.core.logprobs import PromptLogprob, TokenLogprob
from dflash_trt.core.request import GenerationOutput, RequestStatistics, SamplingParams, TokenEvent
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.scheduler.statistics import SchedulerStatistics
from dflash_trt.servers.dynamo import contract, service
from dflash_trt.servers.dynamo.contract import DynamoEngine, worker_config
from dflash_trt.servers.dynamo.metrics import registry_of
from dflash_trt.servers.dynamo.prefix_events import PrefixEvents
from dflash_trt.servers.dynamo.request_fields import Order
from dflash_trt.servers.dynamo.responses import response
from dflash_trt.servers.dynamo.service import EngineService, RegisteredLimits, open_service
from dflash_trt.servers.dynamo.settings import WorkerSettings
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.output_processor import StreamChunk
from dflash_trt.serving.statistics import Distribution, EngineStatistics
from tests.cli.calls import RecordedError, Recorder

LIMITS = SimpleNamespace(max_batch_size=3, max_seq_len=64, max_num_tokens=48, page_size=16, num_pages=12)
LIMITS.max_draft_len = 2
REQUEST: dict[str, Any] = {
    "token_ids": [1, 2, 3],
    "sampling_options": {"temperature": 0.5, "seed": 9},
    "stop_conditions": {"max_tokens": 5},
    "output_options": {"logprobs": 1},
    "routing": {"cache_salt": "mine", "priority": 4},
}


class ScriptedStream:
    """Two steps of a token each, then the end."""

    def __init__(self, *, fails: bool = False) -> None:
        self.num_cancelled = 0
        self._steps = iter([[StreamChunk(text="a", token_ids=(1,))], [StreamChunk(text="b", token_ids=(2,))], []])
        self._fails = fails

    async def take_steps_async(self) -> list[StreamChunk]:
        if self._fails:
            raise RuntimeError("lost")
        return next(self._steps)

    def cancel(self) -> None:
        self.num_cancelled += 1


class ScriptedGenerator:
    limits = LIMITS
    codec = None
    failure = "lost"
    statistics = "statistics"

    def __init__(self, stream: ScriptedStream | None = None) -> None:
        self.recorder = Recorder(Generator.submit)
        self.stream = stream
        self.is_closed = False

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        if self.stream is None:
            return self.recorder(self, *args, **kwargs)
        return self.stream

    def close(self) -> None:
        self.is_closed = True


def served(generator: Any, *, is_stopped: bool = False) -> tuple[EngineService, Any]:
    ours = EngineService(generator, sampling_defaults={"top_k": 20})
    return ours, ours.generate(REQUEST, "front-1", lambda: is_stopped)


async def first_of(chunks: Any) -> Any:
    return await anext(chunks)


def test_a_request_reaches_the_engine_whole() -> None:
    assert {field.name for field in dataclasses.fields(Order)} == {
        "prompt_token_ids",
        "sampling",
        "cache_salt",
        "priority",
        "reports_drafts",
    }
    generator = ScriptedGenerator()
    with pytest.raises(RecordedError):
        asyncio.run(first_of(served(generator)[1]))
    sampling = {"temperature": 0.5, "seed": 9, "top_k": 20, "max_new_tokens": 5, "logprobs": True, "top_logprobs": 1}
    asked = {"prompt": [1, 2, 3], "sampling_params": SamplingParams(**sampling), "cache_salt": "mine", "priority": 4}
    asked["reports_drafts"] = False
    # The front end has names, timeouts and readers of its own.
    left = dict.fromkeys(["request_id", "queue_timeout_s", "max_pending_tokens", "on_ready"])
    assert generator.recorder.arguments == asked | left | {"self": generator}


@pytest.mark.parametrize("way", ["end", "abort", "stopped", "closed", "failed"])
def test_a_request_is_released_however_it_ends(way: str) -> None:
    stream = ScriptedStream(fails=way == "failed")
    ours, chunks = served(ScriptedGenerator(stream), is_stopped=way == "stopped")

    async def run() -> list[Any]:
        if way in ("end", "stopped"):
            return [chunk async for chunk in chunks]
        if way == "failed":
            with pytest.raises(RuntimeError, match="lost"):
                await anext(chunks)
            return []
        first = await anext(chunks)
        if way == "abort":
            ours.abort("another")
            assert stream.num_cancelled == 0
            ours.abort("front-1")
            assert stream.num_cancelled == 1
        await chunks.aclose()
        return [first]

    found = asyncio.run(run())
    assert len(found) == {"end": 2, "failed": 0}.get(way, 1)
    before = stream.num_cancelled
    assert before
    ours.abort("front-1")  # it is forgotten
    assert stream.num_cancelled == before


@pytest.mark.parametrize("leaves", [False, True])
def test_a_constraint_is_compiled_outside_of_the_event_loop(leaves: bool) -> None:
    """A client that leaves meanwhile gets nothing, and its request ends once it has begun."""
    stream, compiled, threads = ScriptedStream(), threading.Event(), []
    generator: Any = ScriptedGenerator(stream)

    def submit(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        assert compiled.wait(30)
        return stream

    generator.submit = submit
    ours = EngineService(generator, sampling_defaults={})
    request = REQUEST | {"sampling_options": {"guided_decoding": {"regex": "a+"}}}

    async def run() -> int:
        chunks = ours.generate(request, "front-1", lambda: False)
        task = asyncio.ensure_future(first_of(chunks))
        while not threads:
            await asyncio.sleep(0.001)
        if leaves:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        compiled.set()
        if not leaves:
            await task
            await chunks.aclose()
        while not stream.num_cancelled:
            await asyncio.sleep(0.001)
        return len(threads)

    assert asyncio.run(asyncio.wait_for(run(), 60)) == 1
    assert threads[0] is not threading.current_thread()


def test_a_service_is_its_generator() -> None:
    generator: Any = ScriptedGenerator()
    ours = EngineService(generator, sampling_defaults={})
    assert (ours.failure, ours.statistics()) == ("lost", "statistics")
    ours.close()
    assert generator.is_closed


class Opening:
    """An engine directory, and what opens it: `config` is what the engine was opened with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, device: str = "cpu", backend: str = "torch") -> None:
        self.config: RuntimeConfig | None = None
        self.store: Any = None
        self.watchers: list[Any] = []
        target = SimpleNamespace(eos_token_ids=(5, 6))
        self.engine: Any = SimpleNamespace(
            path=Path("engine"), manifest=SimpleNamespace(backend=backend, target=target, build_config=LIMITS)
        )
        self.local = SimpleNamespace(limits=LIMITS, watch_prefixes=self.watchers.append, prefix_store=None)
        self.generator = Recorder(Generator)
        self.llm = Recorder(LLM)
        resolved = "dflash_trt.serving.local_engine.checked_config"
        monkeypatch.setattr(resolved, lambda engine, config: config.replaced(device=device))
        monkeypatch.setattr("dflash_trt.serving.local_engine.open_local_engine", self._open)
        monkeypatch.setattr("dflash_trt.serving.llm.open_request_reader", lambda engine: "reader")
        monkeypatch.setattr("dflash_trt.serving.generator.Generator", self.generator)
        monkeypatch.setattr("dflash_trt.serving.llm.LLM", self.llm)
        monkeypatch.setattr(service, "sampling_defaults", lambda engine: {"top_k": 3})

    def _open(self, engine: Any, config: RuntimeConfig, *, make_store: Any, publishes_all: bool) -> Any:
        self.config, self.store = config, (make_store, publishes_all)
        return self.local

    def run(self, runtime: RuntimeConfig, num_replicas: int = 4) -> None:
        watcher: Any = "watcher"
        with pytest.raises(RecordedError):
            open_service(self.engine, runtime, watcher, num_replicas=num_replicas)


def test_a_generator_gets_all_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = Opening(monkeypatch)
    opening.run(RuntimeConfig(seed=8))
    expected = {"engine": opening.local, "reader": "reader", "eos_token_ids": (5, 6), "seed": 8}
    assert opening.generator.arguments == expected
    assert opening.watchers == ["watcher"] and opening.store == (None, False)


def test_over_nixl_a_prefill_worker_sends_all_of_a_prompt_and_a_decode_worker_receives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("BlockSender", "BlockReceiver"):
        monkeypatch.setattr(service, name, type(name, (list,), {"__init__": lambda self, size: self.append(size)}))
    monkeypatch.setattr("dflash_trt.servers.dynamo.roles.check_nixl", lambda: None)
    runtime, watcher = RuntimeConfig(host_cache_bytes=1 << 20), cast(Any, "watcher")
    sizes = {"transfer_bytes": 4000, "transfer_backend": "nixl"}
    for role, made in (("prefill", ("BlockSender", [4000])), ("decode", ("BlockReceiver", [1000]))):
        opening = Opening(monkeypatch)
        opening.local.prefix_root = "ours"
        with pytest.raises(RecordedError):
            open_service(opening.engine, runtime, watcher, role=role, **sizes)  # type: ignore[arg-type]
        make_store, publishes_all = opening.store
        store = make_store("ours", 1000)
        assert (type(store).__name__, store) == made and publishes_all == (role == "prefill")


@pytest.mark.parametrize(
    ("device", "given", "fraction"),
    [
        ("cpu", {}, 0.125),
        ("cuda", {}, None),
        ("cpu", {"kv_cache_bytes": 4096}, None),
        ("cpu", {"kv_cache_free_memory_fraction": 0.25}, 0.25),
    ],
)
def test_replicas_share_the_memory_of_a_cpu(monkeypatch, device, given, fraction) -> None:
    opening = Opening(monkeypatch, device=device)
    opening.run(RuntimeConfig(num_threads=2, **given))
    expected = RuntimeConfig(num_threads=2, device=device, **given).replaced(kv_cache_free_memory_fraction=fraction)
    assert opening.config == expected


def test_an_engine_of_another_runtime_is_opened_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, runtime = Opening(monkeypatch, backend="tensorrt_llm"), RuntimeConfig(seed=8)
    opening.run(runtime)
    given = {name: value for name, value in opening.llm.arguments.items() if value not in (None, {})}
    assert given == {"engine_dir": Path("engine"), "config": runtime}


@pytest.mark.parametrize("backend", ["torch", "tensorrt_llm"])
def test_a_worker_registers_its_limits_and_serves_the_models_defaults(monkeypatch, backend) -> None:
    opening = Opening(monkeypatch, backend=backend)
    made: Any = ScriptedGenerator()
    monkeypatch.setattr("dflash_trt.serving.generator.Generator", lambda *args, **kwargs: made)
    monkeypatch.setattr("dflash_trt.serving.llm.LLM", lambda *args, **kwargs: made)
    watcher: Any = None
    ours, limits = open_service(opening.engine, RuntimeConfig(), watcher)
    has_pages = backend == "torch"
    pages = {"page_size": 16, "num_pages": 12} if has_pages else {"page_size": None, "num_pages": None}
    assert dataclasses.asdict(limits) == {"max_batch_size": 3, "max_seq_len": 64, "max_num_tokens": 48} | pages
    with pytest.raises(RecordedError):
        asyncio.run(first_of(ours.generate({"token_ids": [1]}, "a", lambda: False)))
    assert made.recorder.arguments["sampling_params"].top_k == 3


# Of each field of an output what the last chunk says of it; None where the chunks before had it.
OUTPUT_FIELDS: dict[str, Any] = {
    "request_id": "r", "text": "x", "token_ids": (5, 6, 7, 8), "logprobs": (), "finish_reason": "length",
    "num_prompt_tokens": 90, "num_verify_steps": 3, "num_draft_tokens": 50, "num_accepted_tokens": 11,
    "num_emitted_by_verify": 30, "time_to_first_token_s": 0.1, "total_s": 0.2,
    "statistics": RequestStatistics(queue_time_s=0.5, num_prefix_hit_tokens=64, num_preemptions=2),
    "prompt_logprobs": (None, PromptLogprob(4, -1.5, (TokenLogprob(9, -0.25), TokenLogprob(4, -1.5)))),
}  # fmt: skip
NOT_TOLD = {"error", "steps", "top_logprobs", "sample_index", "other_samples"}  # of a chunk, or of no chunk


def last_chunk(**fields: Any) -> StreamChunk:
    output = GenerationOutput(**OUTPUT_FIELDS | fields)
    return StreamChunk(text="", token_ids=(8,), logprobs=(-0.5,), finish_reason="length", output=output, sample_index=1)


def test_the_last_chunk_has_usage_and_prompt_and_speculation() -> None:
    assert set(OUTPUT_FIELDS) | NOT_TOLD == {field.name for field in dataclasses.fields(GenerationOutput)}
    answer = response(last_chunk(), max_draft_len=2, has_logprobs=True)
    metrics = answer["engine_data"].pop("metrics")["speculative_decoding"]
    assert (metrics["mean_acceptance_length"], metrics["num_spec_steps"]) == (10.0, 3)
    assert answer == {
        "token_ids": [8],
        "index": 1,
        "log_probs": [-0.5],
        "finish_reason": "length",
        "completion_usage": {
            "prompt_tokens": 90,
            "completion_tokens": 4,
            "total_tokens": 94,
            "prompt_tokens_details": {"cached_tokens": 64},
            "completion_tokens_details": {"accepted_prediction_tokens": 11, "rejected_prediction_tokens": 39},
        },
        "engine_data": {
            "prompt_logprobs": [None, {"4": {"logprob": -1.5, "rank": 2}, "9": {"logprob": -0.25, "rank": 1}}]
        },
    }


def test_speculation_is_told_step_by_step_as_in_sum() -> None:
    verified = [(0, 0), (2, 1), (1, 1), (2, 0), (0, 0), (2, 2)]  # candidates and accepted
    steps = tuple(TokenEvent("r", (1,), (), 0, candidates, accepted) for candidates, accepted in verified)
    counts = {"num_verify_steps": 4, "num_draft_tokens": 7, "num_accepted_tokens": 4, "num_emitted_by_verify": 8}
    answer = response(last_chunk(steps=steps, **counts), max_draft_len=2, has_logprobs=False)
    assert answer["engine_data"]["metrics"]["speculative_decoding"] == {
        "num_spec_tokens": 2,
        "num_spec_steps": 4,
        "num_draft_tokens": 7,
        "num_accepted_draft_tokens": 4,
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 4 / 7,
        "acceptance_histogram": [1, 2, 1],
        "per_step_accepted": [1, 1, 0, 2],
        "per_step_drafted": [2, 1, 2, 2],
    }


class Blocks:
    """A publisher that keeps what it is told."""

    def __init__(self) -> None:
        self.stored: dict[int, tuple[int | None, str | None]] = {}

    def publish_stored(self, token_ids, num_block_tokens, block_hashes, parent_hash=None, *, cache_salt=None) -> None:
        assert num_block_tokens == [len(token_ids)]
        self.stored |= dict.fromkeys(block_hashes, (parent_hash, cache_salt))

    def publish_removed(self, block_hashes: list[int]) -> None:
        for block_hash in block_hashes:
            del self.stored[block_hash]


def published(pages: list[tuple[int, int | None, tuple[int, ...], str]], removed: int | None = None) -> Blocks:
    blocks, events = Blocks(), PrefixEvents()
    events.publish_to(blocks)
    for page in pages:
        events.stored(*page)
    if removed is not None:
        events.removed(removed)
    events.start(lambda: None)
    events.close()
    return blocks


def test_blocks_are_the_same_on_every_replica_and_apart_by_salt_parent_and_tokens() -> None:
    """Whatever pages they are in: the router compares the hashes of all replicas."""
    pages: list[tuple[int, int | None, tuple[int, ...], str]] = [
        (parent + child, parent if child else None, tokens, salt)
        for parent, salt in ((0, ""), (10, "a"), (20, "b"))
        for child, tokens in ((0, (1, 2)), (1, (1, 2)), (2, (3, 4)))
    ]
    blocks = published(pages)
    assert Counter(salt for _, salt in blocks.stored.values()) == {None: 3, "a": 3, "b": 3}
    for parent, salt in blocks.stored.values():
        assert parent is None or blocks.stored[parent] == (None, salt)
    moved = [(page + 50, None if parent is None else parent + 50, tokens, salt) for page, parent, tokens, salt in pages]
    assert published(moved).stored == blocks.stored
    assert blocks.stored.items() - published(pages, removed=22).stored.items() == {[*blocks.stored.items()][-1]}


def test_the_publisher_goes_on_after_a_failure_and_ticks_all_the_while(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Blocks):
        def publish_stored(self, token_ids, *args: Any, **kwargs: Any) -> None:
            if token_ids == [1, 2]:
                raise ConnectionError("no router")
            super().publish_stored(token_ids, *args, **kwargs)

    blocks, events, num_ticks = Failing(), PrefixEvents(), threading.Semaphore(0)
    events.stored(9, None, (7, 8), "")  # before there is a publisher
    events.publish_to(blocks)
    events.stored(4, None, (1, 2), "")
    events.stored(5, None, (3, 4), "")
    events.stored(6, 9, (5, 6), "")

    def tick() -> None:
        num_ticks.release()
        raise RuntimeError("no statistics")

    events.start(tick)
    assert all(num_ticks.acquire(timeout=30) for _ in range(3))
    events.close()
    assert len(blocks.stored) == 3 and "the router was not told" in caplog.text


def test_what_was_not_asked_for_is_not_told() -> None:
    answer = response(last_chunk(prompt_logprobs=None), max_draft_len=0, has_logprobs=False)
    assert "engine_data" not in answer and "log_probs" not in answer


def test_reasons_of_the_end_are_the_front_ends() -> None:
    for reason in ("stop", "length", "cancelled"):
        answer = response(last_chunk(finish_reason=reason), max_draft_len=0, has_logprobs=False)
        assert answer["finish_reason"] == reason
    with pytest.raises(RuntimeError, match="ended with timeout"):
        response(last_chunk(finish_reason="timeout"), max_draft_len=0, has_logprobs=False)


def numbered(kind: type, **given: Any) -> Any:
    """An object whose integer fields are all different."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in given]
    return kind(**{name: 101 + index for index, name in enumerate(names)}, **given)


NOTHING = Distribution(count=0, mean=None, p50=None, p90=None, p99=None, max=None)
SCHEDULER: SchedulerStatistics = numbered(
    SchedulerStatistics, num_finished={}, num_steps_by_draft_length={}, acceptance_by_position=()
)
STATISTICS: EngineStatistics = numbered(
    EngineStatistics,
    **{field.name: NOTHING for field in dataclasses.fields(EngineStatistics) if field.type == "Distribution"},
    num_requests_by_finish_reason={"stop": 3, "length": 5},
    scheduler=SCHEDULER,
)
SERIES = {
    "requests_running": STATISTICS.num_running_now,
    "requests_waiting": STATISTICS.num_waiting_now,
    "output_tokens_total": STATISTICS.num_emitted_tokens,
    "failed_steps_total": STATISTICS.num_failed_steps,
    "pages": SCHEDULER.num_pages,
    "pages_in_use": SCHEDULER.num_pages_in_use_now,
    "pages_kept": SCHEDULER.num_pages_kept_now,
    "steps_total": SCHEDULER.num_steps,
    "verify_blocks_total": SCHEDULER.num_verify_blocks,
    "draft_tokens_total": SCHEDULER.num_draft_tokens,
    "accepted_tokens_total": SCHEDULER.num_accepted_tokens,
    "ngram_draft_tokens_total": SCHEDULER.num_ngram_draft_tokens,
    "ngram_accepted_tokens_total": SCHEDULER.num_ngram_accepted_tokens,
    "prompt_tokens_total": SCHEDULER.num_admitted_prompt_tokens,
    "prefix_hit_tokens_total": SCHEDULER.num_prefix_hit_tokens,
    "preemptions_total": SCHEDULER.num_preemptions,
    "evicted_pages_total": SCHEDULER.num_evicted_pages,
    "host_pages_kept": SCHEDULER.num_host_pages_kept_now,
    "offloaded_pages_total": SCHEDULER.num_offloaded_pages,
    "onboarded_pages_total": SCHEDULER.num_onboarded_pages,
    "saved_blocks_total": SCHEDULER.num_saved_blocks,
    "loaded_blocks_total": SCHEDULER.num_loaded_blocks,
}
SPECULATION = {
    "trtllm:spec_accept_length": SCHEDULER.num_emitted_by_verify / SCHEDULER.num_verify_blocks,
    "trtllm:spec_accept_rate": SCHEDULER.num_accepted_tokens / SCHEDULER.num_draft_tokens,
}
ENDED = {("stop",): 3, ("length",): 5}
OF_OTHER_ENGINES = {"requests_running", "requests_waiting", "output_tokens_total", "failed_steps_total"}


def series(statistics: EngineStatistics) -> dict[Any, float]:
    """By name; those of ended requests by their reasons."""

    def read() -> Iterator[tuple[Any, float]]:
        for family in registry_of(lambda: statistics).collect():
            for sample in family.samples:
                yield tuple(sample.labels.values()) or sample.name, sample.value

    return dict(read())


def test_every_series_is_its_own_number() -> None:
    ours = {f"dflash_trt:{name}": value for name, value in SERIES.items()}
    assert series(STATISTICS) == ours | SPECULATION | ENDED


def test_an_engine_with_another_scheduler_has_the_series_of_its_requests() -> None:
    ours = {f"dflash_trt:{name}": value for name, value in SERIES.items() if name in OF_OTHER_ENGINES}
    assert series(dataclasses.replace(STATISTICS, scheduler=None)) == ours | ENDED
    nothing = dataclasses.replace(SCHEDULER, num_verify_blocks=0, num_draft_tokens=0)
    assert not SPECULATION.keys() & series(dataclasses.replace(STATISTICS, scheduler=nothing)).keys()


# Of each setting of a worker another value, and the field of Dynamo's configuration that has it.
SETTINGS: dict[str, tuple[Any, str]] = {
    "namespace": ("production", "namespace"),
    "discovery_backend": ("etcd", "discovery_backend"),
    "request_plane": ("nats", "request_plane"),
    "event_plane": ("nats", "event_plane"),
    "tool_call_parser": ("hermes", "tool_call_parser"),
    "reasoning_parser": ("qwen3", "reasoning_parser"),
    "model_name": ("m", "served_model_name"),
    "component": ("baseline", "component"),
}
OF_THE_ENGINE = {"engine_dir", "runtime", "num_replicas", "card", "id_file", "role", "prefill_min_tokens"}
OF_THE_ENGINE |= {"transfer_backend", "transfer_bytes"}
OF_SOCKETS = {"host"}  # see test_worker_address.py


def test_every_setting_of_a_worker_reaches_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(SETTINGS) | OF_THE_ENGINE | OF_SOCKETS == set(WorkerSettings.model_fields)
    plain = {"engine_dir": Path("e"), "model_name": "plain"}
    for has_template, types in ((True, "chat,completions"), (False, "completions")):
        monkeypatch.setattr(contract, "has_chat_template", lambda card, answer=has_template: answer)
        default = vars(worker_config(WorkerSettings(**plain), Path("card")))
        assert (default["model_name"], default["endpoint_types"]) == ("card", types)
        for name, (value, field) in SETTINGS.items():
            assert value != default[field]
            found = vars(worker_config(WorkerSettings(**plain | {name: value}), Path("card")))
            assert found == default | {field: value}, name


def test_dynamo_knows_what_a_worker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "has_chat_template", lambda card: True)
    roles: dict[str, tuple[str, str]] = {
        "both": ("backend", "AGGREGATED"),
        "prefill": ("prefill", "PREFILL"),
        "decode": ("backend", "DECODE"),
    }
    for role, expected in roles.items():
        settings = WorkerSettings(engine_dir=Path("e"), model_name="m", role=role)  # type: ignore[arg-type]
        config = worker_config(settings, Path("card"))
        assert (config.component, config.disaggregation_mode.name) == expected


@pytest.mark.parametrize(("failed", "code"), [(None, 0), ("lost", 70)])
def test_a_worker_opens_its_engine_as_its_settings_say(monkeypatch, failed, code) -> None:
    settings = WorkerSettings(
        engine_dir=Path("e"),
        runtime=RuntimeConfig(seed=3),
        model_name="m",
        num_replicas=4,
        role="prefill",
        prefill_min_tokens=7,
        transfer_backend="nixl",
        transfer_bytes=123,
        card=Path("card"),
    )
    asked: dict[str, Any] = {}

    def opened(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(open_service).bind(*args, **kwargs)
        call.apply_defaults()
        asked.update(call.arguments)
        return "service", "limits"

    def serve(worker: Any, config: Any) -> None:
        assert (worker._service, worker._limits, worker._card) == ("service", "limits", Path("card"))
        assert worker._events is asked["watcher"] and worker._settings is settings
        worker.failure = failed

    monkeypatch.setattr(contract, "open_service", opened)
    monkeypatch.setattr(contract, "serve", serve)
    monkeypatch.setattr(contract, "has_chat_template", lambda card: True)
    monkeypatch.setattr(contract.EngineDir, "open", lambda path: f"engine {path}")
    assert contract.run_worker(settings) == code
    assert isinstance(asked.pop("watcher"), PrefixEvents)
    expected = {"engine": "engine e", "runtime": settings.runtime, "num_replicas": 4}
    over_nixl = {"transfer_backend": "nixl", "transfer_bytes": 123}
    assert asked == expected | {"role": "prefill", "prefill_min_tokens": 7} | over_nixl


class ScriptedService:
    failure: str | None = None

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.is_closed = False
        self.error: Exception | None = None

    async def generate(self, request: Any, request_id: str, is_stopped: Any) -> Any:
        if self.error is not None:
            raise self.error
        yield {"request": request, "id": request_id, "is_stopped": is_stopped()}

    def statistics(self) -> EngineStatistics:
        return STATISTICS

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def close(self) -> None:
        self.is_closed = True


class ScriptedEvents:
    def __init__(self) -> None:
        self.tick: Any = None
        self.is_closed = False
        self.publish_to = "publish_to"

    def start(self, tick: Any) -> None:
        self.tick = tick

    def close(self) -> None:
        self.is_closed = True


CONTEXT: Any = SimpleNamespace(id=lambda: "front-1", is_stopped=lambda: True)


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    settings = WorkerSettings(engine_dir=Path("e"), model_name="m", id_file=tmp_path / "id")
    limits = RegisteredLimits(max_batch_size=3, max_seq_len=64, max_num_tokens=48, page_size=16, num_pages=12)
    ours, events = ScriptedService(), ScriptedEvents()
    return DynamoEngine(ours, limits, events, settings, Path("card"))  # type: ignore[arg-type]


def test_a_worker_that_starts_tells_its_limits_and_its_id(worker: Any) -> None:
    config = asyncio.run(worker.start(0xAB))
    assert worker._settings.id_file.read_text() == "ab"
    assert worker._events.tick is not None
    assert (config.model, config.served_model_name) == ("card", "m")
    told = ("context_length", "kv_cache_block_size", "total_kv_blocks", "max_num_seqs", "max_num_batched_tokens")
    assert [getattr(config.llm, name) for name in told] == [64, 16, 12, 3, 48]


def test_a_worker_hands_requests_over_and_names_errors(worker: Any) -> None:
    async def run() -> list[Any]:
        return [chunk async for chunk in worker.generate(REQUEST, CONTEXT)]

    assert asyncio.run(run()) == [{"request": REQUEST, "id": "front-1", "is_stopped": True}]
    for error, kind, status in (
        (QueueFullError("full"), "HttpError", 429),
        (RequestError("no"), "InvalidArgument", None),
    ):
        worker._service.error = error
        with pytest.raises(Exception, match=str(error)) as found:
            asyncio.run(run())
        assert type(found.value).__name__ == kind
        assert status is None or found.value.code == status
    asyncio.run(worker.abort(CONTEXT))
    assert worker._service.aborted == ["front-1"]
    asyncio.run(worker.cleanup())
    assert worker._service.is_closed and worker._events.is_closed
    (source,) = asyncio.run(worker.kv_event_sources())
    assert (source.on_ready, source.dp_rank, worker.component_metrics_dp_ranks()) == ("publish_to", 0, [0])


def test_a_worker_registers_the_metrics_of_its_engine(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(contract, "register_engine_registry", lambda *given: registered.append(given))
    asyncio.run(worker.register_prometheus("metrics"))
    ((metrics, registry),) = registered
    assert metrics == "metrics" and registry.get_sample_value("dflash_trt:steps_total") == SCHEDULER.num_steps
    monkeypatch.setattr(ScriptedService, "statistics", lambda self: dataclasses.replace(STATISTICS, scheduler=None))
    worker.attach_snapshot_publisher(None)
    worker._tick()  # an engine of another runtime has no pages
    assert worker.failure is None


def test_a_worker_tells_the_router_how_full_it_is(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[tuple[int, Any]] = []
    worker._tick()  # nobody listens yet
    worker.attach_snapshot_publisher(SimpleNamespace(publish=lambda rank, snapshot: published.append((rank, snapshot))))
    worker._tick()
    ((rank, snapshot),) = published
    in_use, pages = SCHEDULER.num_pages_in_use_now, SCHEDULER.num_pages
    assert (rank, snapshot.dp_rank) == (0, 0)
    assert (snapshot.kv_used_blocks, snapshot.kv_total_blocks) == (in_use, pages)
    assert snapshot.gpu_cache_usage == in_use / pages
    hits = SCHEDULER.num_prefix_hit_tokens / SCHEDULER.num_admitted_prompt_tokens
    assert snapshot.kv_cache_hit_rate == hits
    ended: list[Any] = []
    monkeypatch.setattr("os.kill", lambda *args: ended.append(args))
    worker._service.failure = "lost"
    worker._tick()
    assert worker.failure == "lost" and len(ended) == 1 and len(published) == 1
