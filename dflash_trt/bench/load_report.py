"""Clients' view of a load: percentiles of latencies, speeds, goodput, acceptance.

Definitions follow `vllm bench serve` (vllm/benchmarks/serve.py, calculate_metrics) and aiperf
(docs/metrics-reference.md), whose words differ:

    here                      vLLM        aiperf
    time_to_first_token_s     TTFT        time_to_first_token: request sent to the first event with text
    time_per_output_token_s   TPOT        inter_token_latency: (end to end - TTFT) / (output tokens - 1), per request
    inter_token_latency_s     ITL         inter_chunk_latency: between events, all requests together
    end_to_end_s              E2EL        request_latency: request sent to the last event with text
    output_tok_per_s          the same    output_token_throughput: all tokens / duration
    tok_per_s_per_user        -           output_token_throughput_per_user: 1 / TPOT
    goodput                   the same    the same: requests per second within every limit

Percentiles are interpolated linearly, as in numpy and both of them. Failed requests count only in `num_errors` and in
the duration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_trt.bench.acceptance import Acceptance, acceptance, accepted_by_category, counts_of_answers
from dflash_trt.bench.conversation import RequestRecord
from dflash_trt.bench.request_load import Load, LoadRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Percentiles:
    """Percentiles of a latency in seconds, or of a speed."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a good request, in seconds; None means no limit."""

    time_to_first_token_s: float | None = None
    time_per_output_token_s: float | None = None
    end_to_end_s: float | None = None

    def __bool__(self) -> bool:
        return (self.time_to_first_token_s, self.time_per_output_token_s, self.end_to_end_s) != (None, None, None)

    def are_met_by(self, record: RequestRecord) -> bool:
        """A single token has no time per token, which is within every limit, as in vLLM."""
        found = (record.time_to_first_token_s, record.time_per_output_token_s or 0.0, record.end_to_end_s)
        limits = (self.time_to_first_token_s, self.time_per_output_token_s, self.end_to_end_s)
        return all(limit is None or value <= limit for value, limit in zip(found, limits, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """One load on one server, over all rounds. With `num_gpus` None (unknown), speeds are per server."""

    server: str
    concurrency: int | None
    request_rate_per_s: float | None
    num_gpus: int | None
    num_requests: int
    num_errors: int
    first_error: str | None
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    request_per_s: float
    output_tok_per_s: float
    output_tok_per_s_by_round: tuple[float, ...]
    output_tok_per_s_per_gpu: float
    tok_per_s_per_user: Percentiles | None
    time_to_first_token_s: Percentiles | None
    time_per_output_token_s: Percentiles | None
    inter_token_latency_s: Percentiles | None
    end_to_end_s: Percentiles | None
    goodput_request_per_s: float | None
    good_fraction: float | None
    acceptance: Acceptance | None
    acceptance_by_category: Mapping[str, Acceptance] = field(default_factory=dict)
    max_client_lag_s: float = 0.0


def report_of(server: str, load: Load, runs: Sequence[LoadRun], *, num_gpus: int | None, limits: Limits) -> LoadReport:
    """The rounds of one load. Sums are over all rounds; a round without a finished request has no speed."""
    records = [record for run in runs for record in run.records]
    done = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    duration_s = sum(run.duration_s for run in runs)
    num_good = sum(limits.are_met_by(record) for record in done) if limits else None
    output_tok_per_s = _per_s(sum(record.num_output_tokens for record in done), duration_s)
    told = [record for record in done if record.speculation and record.speculation["num_spec_steps"]]
    counts = counts_of_answers([record.speculation or {} for record in told])
    per_token = [value for record in done if (value := record.time_per_output_token_s)]
    return LoadReport(
        server=server,
        concurrency=load.concurrency,
        request_rate_per_s=load.request_rate_per_s,
        num_gpus=num_gpus,
        num_requests=len(done),
        num_errors=len(errors),
        first_error=errors[0] if errors else None,
        duration_s=duration_s,
        num_prompt_tokens=sum(record.num_prompt_tokens for record in done),
        num_output_tokens=sum(record.num_output_tokens for record in done),
        request_per_s=_per_s(len(done), duration_s),
        output_tok_per_s=output_tok_per_s,
        output_tok_per_s_by_round=tuple(_speed(run) for run in runs),
        output_tok_per_s_per_gpu=output_tok_per_s / (num_gpus or 1),
        tok_per_s_per_user=percentiles([1 / value for value in per_token]),
        time_to_first_token_s=percentiles([record.time_to_first_token_s for record in done]),
        time_per_output_token_s=percentiles(per_token),
        inter_token_latency_s=percentiles([gap for record in done for gap in record.gaps_s]),
        end_to_end_s=percentiles([record.end_to_end_s for record in done]),
        goodput_request_per_s=None if num_good is None else _per_s(num_good, duration_s),
        good_fraction=None if num_good is None or not records else num_good / len(records),
        acceptance=acceptance(counts),
        acceptance_by_category=accepted_by_category((record.category for record in told), counts),
        max_client_lag_s=max(run.max_client_lag_s for run in runs),
    )


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """None of nothing."""
    if not values:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Percentiles(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)


def _speed(run: LoadRun) -> float:
    return _per_s(sum(record.num_output_tokens for record in run.records if record.error is None), run.duration_s)


def _per_s(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s else 0.0
