"""A load test of `dflash-trt serve`: clients that stream, leave, read slowly, and a replica that is killed.

Every finished text is compared with that of the same engine in this process. At the end no request may run, no page
may be in use, and the memory of the replicas is printed.

    python -m scripts.load_openai build/demo-float32 --clients 256 --seconds 300 --kill
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import openai
import psutil

from dflash_trt import LLM, SamplingParams

_START_S = 120.0
_DRAIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the clients do."""

    clients: int
    seconds: float
    prompts: int
    max_tokens: int
    leave: float  # fraction of requests that their clients leave
    slow: float  # fraction that is read with pauses
    seed: int


@dataclass
class Outcome:
    """What came of it."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0


def prompt_of(index: int) -> str:
    return f"def function_{index}(x):\n"


def expected_texts(engine: Path, plan: Plan) -> list[str]:
    """Of every prompt, by this process alone."""
    sampling = SamplingParams(max_new_tokens=plan.max_tokens, ignore_eos=True)
    with LLM(engine, num_threads=1) as llm:
        return [output.text or "" for output in llm.generate([*map(prompt_of, range(plan.prompts))], sampling)]


async def one_client(url: str, plan: Plan, expected: list[str], outcome: Outcome, number: int, end_s: float) -> None:
    """Requests one after the other until the time is over."""
    dice = random.Random(plan.seed * 1_000_003 + number)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        while time.monotonic() < end_s:
            index = dice.randrange(plan.prompts)
            pause_s = dice.uniform(0.02, 0.2) if dice.random() < plan.slow else 0.0
            num_chunks = dice.randrange(1, 12) if dice.random() < plan.leave else None
            try:
                text, has_ended = await _stream(client, plan, index, pause_s=pause_s, num_chunks=num_chunks)
            except openai.APIError as error:
                outcome.counts[f"failed: {type(error).__name__} {getattr(error, 'status_code', '')}".rstrip()] += 1
                await asyncio.sleep(0.5)
                continue
            outcome.counts["finished" if has_ended else "left"] += 1
            if text != expected[index] if has_ended else not expected[index].startswith(text):
                outcome.wrong.append(f"prompt {index}: {text!r:.60}")


async def _stream(
    client: openai.AsyncOpenAI, plan: Plan, index: int, *, pause_s: float, num_chunks: int | None
) -> tuple[str, bool]:
    """The text, and whether it is complete."""
    fields: dict[str, Any] = {"model": "demo", "max_tokens": plan.max_tokens, "temperature": 0}
    extra = {"ignore_eos": True}
    stream = await client.completions.create(prompt=prompt_of(index), stream=True, extra_body=extra, **fields)
    pieces: list[str] = []
    has_ended = False
    async with stream:
        async for chunk in stream:
            pieces += [choice.text for choice in chunk.choices]
            has_ended = has_ended or any(choice.finish_reason for choice in chunk.choices)
            if num_chunks is not None and len(pieces) >= num_chunks:
                break
            if pause_s:
                await asyncio.sleep(pause_s)
    if num_chunks is None and not has_ended:
        raise openai.APIConnectionError(
            message="the stream ended without a finish_reason", request=stream.response.request
        )
    return "".join(pieces), has_ended


class Service:
    """`dflash-trt serve` as a child process."""

    def __init__(self, engine: Path, *, port: int, replicas: int, options: tuple[str, ...]) -> None:
        self.port, self.replicas = port, replicas
        self.url = f"http://127.0.0.1:{port}"
        words = [sys.executable, "-m", "dflash_trt.cli.main", "serve", str(engine), "--model-name", "demo"]
        words += ["--port", str(port), "--replicas", str(replicas), "--num-threads", "1", *options]
        self.process = subprocess.Popen(words, stdout=sys.stderr)

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + _START_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit("the service did not start")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        """A model can answer, and every replica has metrics."""
        ports = range(self.port + 1, self.port + 1 + self.replicas)
        try:
            answers = [httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5) for port in ports]
            return all(answer.is_success for answer in (*answers, httpx.get(f"{self.url}/health", timeout=5)))
        except httpx.HTTPError:
            return False

    def workers(self) -> list[psutil.Process]:
        """Those that serve metrics, in the order of their ports."""
        ports = {self.port + 1 + replica: replica for replica in range(self.replicas)}
        found = {}
        for process in psutil.Process(self.process.pid).children():
            for entry in process.net_connections("tcp"):
                if entry.status == psutil.CONN_LISTEN and entry.laddr.port in ports:
                    found[ports[entry.laddr.port]] = process
        return [found[replica] for replica in sorted(found)]

    def metric(self, name: str) -> float:
        """The sum over the replicas."""
        total = 0.0
        for replica in range(self.replicas):
            text = httpx.get(f"http://127.0.0.1:{self.port + 1 + replica}/metrics", timeout=10).text
            total += sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name}{{"))
        return total

    def resident_mib(self) -> list[int]:
        return [process.memory_info().rss >> 20 for process in self.workers()]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


async def _memory(service: Service, seconds: float, samples: list[list[int]]) -> None:
    for _ in range(10):
        samples.append(service.resident_mib())
        await asyncio.sleep(seconds / 10)


async def _kill(service: Service, after_s: float) -> None:
    await asyncio.sleep(after_s)
    victim = service.workers()[0]
    click.echo(f"kill -9 {victim.pid}")
    os.kill(victim.pid, signal.SIGKILL)


async def run(service: Service, plan: Plan, expected: list[str], *, kills: bool) -> tuple[Outcome, list[list[int]]]:
    outcome, samples = Outcome(), []
    end_s = time.monotonic() + plan.seconds
    others = [_memory(service, plan.seconds, samples)]
    if kills:
        others.append(_kill(service, plan.seconds / 2))
    clients = [one_client(service.url, plan, expected, outcome, number, end_s) for number in range(plan.clients)]
    await asyncio.gather(*clients, *others)
    return outcome, samples


def leftovers(service: Service) -> dict[str, float]:
    """Requests and pages that the engines still hold, once nobody asks for anything."""
    names = ("dflash_trt:requests_running", "dflash_trt:requests_waiting", "dflash_trt:pages_in_use")
    deadline_s = time.monotonic() + _DRAIN_S
    while True:
        held = {name: service.metric(name) for name in names}
        if not any(held.values()) or time.monotonic() > deadline_s:
            return held
        time.sleep(0.5)


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True))
@click.option("--clients", default=256, show_default=True)
@click.option("--seconds", default=300.0, show_default=True)
@click.option("--prompts", default=64, show_default=True, help="Different prompts.")
@click.option("--max-tokens", default=48, show_default=True)
@click.option("--leave", default=0.1, show_default=True, help="Fraction of requests that their clients leave.")
@click.option("--slow", default=0.1, show_default=True, help="Fraction of streams that are read with pauses.")
@click.option("--replicas", default=2, show_default=True)
@click.option("--port", default=18000, show_default=True)
@click.option("--kill", "kills", is_flag=True, help="Kill a replica with SIGKILL half-way.")
@click.option("--seed", default=0, show_default=True)
@click.argument("options", nargs=-1)
def main(engine: Path, replicas: int, port: int, kills: bool, options: tuple[str, ...], **fields: Any) -> None:
    """Load ENGINE behind `dflash-trt serve`; OPTIONS after -- are those of `serve`. Exit code 1 if anything is wrong.

    The engine should be of dtype float32, or OPTIONS have --deterministic: otherwise texts depend on the batch.
    """
    plan = Plan(**fields)
    expected = expected_texts(engine, plan)
    service = Service(engine, port=port, replicas=replicas, options=options)
    try:
        service.wait_until_ready()
        outcome, samples = asyncio.run(run(service, plan, expected, kills=kills))
        held = leftovers(service)
        click.echo(f"MiB of the replicas: {' '.join('/'.join(map(str, sample)) for sample in samples)}")
    finally:
        code = service.stop()
    failed = {name: count for name, count in outcome.counts.items() if name.startswith("failed")}
    click.echo(f"requests: {dict(outcome.counts)}; wrong texts: {len(outcome.wrong)}; held at the end: {held}")
    for line in outcome.wrong[:10]:
        click.echo(f"  {line}")
    is_wrong = bool(outcome.wrong or any(held.values()) or (failed and not kills) or code != 143)
    click.echo("WRONG" if is_wrong else "all texts equal, nothing held")
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
