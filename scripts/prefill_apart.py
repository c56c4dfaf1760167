#!/usr/bin/env python3
"""Short requests beside long prompts: two replicas that do everything, against one for prompts and one for answers.

    python -m scripts.prefill_apart build/demo [--seconds 30] [--rounds 3]

Clients of short requests and of long prompts each send one request after the other, over the OpenAI API. The services
take turns, and have one thread for each replica. Every prompt is new.
"""

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dflash_trt.bench.conversation import Conversation, RequestRecord
from dflash_trt.bench.openai_client import OpenAIClient, connected
from scripts.load_openai import Service

SIDES = {
    "together": ("--router-mode", "round-robin"),
    "apart": ("--prefill-workers", "1", "--host-cache-bytes", "256MiB"),
}
SHORT, LONG = (64, 48), (1900, 16)  # tokens of prompts and of answers
VOCAB_SIZE = 500


@contextmanager
def service(engine: Path, options: tuple[str, ...], port: int) -> Iterator[str]:
    running = Service(engine, port=port, replicas=2, options=options)
    try:
        running.wait_until_ready()
        yield running.url
    finally:
        running.process.terminate()
        running.process.wait()


async def client(
    api: OpenAIClient, size: tuple[int, int], numbers: Iterator[int], until_s: float
) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    while time.perf_counter() < until_s:
        dice = random.Random(next(numbers))
        prompt = [dice.randrange(3, VOCAB_SIZE) for _ in range(size[0])]
        records += await api.ask(Conversation(prompt=prompt), max_tokens=size[1])
    return records


async def load(url: str, *, num_short: int, num_long: int, seconds: float, numbers: Iterator[int]) -> list[float]:
    """Milliseconds: of short requests TTFT at p50 and p90, time per token at p50 and p90, of long ones TTFT; tok/s."""
    async with connected(url, {"ignore_eos": True, "temperature": 0}, model="demo") as api:
        await client(api, SHORT, numbers, 0.0)
        until_s = time.perf_counter() + seconds
        found = await asyncio.gather(
            *(client(api, SHORT, numbers, until_s) for _ in range(num_short)),
            *(client(api, LONG, numbers, until_s) for _ in range(num_long)),
        )
    short, long = (list(itertools.chain(*part)) for part in (found[:num_short], found[num_short:]))
    errors = [record.error for record in (*short, *long) if record.error]
    assert not errors, errors[0]
    first_s = [record.time_to_first_token_s for record in short]
    token_s = [(record.ended_s - record.content_s[0]) / (record.num_output_tokens - 1) for record in short]
    rate = sum(record.num_output_tokens for record in short) / seconds
    waits_s = [record.time_to_first_token_s for record in long] or [np.nan]
    times_s = [*np.percentile(first_s, (50, 90)), *np.percentile(token_s, (50, 90)), np.median(waits_s)]
    return [*(1e3 * value for value in times_s), rate, len(long) / seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--short", type=int, default=2, help="clients of short requests")
    parser.add_argument("--long", type=int, default=1, help="clients of long prompts")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8960)
    options = parser.parse_args()
    numbers = itertools.count()
    rows: dict[str, list[list[float]]] = {name: [] for name in SIDES}
    for _ in range(options.rounds):
        for name, words in SIDES.items():
            with service(options.engine, words, options.port) as url:
                sizes = {"num_short": options.short, "num_long": options.long, "seconds": options.seconds}
                rows[name].append(asyncio.run(load(url, numbers=numbers, **sizes)))
    print(
        "| workers | TTFT p50 ms | p90 | ms per token p50 | p90 | TTFT of long prompts | short tok/s | long prompts/s |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, found in rows.items():
        print(f"| {name} | {' | '.join(f'{value:.3g}' for value in np.median(found, axis=0))} |")


if __name__ == "__main__":
    main()
