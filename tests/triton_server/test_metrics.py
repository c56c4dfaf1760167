"""Which number of the engine becomes which metric: each of them has a value of its own here."""

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from dflash_trt.core.request import GenerationOutput, RequestStatistics
from dflash_trt.scheduler.statistics import SchedulerStatistics
from dflash_trt.servers.triton.metrics import METRICS, MetricBook, Series
from dflash_trt.serving.output_processor import StreamChunk
from dflash_trt.serving.statistics import EngineStatistics, Samples
from tests.triton_server.fake_series import FakeSeries

SCHEDULER = SchedulerStatistics(
    num_arrivals=101,
    num_finished={"stop": 102},
    num_waiting_now=103,
    num_running_now=104,
    num_paused_now=105,
    num_steps=106,
    num_steps_by_draft_length={3: 107},
    num_computed_tokens=108,
    num_verify_blocks=109,
    num_draft_tokens=110,
    num_accepted_tokens=111,
    num_emitted_by_verify=112,
    acceptance_by_position=(0.5,),
    num_preemptions=113,
    num_admitted_prompt_tokens=114,
    num_prefix_hit_tokens=115,
    num_pages=116,
    num_pages_in_use_now=117,
    num_pages_kept_now=118,
    num_evicted_pages=119,
    num_ngram_draft_tokens=120,
    num_ngram_accepted_tokens=121,
    num_host_pages_kept_now=122,
    num_offloaded_pages=123,
    num_onboarded_pages=124,
    num_saved_blocks=125,
    num_loaded_blocks=126,
)
NOTHING = Samples().distribution()
STATISTICS = EngineStatistics(
    uptime_s=201.0,
    num_waiting_now=103,
    num_running_now=104,
    num_requests=202,
    num_requests_by_finish_reason={"stop": 203},
    num_emitted_tokens=204,
    num_failed_steps=205,
    queue_time_s=NOTHING,
    time_to_first_token_s=NOTHING,
    inter_token_latency_s=NOTHING,
    request_time_s=NOTHING,
    step_time_s=NOTHING,
    scheduler=SCHEDULER,
)
OUTPUT = GenerationOutput(
    request_id="r",
    text=None,
    token_ids=(1, 2, 3, 4, 5),
    logprobs=(),
    finish_reason="length",
    num_prompt_tokens=7,
    num_verify_steps=2,
    num_draft_tokens=6,
    num_accepted_tokens=3,
    num_emitted_by_verify=5,
    time_to_first_token_s=1.5,
    total_s=9.5,
    statistics=RequestStatistics(queue_time_s=0.25),
)


@pytest.fixture
def series() -> FakeSeries:
    return FakeSeries()


@pytest.fixture
def book(series: FakeSeries) -> MetricBook:
    return MetricBook(series, max_draft_len=3)  # type: ignore[arg-type]


def changed(series: FakeSeries) -> dict[str, float]:
    return {" ".join(filter(None, name)): value for name, value in series.values.items() if value}


def test_each_count_of_the_engine_is_its_own_metric(book, series) -> None:
    book.publish(STATISTICS)
    assert changed(series) == {
        "requests_waiting": 103,
        "requests_running": 104,
        "steps_total": 106,
        "preemptions_total": 113,
        "admitted_prompt_tokens_total": 114,
        "prefix_hit_tokens_total": 115,
        "pages": 116,
        "pages_in_use": 117,
        "pages_kept": 118,
        "host_pages_kept": 122,
        "evicted_pages_total": 119,
        "offloaded_pages_total": 123,
        "onboarded_pages_total": 124,
        "saved_blocks_total": 125,
        "loaded_blocks_total": 126,
        "ngram_draft_tokens_total": 120,
        "ngram_accepted_tokens_total": 121,
        "failed_steps_total": 205,
    }


def test_counters_grow_by_what_is_new_and_gauges_follow(book, series) -> None:
    book.publish(STATISTICS)
    book.publish(STATISTICS)
    assert series.values["steps_total", ""] == 106
    book.publish(replace(STATISTICS, num_waiting_now=0, scheduler=replace(SCHEDULER, num_steps=126)))
    assert (series.values["steps_total", ""], series.values["requests_waiting", ""]) == (126, 0)


def test_what_a_chunk_gives_is_counted_by_position(book, series) -> None:
    book.add_chunk(StreamChunk(text=None, token_ids=(9,)))  # a prefill's: no verify block
    book.add_chunk(StreamChunk(text=None, token_ids=(1, 2), num_draft_tokens=3, num_accepted_tokens=1))
    book.add_chunk(StreamChunk(text=None, token_ids=(3,), num_draft_tokens=2, num_accepted_tokens=0, output=OUTPUT))
    book.add_response()
    book.add_refusal()
    nothing = replace(
        SCHEDULER, **{name: 0 for name in SCHEDULER.__dataclass_fields__ if isinstance(getattr(SCHEDULER, name), int)}
    )
    idle = {"num_waiting_now": 0, "num_running_now": 0}
    book.publish(replace(STATISTICS, num_failed_steps=0, scheduler=nothing, **idle))
    assert changed(series) == {
        "output_tokens_total": 4,
        "verify_blocks_total": 2,
        "draft_tokens_total": 5,
        "accepted_tokens_total": 1,
        "draft_tokens_at_position_total 1": 2,
        "draft_tokens_at_position_total 2": 2,
        "draft_tokens_at_position_total 3": 1,
        "accepted_tokens_at_position_total 1": 1,
        "prompt_tokens_total": 7,
        "requests_total length": 1,
        "requests_total refused": 1,
        "responses_total": 1,
    }


def test_each_time_of_a_request_goes_to_its_histogram_once(book, series) -> None:
    book.add_chunk(StreamChunk(text=None, token_ids=(), output=OUTPUT))
    book.publish(STATISTICS)
    book.publish(STATISTICS)
    assert Counter(series.observed) == Counter(
        {
            ("queue_time_seconds", 0.25): 1,
            ("time_to_first_token_seconds", 1.5): 1,
            ("inter_token_latency_seconds", 2.0): 1,
            ("request_time_seconds", 9.5): 1,
            ("acceptance_length", 2.5): 1,
        }
    )


def test_a_request_without_tokens_has_no_time_to_first_token(book, series) -> None:
    none = replace(OUTPUT, token_ids=(), finish_reason="timeout", num_verify_steps=0, time_to_first_token_s=0.0)
    book.add_chunk(StreamChunk(text=None, token_ids=(), output=none))
    book.publish(STATISTICS)
    assert series.observed == [("queue_time_seconds", 0.25), ("request_time_seconds", 9.5)]


class FakeFamily:
    """Triton's MetricFamily, as far as it is used."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    made: ClassVar[dict[tuple[str, str], list[dict[str, Any]]]] = {}

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        assert description
        self._made = self.made.setdefault((name, kind), [])

    def Metric(self, **options: Any) -> object:  # noqa: N802 - Triton's name
        self._made.append(options)
        return object()


def test_every_series_is_made_with_its_kind_labels_and_buckets(monkeypatch) -> None:
    monkeypatch.setattr(FakeFamily, "made", {})
    pb_utils = type("pb_utils", (), {"MetricFamily": FakeFamily})
    MetricBook(Series(pb_utils, {"model": "m"}), max_draft_len=2)
    made = FakeFamily.made
    assert {(metric.name, metric.kind.lower()) for metric in METRICS} == made.keys()
    positions = [{"labels": {"model": "m", "position": position}} for position in ("1", "2")]
    assert made["dflash_trt_accepted_tokens_at_position_total", "counter"] == positions
    reasons = [each["labels"]["finish_reason"] for each in made["dflash_trt_requests_total", "counter"]]
    assert reasons == ["stop", "length", "cancelled", "error", "timeout", "refused"]
    assert made["dflash_trt_requests_waiting", "gauge"] == [{"labels": {"model": "m"}}]
    (histogram,) = made["dflash_trt_acceptance_length", "histogram"]
    assert histogram["buckets"] == sorted(histogram["buckets"]) and 2.0 in histogram["buckets"]


def test_each_number_goes_to_its_own_series_until_they_are_closed() -> None:
    told: list[Any] = []
    ended: list[str] = []

    class Told:
        def __init__(self, name: str, labels: dict[str, str]) -> None:
            self._key = (name.removeprefix("dflash_trt_"), *labels.values())

        def __getattr__(self, kind: str) -> Any:
            return lambda value: told.append((kind, *self._key, value))

        def __del__(self) -> None:
            ended.append("series")

    class Family(FakeFamily):
        def __init__(self, *, name: str, description: str, kind: str) -> None:
            self._name = name

        def Metric(self, *, labels: dict[str, str], **options: Any) -> Told:  # noqa: N802
            return Told(self._name, labels)

        def __del__(self) -> None:
            ended.append("family")

    book = MetricBook(Series(type("pb_utils", (), {"MetricFamily": Family}), {}), max_draft_len=2)
    book.add_chunk(StreamChunk(text=None, token_ids=(1, 2), num_draft_tokens=2, num_accepted_tokens=1))
    book.add_refusal()
    book.add_chunk(StreamChunk(text=None, token_ids=(), output=OUTPUT))
    book.publish(replace(STATISTICS, scheduler=None, num_failed_steps=0))
    assert ("increment", "draft_tokens_at_position_total", "2", 1) in told
    assert ("increment", "requests_total", "refused", 1) in told and ("set", "requests_running", 104) in told
    assert ("observe", "request_time_seconds", 9.5) in told and ended == []
    book.close()
    assert ended.index("family") == len(ended) - len(METRICS) and ended.count("series") > len(METRICS)
