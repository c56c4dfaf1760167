"""Worst-case traffic for a limited time: random arrivals, cancellations, slow and dead readers.

Ends by draining the engine and asserting that nothing was lost: no page, no request, no invariant.
"""

import json
import random
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from dflash_trt.cli.runtime_options import runtime_from_options, runtime_options
from dflash_trt.core.errors import RequestError
from dflash_trt.core.request import SamplingParams
from dflash_trt.core.runtime_config import KV_BUDGET, NODES, RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.statistics import EngineStatistics
from dflash_trt.serving.stream import RequestStream

_RUSH = 10  # times as many arrivals
_QUEUE_LEN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakReport:
    """Every request that was sent is in `num_by_outcome`: a finish reason, or "refused" at the door.

    What our scheduler alone counts is None for TensorRT-LLM's.
    """

    duration_s: float
    num_sent: int
    num_by_outcome: dict[str, int]
    num_output_tokens: int
    num_preemptions: int | None
    prefix_hit_fraction: float | None
    num_leaked_pages: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """`mean_gap_s` between arrivals, a tenth of it in every other `rush_s`. Fractions are of all requests."""

    duration_s: float = 60.0
    mean_gap_s: float = 0.05
    rush_s: float = 2.0
    max_prompt_tokens: int = 200
    max_new_tokens: int = 96
    cancelled_fraction: float = 0.25
    slow_fraction: float = 0.2
    forgotten_fraction: float = 0.05
    shared_prefix_fraction: float = 0.4
    has_priorities: bool = True
    drain_timeout_s: float = 120.0
    seed: int = 0


def soak(llm: Generator, vocab_size: int, traffic: Traffic) -> SoakReport:
    """Send traffic for `duration_s`, wait for what is left, count.

    Raises:
        AssertionError: a page leaked, a request vanished, or an invariant of the scheduler broke.
    """
    sender = _Sender(llm, vocab_size, traffic)
    started_s = time.monotonic()
    sender.run()
    sender.join()
    _wait_until_idle(llm, traffic.drain_timeout_s)
    llm.check_integrity()
    outcomes = sender.outcomes
    assert outcomes.total() == sender.num_sent, f"{sender.num_sent} requests sent, {outcomes.total()} accounted for"
    counts = llm.statistics.scheduler
    num_leaked_pages = None if counts is None else counts.num_pages_in_use_now + counts.num_window_pages_in_use_now
    assert not num_leaked_pages, f"{num_leaked_pages} pages leaked"
    num_arrived = sender.num_sent - outcomes["refused"] if counts is None else counts.num_arrivals
    num_finished = llm.statistics.num_requests if counts is None else sum(counts.num_finished.values())
    assert num_arrived == num_finished, f"{num_arrived} arrived, {num_finished} finished"
    return SoakReport(
        duration_s=time.monotonic() - started_s,
        num_sent=sender.num_sent,
        num_by_outcome=dict(outcomes),
        num_output_tokens=sender.num_output_tokens,
        num_preemptions=None if counts is None else counts.num_preemptions,
        prefix_hit_fraction=None if counts is None else counts.prefix_hit_fraction,
        num_leaked_pages=num_leaked_pages,
    )


class _Sender:
    """Starts requests at random moments; each has a reader thread of its own, unless it is forgotten."""

    def __init__(self, llm: Generator, vocab_size: int, traffic: Traffic) -> None:
        self._llm = llm
        self._vocab_size = vocab_size
        self._traffic = traffic
        self._random = random.Random(traffic.seed)
        self._prefix = [self._random.randrange(vocab_size) for _ in range(traffic.max_prompt_tokens // 2)]
        self._readers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.num_output_tokens = 0
        self.num_sent = 0

    def run(self) -> None:
        started_s = time.monotonic()
        while (elapsed_s := time.monotonic() - started_s) < self._traffic.duration_s:
            self._send()
            time.sleep(self._random.expovariate(1 / self._gap_s(elapsed_s)))

    def _gap_s(self, elapsed_s: float) -> float:
        """Rushes are more than any engine of a test can do: requests wait, are preempted and are refused."""
        is_rush = elapsed_s // self._traffic.rush_s % 2 == 1
        return self._traffic.mean_gap_s / (_RUSH if is_rush else 1)

    def join(self) -> None:
        for reader in self._readers:
            reader.join(self._traffic.drain_timeout_s)
            assert not reader.is_alive(), "a reader still waits: its request has vanished"

    def _send(self) -> None:
        self.num_sent += 1
        kind = self._random.random()
        traffic = self._traffic
        priority = self._random.choice((0, 0, 0, 1)) if traffic.has_priorities else 0
        is_forgotten = kind < traffic.forgotten_fraction
        is_slow = not is_forgotten and kind < traffic.forgotten_fraction + traffic.slow_fraction
        try:
            stream = self._llm.submit(self._prompt(), self._sampling(), priority=priority, max_pending_tokens=24)
        except RequestError:
            self._count("refused", 0)
            return
        if is_forgotten:  # no reader: dropping the stream must end the request
            stream.call_when_done(lambda output: self._count(output.finish_reason, len(output.token_ids)))
            return
        reader = threading.Thread(
            target=self._read,
            args=(stream, 0.05 if is_slow else 0.0, self._random.random() < traffic.cancelled_fraction),
            daemon=True,
        )
        reader.start()
        self._readers.append(reader)

    def _read(self, stream: RequestStream, pause_s: float, is_cancelled: bool) -> None:
        for num_chunks, chunk in enumerate(stream):
            if chunk.output is not None:
                self._count(chunk.output.finish_reason, len(chunk.output.token_ids))
            elif is_cancelled and num_chunks == 2:
                stream.cancel()
            time.sleep(pause_s)

    def _count(self, outcome: str, num_tokens: int) -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            self.num_output_tokens += num_tokens

    def _prompt(self) -> list[int]:
        shared = self._prefix if self._random.random() < self._traffic.shared_prefix_fraction else []
        num_own = self._random.randint(1, self._traffic.max_prompt_tokens - len(shared))
        return shared + [self._random.randrange(self._vocab_size) for _ in range(num_own)]

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self._random.randint(1, self._traffic.max_new_tokens),
            temperature=self._random.choice((0.0, 0.0, 0.8)),
            top_p=self._random.choice((1.0, 0.9)),
        )


def _wait_until_idle(llm: Generator, timeout_s: float) -> None:
    """Forgotten requests end a moment after the last reader."""
    end_s = time.monotonic() + timeout_s
    while _num_left(now := llm.statistics):
        assert time.monotonic() < end_s, f"the engine does not come to rest: {now}"
        time.sleep(0.05)


def _num_left(now: EngineStatistics) -> int:
    counts = now.scheduler
    if counts is None:
        return now.num_running_now
    return counts.num_running_now + counts.num_waiting_now + counts.num_paused_now


def _with_small_memory(engine_dir: Path, config: RuntimeConfig) -> RuntimeConfig:
    """Pages for two requests of the longest kind."""
    with LLM(engine_dir, config) as probe:
        manifest, plan = probe.engine.manifest, probe.page_plan
    assert plan is not None
    return config.replaced(
        kv_cache_bytes=plan.bytes_per_token * plan.max_seq_len * 2,
        adaptive_draft_length=bool(
            config.use_drafter and manifest.build_config.max_draft_len and not config.draft_length
        ),
    )


@click.command()
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option(
    "--duration", "duration_s", default=60.0, show_default=True, metavar="SECONDS", help="How long to send traffic."
)
@click.option("--traffic-seed", default=0, show_default=True, help="Seed of the traffic.")
@runtime_options(without=[*KV_BUDGET, *NODES, "adaptive_draft_length", "max_queue_len"])
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def main(engine_dir: Path, duration_s: float, traffic_seed: int, as_json: bool, **runtime: Any) -> None:
    """Random traffic against an engine; fails when a page or a request is lost.

    The K/V memory is kept small, so that requests are preempted and prefixes evicted. Drafting is adaptive unless
    --draft-length says otherwise. With backend tensorrt_llm, whose pages are its own, no request may be lost.
    """
    config = runtime_from_options(runtime).replaced(max_queue_len=_QUEUE_LEN)
    engine = EngineDir.open(engine_dir)
    is_ours = engine.manifest.backend != "tensorrt_llm"
    traffic = Traffic(duration_s=duration_s, seed=traffic_seed, has_priorities=is_ours)
    with LLM(engine_dir, _with_small_memory(engine_dir, config) if is_ours else config) as llm:
        report = soak(llm, engine.manifest.target.vocab_size, traffic)
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
        return
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.num_by_outcome.items()))
    click.echo(f"{report.num_sent} requests in {report.duration_s:.0f} s: {outcomes}")
    if report.num_leaked_pages is None:
        click.echo(f"{report.num_output_tokens} tokens; pages and preemptions are TensorRT-LLM's own")
        return
    click.echo(
        f"{report.num_output_tokens} tokens, {report.num_preemptions} preemptions, "
        f"prefix hits {report.prefix_hit_fraction or 0:.2f} of prompt tokens, leaked pages: {report.num_leaked_pages}"
    )


if __name__ == "__main__":
    main()
