"""The metrics on Triton's port: which there are, and how they follow from what the engine does.

Counts are gathered here and published a few times per second, because each change of a metric in Triton is a call
into the server's process. Histogram observations are made per request.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dflash_trt.core.request import FinishReason, GenerationOutput
from dflash_trt.serving.output_processor import StreamChunk
from dflash_trt.serving.statistics import EngineStatistics

Kind = Literal["COUNTER", "GAUGE", "HISTOGRAM"]
Key = tuple[str, str]  # name and label value
REFUSED = "refused"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LENGTHS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0)
_NO_LABEL = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One family. `label` is the name of its own label; all have model, version and instance."""

    name: str
    kind: Kind
    help: str
    label: str | None = None
    buckets: tuple[float, ...] = ()


def _metric(kind: Kind, name: str, help: str, *, label: str | None = None, buckets: tuple[float, ...] = ()) -> Metric:
    return Metric(name=f"dflash_trt_{name}", kind=kind, help=help, label=label, buckets=buckets)


REQUESTS = _metric("COUNTER", "requests_total", "Requests that ended, by finish reason", label="finish_reason")
RESPONSES = _metric("COUNTER", "responses_total", "Responses sent, errors included")
PROMPT_TOKENS = _metric("COUNTER", "prompt_tokens_total", "Prompt tokens of requests that ended")
OUTPUT_TOKENS = _metric("COUNTER", "output_tokens_total", "Generated tokens")
VERIFY_BLOCKS = _metric("COUNTER", "verify_blocks_total", "Verify blocks: drafts of one request in one step")
DRAFT_TOKENS = _metric("COUNTER", "draft_tokens_total", "Drafts verified")
ACCEPTED_TOKENS = _metric("COUNTER", "accepted_tokens_total", "Drafts the target agreed with")
NGRAM_DRAFT_TOKENS = _metric("COUNTER", "ngram_draft_tokens_total", "Drafts verified that came from requests' texts")
NGRAM_ACCEPTED_TOKENS = _metric("COUNTER", "ngram_accepted_tokens_total", "Accepted drafts among them")
DRAFT_TOKENS_AT = _metric(
    "COUNTER", "draft_tokens_at_position_total", "Drafts verified, by position from 1", label="position"
)
ACCEPTED_TOKENS_AT = _metric(
    "COUNTER", "accepted_tokens_at_position_total", "Drafts accepted, by position from 1", label="position"
)
PREFIX_HIT_TOKENS = _metric("COUNTER", "prefix_hit_tokens_total", "Prompt tokens that kept prefixes saved")
ADMITTED_TOKENS = _metric("COUNTER", "admitted_prompt_tokens_total", "Prompt tokens of requests that began")
PREEMPTIONS = _metric("COUNTER", "preemptions_total", "Requests sent back to the queue for want of pages")
EVICTED_PAGES = _metric("COUNTER", "evicted_pages_total", "Kept pages given up for new ones")
OFFLOADED_PAGES = _metric("COUNTER", "offloaded_pages_total", "Evicted pages copied to host memory")
ONBOARDED_PAGES = _metric("COUNTER", "onboarded_pages_total", "Pages copied back for a prompt")
SAVED_BLOCKS = _metric("COUNTER", "saved_blocks_total", "Kept pages and snapshots written to disk")
LOADED_BLOCKS = _metric("COUNTER", "loaded_blocks_total", "Kept pages and snapshots read from disk")
STEPS = _metric("COUNTER", "steps_total", "Steps of the engine")
FAILED_STEPS = _metric("COUNTER", "failed_steps_total", "Steps that raised and were run again in parts")

RUNNING = _metric("GAUGE", "requests_running", "Requests that have a place in the batch")
WAITING = _metric("GAUGE", "requests_waiting", "Requests in the queue")
PAGES = _metric("GAUGE", "pages", "K/V pages there are")
PAGES_IN_USE = _metric("GAUGE", "pages_in_use", "K/V pages that requests hold")
PAGES_KEPT = _metric("GAUGE", "pages_kept", "K/V pages that the prefix tree keeps, in use or idle")
HOST_PAGES_KEPT = _metric("GAUGE", "host_pages_kept", "Pages of kept prefixes in host memory")

QUEUE_TIME = _metric("HISTOGRAM", "queue_time_seconds", "From arrival to the first step", buckets=_SECONDS)
FIRST_TOKEN = _metric("HISTOGRAM", "time_to_first_token_seconds", "From arrival to the first token", buckets=_SECONDS)
INTER_TOKEN = _metric(
    "HISTOGRAM", "inter_token_latency_seconds", "A request's mean time per token after the first", buckets=_SECONDS
)
REQUEST_TIME = _metric("HISTOGRAM", "request_time_seconds", "From arrival to the last token", buckets=_SECONDS)
ACCEPTANCE_LENGTH = _metric(
    "HISTOGRAM", "acceptance_length", "A request's mean tokens per verify step, bonus included", buckets=_LENGTHS
)

METRICS: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))


class MetricBook:
    """Thread-safe. `publish` passes on what has changed since it was last called."""

    def __init__(self, series: "Series", *, max_draft_len: int) -> None:
        self._series = series
        self._lock = threading.Lock()
        self._counts: Counter[Key] = Counter()
        self._published: Counter[Key] = Counter()
        self._ended: list[GenerationOutput] = []
        self._published_gauges: dict[str, float] = {}
        reasons = (*get_args(FinishReason), REFUSED)
        positions = [str(position) for position in range(1, max_draft_len + 1)]
        series.open({REQUESTS: reasons, DRAFT_TOKENS_AT: positions, ACCEPTED_TOKENS_AT: positions})

    def add_chunk(self, chunk: StreamChunk) -> None:
        """Count a request's chunk of a step."""
        with self._lock:
            counts = self._counts
            counts[OUTPUT_TOKENS.name, _NO_LABEL] += len(chunk.token_ids)
            if chunk.num_draft_tokens:
                counts[VERIFY_BLOCKS.name, _NO_LABEL] += 1
                counts[DRAFT_TOKENS.name, _NO_LABEL] += chunk.num_draft_tokens
                counts[ACCEPTED_TOKENS.name, _NO_LABEL] += chunk.num_accepted_tokens
                for position in range(1, chunk.num_draft_tokens + 1):
                    counts[DRAFT_TOKENS_AT.name, str(position)] += 1
                    counts[ACCEPTED_TOKENS_AT.name, str(position)] += position <= chunk.num_accepted_tokens
            if chunk.output is not None:
                counts[REQUESTS.name, chunk.output.finish_reason] += 1
                counts[PROMPT_TOKENS.name, _NO_LABEL] += chunk.output.num_prompt_tokens
                self._ended.append(chunk.output)

    def add_response(self) -> None:
        with self._lock:
            self._counts[RESPONSES.name, _NO_LABEL] += 1

    def add_refusal(self) -> None:
        with self._lock:
            self._counts[REQUESTS.name, REFUSED] += 1

    def publish(self, statistics: EngineStatistics) -> None:
        """Called by one thread."""
        scheduler = statistics.scheduler
        engine_counts = {FAILED_STEPS: statistics.num_failed_steps}
        gauges = {RUNNING: statistics.num_running_now, WAITING: statistics.num_waiting_now}
        if scheduler is not None:
            engine_counts |= {
                PREFIX_HIT_TOKENS: scheduler.num_prefix_hit_tokens,
                ADMITTED_TOKENS: scheduler.num_admitted_prompt_tokens,
                PREEMPTIONS: scheduler.num_preemptions,
                EVICTED_PAGES: scheduler.num_evicted_pages,
                OFFLOADED_PAGES: scheduler.num_offloaded_pages,
                ONBOARDED_PAGES: scheduler.num_onboarded_pages,
                SAVED_BLOCKS: scheduler.num_saved_blocks,
                LOADED_BLOCKS: scheduler.num_loaded_blocks,
                STEPS: scheduler.num_steps,
                NGRAM_DRAFT_TOKENS: scheduler.num_ngram_draft_tokens,
                NGRAM_ACCEPTED_TOKENS: scheduler.num_ngram_accepted_tokens,
            }
            gauges |= {
                PAGES: scheduler.num_pages,
                PAGES_IN_USE: scheduler.num_pages_in_use_now,
                PAGES_KEPT: scheduler.num_pages_kept_now,
                HOST_PAGES_KEPT: scheduler.num_host_pages_kept_now,
            }
        with self._lock:
            for metric, count in engine_counts.items():
                self._counts[metric.name, _NO_LABEL] = count
            grown = {key: count - self._published[key] for key, count in self._counts.items()}
            self._published = self._counts.copy()
            ended, self._ended = self._ended, []
        for (name, label), count in grown.items():
            if count:
                self._series.increment(name, label, count)
        for output in ended:
            for metric, value in _observations(output):
                self._series.observe(metric.name, value)
        for metric, now in gauges.items():
            if self._published_gauges.get(metric.name) != now:
                self._published_gauges[metric.name] = now
                self._series.set(metric.name, now)

    def close(self) -> None:
        self._series.close()


def _observations(output: GenerationOutput) -> Iterable[tuple[Metric, float]]:
    yield QUEUE_TIME, output.statistics.queue_time_s
    yield REQUEST_TIME, output.total_s
    if output.token_ids:
        yield FIRST_TOKEN, output.time_to_first_token_s
    if output.inter_token_latency_s is not None:
        yield INTER_TOKEN, output.inter_token_latency_s
    if output.acceptance_length is not None:
        yield ACCEPTANCE_LENGTH, output.acceptance_length


class Series:
    """The metrics inside Triton, through the module `triton_python_backend_utils`."""

    def __init__(self, pb_utils: Any, labels: Mapping[str, str]) -> None:
        self._pb_utils = pb_utils
        self._labels = dict(labels)
        self._families: list[Any] = []
        self._metrics: dict[Key, Any] = {}

    def open(self, label_values: Mapping[Metric, Iterable[str]]) -> None:
        """Make every series, so that each is there from the start, at 0."""
        for metric in METRICS:
            family = self._pb_utils.MetricFamily(
                name=metric.name, description=metric.help, kind=getattr(self._pb_utils.MetricFamily, metric.kind)
            )
            self._families.append(family)
            options = {"buckets": list(metric.buckets)} if metric.kind == "HISTOGRAM" else {}
            for value in label_values[metric] if metric.label else (_NO_LABEL,):
                own = {metric.label: value} if metric.label else {}
                self._metrics[metric.name, value] = family.Metric(labels=self._labels | own, **options)

    def increment(self, name: str, label: str, count: float) -> None:
        self._metrics[name, label].increment(count)

    def set(self, name: str, value: float) -> None:
        self._metrics[name, _NO_LABEL].set(value)

    def observe(self, name: str, value: float) -> None:
        self._metrics[name, _NO_LABEL].observe(value)

    def close(self) -> None:
        """Release metrics before their families: the other order crashes the model's process at exit."""
        self._metrics.clear()
        self._families.clear()
