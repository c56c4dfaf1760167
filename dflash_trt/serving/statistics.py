"""Statistics of an engine, for export."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dflash_trt.core.request import FinishReason

if TYPE_CHECKING:
    from dflash_trt.scheduler.statistics import SchedulerStatistics
    from dflash_trt.serving.output_processor import Mailbox

_NUM_RECENT = 4096


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """A quantity: `count` and `mean` since the start, percentiles of the last 4096 values.

    None without values.
    """

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None  # since the start


@dataclass(frozen=True, kw_only=True)
class EngineStatistics:
    """Statistics with times in seconds.

    Inter-token latency is a mean per request, without its first token. `scheduler` has the counts of our scheduler;
    None for an engine with another one.
    """

    uptime_s: float
    num_waiting_now: int
    num_running_now: int
    num_requests: int  # that ended
    num_requests_by_finish_reason: dict[FinishReason, int]
    num_emitted_tokens: int  # in ended requests; without tokens after a stop string, unless the request ended first
    num_failed_steps: int
    queue_time_s: Distribution
    time_to_first_token_s: Distribution
    inter_token_latency_s: Distribution
    request_time_s: Distribution
    step_time_s: Distribution
    scheduler: SchedulerStatistics | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the derived fractions of the scheduler's counts included."""
        fields = asdict(self)
        if self.scheduler is not None:
            fields["scheduler"]["acceptance_length"] = self.scheduler.acceptance_length
            fields["scheduler"]["prefix_hit_fraction"] = self.scheduler.prefix_hit_fraction
        return fields


class Samples:
    """Values of one quantity as they come; bounded memory."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._count = 0
        self._sum = 0.0
        self._max: float | None = None

    def add(self, value: float) -> None:
        self._recent.append(value)
        self._count += 1
        self._sum += value
        self._max = value if self._max is None else max(self._max, value)

    def distribution(self) -> Distribution:
        ordered = sorted(self._recent)
        return Distribution(
            count=self._count,
            mean=self._sum / self._count if self._count else None,
            p50=_percentile(ordered, 0.50),
            p90=_percentile(ordered, 0.90),
            p99=_percentile(ordered, 0.99),
            max=self._max,
        )


class Recorder:
    """Gathers what an engine sees of its requests; a scheduler counts its own."""

    def __init__(self, now: float) -> None:
        self._started_s = now
        self._finish_reasons: Counter[FinishReason] = Counter()
        self._num_emitted_tokens = 0
        self._num_failed_steps = 0
        self._step_time_s = Samples()
        self._queue_time_s = Samples()
        self._time_to_first_token_s = Samples()
        self._inter_token_latency_s = Samples()
        self._request_time_s = Samples()

    def add_step(self, elapsed_s: float | None, *, has_failed: bool) -> None:
        if elapsed_s is not None:
            self._step_time_s.add(elapsed_s)
        self._num_failed_steps += has_failed

    def add(self, mailbox: Mailbox) -> None:
        """Take in a request that ended, as its engine sees it: without text."""
        assert mailbox.last is not None, "only requests that ended count"
        event, ended_s = mailbox.last
        assert event.finish_reason is not None
        self._finish_reasons[event.finish_reason] += 1
        self._num_emitted_tokens += mailbox.num_tokens
        self._request_time_s.add(ended_s - mailbox.arrived_s)
        self._queue_time_s.add(event.statistics.queue_time_s if event.statistics is not None else 0.0)
        if mailbox.first_token_s is not None:
            self._time_to_first_token_s.add(mailbox.first_token_s - mailbox.arrived_s)
            if mailbox.num_tokens > 1:
                self._inter_token_latency_s.add((ended_s - mailbox.first_token_s) / (mailbox.num_tokens - 1))

    def statistics(
        self,
        now: float,
        scheduler: SchedulerStatistics | None = None,
        *,
        num_waiting_now: int = 0,
        num_running_now: int = 0,
    ) -> EngineStatistics:
        """Everything so far. Where there is a `scheduler`, it knows how many requests wait and run."""
        if scheduler is not None:
            num_waiting_now, num_running_now = scheduler.num_waiting_now, scheduler.num_running_now
        return EngineStatistics(
            uptime_s=now - self._started_s,
            num_waiting_now=num_waiting_now,
            num_running_now=num_running_now,
            num_requests=self._finish_reasons.total(),
            num_requests_by_finish_reason=dict(self._finish_reasons),
            num_emitted_tokens=self._num_emitted_tokens,
            num_failed_steps=self._num_failed_steps,
            queue_time_s=self._queue_time_s.distribution(),
            time_to_first_token_s=self._time_to_first_token_s.distribution(),
            inter_token_latency_s=self._inter_token_latency_s.distribution(),
            request_time_s=self._request_time_s.distribution(),
            step_time_s=self._step_time_s.distribution(),
            scheduler=scheduler,
        )


def _percentile(ordered: list[float], fraction: float) -> float | None:
    """Nearest rank: the smallest value that at least this fraction of the values does not exceed."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
