"""Loads on a server: closed-loop (N clients) or open-loop (Poisson arrivals)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

from dflash_trt.bench.conversation import Conversation, RequestRecord

if TYPE_CHECKING:
    from dflash_trt.bench.openai_client import OpenAIClient

_LAG_PERIOD_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Either a closed loop of `concurrency` clients, or Poisson arrivals at `request_rate_per_s`."""

    num_conversations: int
    concurrency: int | None = None
    request_rate_per_s: float | None = None

    def __str__(self) -> str:
        return counted_clients(self.concurrency) if self.concurrency else f"{self.request_rate_per_s:g} requests/s"


def counted_clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRun:
    """A load that was sent. `max_client_lag_s` is this process's largest delay for an event of its own."""

    records: tuple[RequestRecord, ...]
    duration_s: float
    max_client_lag_s: float


async def run_load(client: OpenAIClient, conversations: Sequence[Conversation], load: Load, *, seed: int) -> LoadRun:
    """Send `num_conversations` conversations, from the first on. `seed` is the seed of the arrivals.

    The duration is from the first request to the last token, as in aiperf.
    """
    work = islice(cycle(conversations), load.num_conversations)
    lag = _ClientLag()
    watch = asyncio.create_task(lag.watch())
    try:
        if load.concurrency is not None:
            groups = await asyncio.gather(*(_one_client(client, work) for _ in range(load.concurrency)))
        else:
            groups = await _arrivals(client, work, load.request_rate_per_s or 1.0, random.Random(seed))
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
    records = tuple(record for group in groups for record in group)
    started_s, ended_s = min(record.started_s for record in records), max(record.ended_s for record in records)
    return LoadRun(records=records, duration_s=ended_s - started_s, max_client_lag_s=lag.max_s)


async def _one_client(client: OpenAIClient, work: Iterator[Conversation]) -> list[RequestRecord]:
    """Take the next unclaimed conversation when the previous one ends."""
    records: list[RequestRecord] = []
    for conversation in work:
        records += await client.ask(conversation)
    return records


async def _arrivals(
    client: OpenAIClient, work: Iterator[Conversation], rate_per_s: float, dice: random.Random
) -> list[list[RequestRecord]]:
    """Due times do not wait for answers, nor for a client that is late."""
    tasks = []
    due_s = time.perf_counter()
    for conversation in work:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(client.ask(conversation)))
        due_s += dice.expovariate(rate_per_s)
    return await asyncio.gather(*tasks)


class _ClientLag:
    """How late the event loop is: times of a client that is busy itself are not the server's."""

    def __init__(self) -> None:
        self.max_s = 0.0

    async def watch(self) -> None:
        while True:
            due_s = time.perf_counter() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self.max_s = max(self.max_s, time.perf_counter() - due_s)
