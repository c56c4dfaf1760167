#!/usr/bin/env python3
"""From the end of a prompt on a prefill worker to the first token of a decode worker, with early reading and without.

    python -m scripts.hand_over_wait ENGINE [--tokens 8000] [--rounds 4]

Both workers are in this process, without a front end, and share a directory in memory. The ways take turns, and every
prompt is new. Early, the decode worker has the request from the beginning; late, once the prefill worker has answered.
"""

import argparse
import asyncio
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.servers.dynamo.prefix_events import PrefixEvents
from dflash_trt.servers.dynamo.roles import Role
from dflash_trt.servers.dynamo.rooms import port_of
from dflash_trt.servers.dynamo.service import EngineService, open_service

HOST, VOCAB_SIZE = "127.0.0.1", 500


def opened(engine: Path, role: Role, directory: str) -> EngineService:
    runtime = RuntimeConfig(
        disk_cache_dir=directory, host_cache_bytes=1 << 29, num_threads=1, kv_cache_free_memory_fraction=0.1
    )
    service, _ = open_service(EngineDir.open(engine), runtime, PrefixEvents(), role=role)
    return service


async def first_token_s(service: EngineService, request: dict[str, Any], name: str) -> tuple[float, float]:
    """When its first token came, and when its last item did."""
    times = [time.perf_counter() async for _ in service.generate(request, name, lambda: False)]
    return times[0], times[-1]


async def waits(engine: Path, directory: str, *, num_tokens: int, rounds: int) -> dict[str, list[list[float]]]:
    """Of each way and round: seconds of the prompt, and from its end to the first token."""
    prefill, decode = opened(engine, "prefill", directory), opened(engine, "decode", directory)
    rooms = await prefill.listen(HOST)
    assert rooms is not None
    found: dict[str, list[list[float]]] = {"late": [], "early": []}
    for number in range(2 * rounds):
        way = ("late", "early")[number % 2]
        dice = random.Random(number)
        request: dict[str, Any] = {"token_ids": [dice.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]}
        request |= {"stop_conditions": {"max_tokens": 2, "ignore_eos": True}, "sampling_options": {"temperature": 0}}
        room = {"bootstrap_info": {"bootstrap_host": HOST, "bootstrap_port": port_of(rooms), "bootstrap_room": number}}
        started_s = time.perf_counter()
        if way == "early":
            both = (first_token_s(service, request | room, way) for service in (prefill, decode))
            (ended_s, _), (answered_s, _) = await asyncio.gather(*both)
        else:
            ended_s, _ = await first_token_s(prefill, request, way)
            answered_s, _ = await first_token_s(decode, request, way)
        found[way].append([ended_s - started_s, answered_s - ended_s])
        print(f"{way}: {ended_s - started_s:.2f} s, {1e3 * (answered_s - ended_s):.0f} ms", flush=True)
    rooms.close()
    for service in (prefill, decode):
        await asyncio.to_thread(service.close)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tokens", type=int, default=8000, help="of each prompt")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with TemporaryDirectory(dir="/dev/shm") as directory:
        found = asyncio.run(waits(options.engine, directory, num_tokens=options.tokens, rounds=options.rounds))
    print("| reading | prompt, s | from its end to the first token, ms | of each round |")
    print("|---|---:|---:|---|")
    for way, rows in found.items():
        prompt_s, wait_s = np.median(rows, axis=0)
        each = " ".join(f"{1e3 * wait:.0f}" for _, wait in rows)
        print(f"| {way} | {prompt_s:.3g} | {1e3 * wait_s:.0f} | {each} |")


if __name__ == "__main__":
    main()
