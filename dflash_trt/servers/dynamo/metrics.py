"""Metrics of a worker for Prometheus, read from the engine's statistics when they are asked for."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from dflash_trt.serving.statistics import EngineStatistics

# Benchmark clients (aiperf) look for the names of TensorRT-LLM.
_LENGTH = ("trtllm:spec_accept_length", "Mean tokens per verify step, bonus included")
_RATE = ("trtllm:spec_accept_rate", "Fraction of the verified drafts that were accepted")


class EngineCollector(Collector):
    """Collects `statistics()` at every scrape."""

    def __init__(self, statistics: Callable[[], EngineStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Any]:
        statistics = self._statistics()
        for name, help, value in _gauges(statistics):
            if value is not None:
                yield GaugeMetricFamily(name, help, value=value)
        for name, help, count in _counters(statistics):
            yield CounterMetricFamily(name, help, value=count)
        finished = CounterMetricFamily("dflash_trt:requests", "Requests that ended", labels=["finish_reason"])
        for reason, count in statistics.num_requests_by_finish_reason.items():
            finished.add_metric([reason], count)
        yield finished


def registry_of(statistics: Callable[[], EngineStatistics]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(statistics))
    return registry


def _gauges(statistics: EngineStatistics) -> Iterator[tuple[str, str, float | None]]:
    yield "dflash_trt:requests_running", "Requests that have a place in the batch", statistics.num_running_now
    yield "dflash_trt:requests_waiting", "Requests in the queue", statistics.num_waiting_now
    scheduler = statistics.scheduler
    if scheduler is None:
        return
    drafts = scheduler.num_draft_tokens
    yield *_LENGTH, scheduler.acceptance_length
    yield *_RATE, scheduler.num_accepted_tokens / drafts if drafts else None
    yield "dflash_trt:pages", "K/V pages there are", scheduler.num_pages
    yield "dflash_trt:pages_in_use", "K/V pages that requests hold", scheduler.num_pages_in_use_now
    yield "dflash_trt:pages_kept", "K/V pages of the prefix cache, in use or idle", scheduler.num_pages_kept_now
    yield "dflash_trt:host_pages_kept", "Pages of the prefix cache in host memory", scheduler.num_host_pages_kept_now


def _counters(statistics: EngineStatistics) -> Iterator[tuple[str, str, int]]:
    yield "dflash_trt:output_tokens", "Generated tokens of requests that ended", statistics.num_emitted_tokens
    yield "dflash_trt:failed_steps", "Steps that raised and were run again in parts", statistics.num_failed_steps
    scheduler = statistics.scheduler
    if scheduler is None:
        return
    yield "dflash_trt:steps", "Steps of the engine", scheduler.num_steps
    yield "dflash_trt:verify_blocks", "Verify blocks: drafts of one request in one step", scheduler.num_verify_blocks
    yield "dflash_trt:draft_tokens", "Drafts verified", scheduler.num_draft_tokens
    yield "dflash_trt:accepted_tokens", "Drafts the target agreed with", scheduler.num_accepted_tokens
    yield "dflash_trt:ngram_draft_tokens", "Drafts verified that came from texts", scheduler.num_ngram_draft_tokens
    yield "dflash_trt:ngram_accepted_tokens", "Accepted drafts among them", scheduler.num_ngram_accepted_tokens
    yield "dflash_trt:prompt_tokens", "Prompt tokens of requests that began", scheduler.num_admitted_prompt_tokens
    yield "dflash_trt:prefix_hit_tokens", "Prompt tokens that the prefix cache had", scheduler.num_prefix_hit_tokens
    yield "dflash_trt:preemptions", "Requests sent back to the queue for want of pages", scheduler.num_preemptions
    yield "dflash_trt:evicted_pages", "Cached pages evicted for new ones", scheduler.num_evicted_pages
    yield "dflash_trt:offloaded_pages", "Evicted pages copied to host memory", scheduler.num_offloaded_pages
    yield "dflash_trt:onboarded_pages", "Pages copied back for a prompt", scheduler.num_onboarded_pages
    yield "dflash_trt:saved_blocks", "Cached pages and snapshots written to disk", scheduler.num_saved_blocks
    yield "dflash_trt:loaded_blocks", "Cached pages and snapshots read from disk", scheduler.num_loaded_blocks
