"""A load on one engine loop, driven without a thread: clients that wait, or arrivals that do not.

The loop's clock may be simulated, or be the CPU time of this thread.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_trt.core.acceptance import acceptance_length
from dflash_trt.core.request import GenerationOutput, Request, SamplingParams
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.stream import RequestStream


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of a request's prompt and answer."""

    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def total(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def request(self, index: int, *, num_shared_tokens: int = 0) -> Request:
        """A request of these lengths. Its first prompt tokens are those of all requests, the others its own."""
        num_own = max(1, self.num_prompt_tokens - num_shared_tokens)
        return Request(
            request_id=str(index),
            prompt_token_ids=(0,) * (self.num_prompt_tokens - num_own) + (index + 1,) * num_own,
            sampling=SamplingParams(max_new_tokens=self.num_output_tokens, ignore_eos=True),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLoad:
    """Either `concurrency` clients in a closed loop, or Poisson arrivals.

    `requests` are used in order. With `reuses_prefixes` the engine has a prefix cache, empty at first.
    """

    requests: Sequence[Request]
    concurrency: int | None = None
    request_rate_per_s: float | None = None
    reuses_prefixes: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.concurrency} clients" if self.concurrency else f"{self.request_rate_per_s:g} requests/s"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """Clients' view of a load. Per user is the median over requests of 1 / TPOT; None without TPOT."""

    num_requests: int
    num_output_tokens: int
    duration_s: float
    output_tok_per_s: float
    tok_per_s_per_user: float | None
    time_to_first_token_p50_s: float
    time_to_first_token_p99_s: float
    time_per_output_token_p50_s: float | None
    time_per_output_token_p99_s: float | None
    acceptance_length: float | None


def drive(
    loop: EngineLoop, load: RequestLoad, *, clock: Callable[[], float], skip_to: Callable[[float], None] | None = None
) -> tuple[list[GenerationOutput], float]:
    """Step the loop until every request has ended; returns outputs, and seconds by the loop's clock.

    `skip_to` lets an idle engine's clock reach the next arrival; closed loops need none.
    """
    clients = _Clients(loop, load)
    started_s = clock()
    while clients.is_busy:
        clients.send(clock())
        if not loop.step() and skip_to is not None and clients.next_arrival_s is not None:
            skip_to(clients.next_arrival_s)
    return clients.outputs, clock() - started_s


def result_of(outputs: Sequence[GenerationOutput], duration_s: float) -> LoadResult:
    """Numbers of a load that has ended."""
    failed = [output.error for output in outputs if output.error is not None]
    assert not failed, failed
    num_tokens = sum(len(output.token_ids) for output in outputs)
    first = [output.time_to_first_token_s for output in outputs]
    per_token = [value for output in outputs if (value := output.inter_token_latency_s)]
    return LoadResult(
        num_requests=len(outputs),
        num_output_tokens=num_tokens,
        duration_s=duration_s,
        output_tok_per_s=num_tokens / duration_s,
        tok_per_s_per_user=float(np.median([1 / value for value in per_token])) if per_token else None,
        time_to_first_token_p50_s=float(np.percentile(first, 50)),
        time_to_first_token_p99_s=float(np.percentile(first, 99)),
        time_per_output_token_p50_s=float(np.percentile(per_token, 50)) if per_token else None,
        time_per_output_token_p99_s=float(np.percentile(per_token, 99)) if per_token else None,
        acceptance_length=acceptance_length(outputs),
    )


class _Clients:
    def __init__(self, loop: EngineLoop, load: RequestLoad) -> None:
        self.outputs: list[GenerationOutput] = []
        self._loop, self._load = loop, load
        self._waiting = deque(load.requests)
        self._streams: dict[str, RequestStream] = {}  # a stream that is forgotten cancels its request
        self._late_s: dict[str, float] = {}  # from the arrival to the turn of the loop that saw it
        self._dice = random.Random(load.seed)
        self.next_arrival_s: float | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._streams)

    def send(self, now_s: float) -> None:
        """Requests that are due: of clients that are free, or those that have arrived."""
        rate = self._load.request_rate_per_s
        if rate is None:
            while self._waiting and len(self._streams) < (self._load.concurrency or 1):
                self._submit(late_s=0.0)
            return
        if self.next_arrival_s is None:
            self.next_arrival_s = now_s
        while self._waiting and self.next_arrival_s <= now_s:
            self._submit(late_s=now_s - self.next_arrival_s)
            self.next_arrival_s += self._dice.expovariate(rate)

    def _submit(self, *, late_s: float) -> None:
        request = self._waiting.popleft()
        self._late_s[request.request_id] = late_s
        stream = self._loop.submit(request)
        self._streams[request.request_id] = stream
        stream.call_when_done(self._finish)

    def _finish(self, output: GenerationOutput) -> None:
        late_s = self._late_s.pop(output.request_id)
        first_s, total_s = output.time_to_first_token_s + late_s, output.total_s + late_s
        self.outputs.append(replace(output, time_to_first_token_s=first_s, total_s=total_s))
        del self._streams[output.request_id]
