"""Compares servers under the same loads, in alternating rounds: the core of `dflash-trt bench serve`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from dflash_trt.bench.conversation import Conversation
from dflash_trt.bench.load_report import Limits, LoadReport, report_of
from dflash_trt.bench.openai_client import OpenAIClient, connected
from dflash_trt.bench.progress import Progress
from dflash_trt.bench.request_load import Load, LoadRun, run_load
from dflash_trt.core.errors import DFlashError

_WARM_UP_TOKENS = 8


class LoadError(DFlashError):
    """No request of a load was answered."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A server by name. `open` starts or finds it and gives its URL. `model` None is the server's first."""

    name: str
    open: Callable[[], AbstractContextManager[str]]
    num_gpus: int | None = None
    model: str | None = None


def sweep_servers(
    sides: Sequence[Side],
    conversations: Sequence[Conversation],
    loads: Sequence[Load],
    *,
    fields: Mapping[str, Any],
    limits: Limits,
    num_rounds: int,
    progress: Progress,
) -> list[LoadReport]:
    """Send every load to every side, `num_rounds` times each; `fields` go into every request.

    A side is opened only for its turn of a round, and warmed up with requests that are not counted. Every round of
    every side sends the same conversations, with the same arrivals.

    Raises:
        ConfigError: there is no server at a URL.
        LoadError: a load got no answer.
    """
    runs: dict[tuple[str, Load], list[LoadRun]] = {}
    num_runs = num_rounds * len(sides) * len(loads)
    for index in range(1, num_rounds + 1):
        for side in sides:
            with side.open() as url:
                turn = _turn(url, conversations, loads, fields=fields, model=side.model, seed=index)
                for load, run in zip(loads, asyncio.run(turn), strict=True):
                    _check(side, load, run)
                    runs.setdefault((side.name, load), []).append(run)
                    number = sum(map(len, runs.values()))
                    progress(number, num_runs, _line(side, load, run, index))
    return [
        report_of(side.name, load, runs[side.name, load], num_gpus=side.num_gpus, limits=limits)
        for side in sides
        for load in loads
    ]


async def _turn(
    url: str,
    conversations: Sequence[Conversation],
    loads: Sequence[Load],
    *,
    fields: Mapping[str, Any],
    model: str | None,
    seed: int,
) -> list[LoadRun]:
    async with connected(url, fields, model=model) as client:
        await _warm_up(client, conversations, max(load.concurrency or 1 for load in loads))
        return [await run_load(client, conversations, load, seed=seed) for load in loads]


async def _warm_up(client: OpenAIClient, conversations: Sequence[Conversation], num_clients: int) -> None:
    chosen = [conversations[index % len(conversations)] for index in range(num_clients)]
    await asyncio.gather(*(client.ask(conversation, max_tokens=_WARM_UP_TOKENS) for conversation in chosen))


def _check(side: Side, load: Load, run: LoadRun) -> None:
    if all(record.error is not None for record in run.records):
        found = f"{len(run.records)} errors, the first: {run.records[0].error}"
        raise LoadError.about(f"{side.name}, {load}", expected="answers", found=found)


def _line(side: Side, load: Load, run: LoadRun, index: int) -> str:
    report = report_of(side.name, load, [run], num_gpus=side.num_gpus, limits=Limits())
    errors = f", {report.num_errors} errors" if report.num_errors else ""
    return f"round {index}, {side.name}, {load}: {report.output_tok_per_s:.0f} tok/s{errors}"
