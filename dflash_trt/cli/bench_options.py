"""Options that the commands of `dflash-trt bench` share."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dflash_trt.cli.prompts import Defaults, Job, read_jobs
from dflash_trt.core.request import SamplingParams
from dflash_trt.core.runtime_config import NODES, PREFIX_TIERS
from dflash_trt.demo import PROMPTS

if TYPE_CHECKING:
    from dflash_trt.bench.roofline import Roofline

R = TypeVar("R", bound=Any)  # a report, which is a dataclass

# Rounds are greedy, under a closed load, and must not profit from the ones before; they open an engine several times.
FIXED_BY_ROUNDS = ("enable_prefix_caching", "num_state_snapshots", *PREFIX_TIERS, *NODES, "max_queue_len", "seed")

INPUT = click.option(
    "--input-file",
    type=click.Path(path_type=Path),
    default=PROMPTS,
    show_default="16 beginnings of Python functions, which the demo pair was not trained on",
    help="JSONL prompts, as for `run`; sampling fields are ignored.",
)
LENGTH = click.option("--max-new-tokens", default=128, show_default=True, help="Tokens to generate per prompt.")
CONCURRENCY = click.option("--concurrency", default=1, show_default=True, help="Requests running at the same time.")
ROUNDS = click.option("--rounds", default=5, show_default=True, help="Measured rounds, alternating; one more warms up.")
PER_CLIENT = click.option(
    "--requests-per-client",
    type=click.IntRange(min=1),
    default=6,
    show_default=True,
    help="Requests of a client, in sequence.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")


def read_rows(input_file: Path) -> list[Job]:
    return read_jobs(input_file, Defaults(sampling=SamplingParams()))


def print_reports(
    reports: Sequence[R],
    line: Callable[[R], str],
    *,
    as_json: bool,
    rooflines: Sequence[Sequence["Roofline"]] = (),  # per report
) -> None:
    if as_json:
        found = [asdict(report) for report in reports]
        for fields, roofs in zip(found, rooflines, strict=False):
            fields["rooflines"] = [asdict(roof) for roof in roofs]
        click.echo(json.dumps(found, indent=2))
        return
    for index, report in enumerate(reports):
        click.echo(line(report))
        for roof in rooflines[index] if rooflines else ():
            click.echo(f"     {roof}")
