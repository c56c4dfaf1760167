"""`dflash-trt bench host`: the cost of the host alone."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_trt.cli.bench_report import CSV, JSON, Report, check_paths
from dflash_trt.cli.help_text import COUNT, examples

if TYPE_CHECKING:
    from dflash_trt.bench.host import HostReport


@click.command(
    short_help="Measure the CPU time of a step outside of the model; needs no engine.",
    epilog=examples("dflash-trt bench host --requests 64"),
)
@click.option(
    "--requests",
    "sizes",
    multiple=True,
    type=click.IntRange(1, 4096),
    default=(1, 64, 256),
    show_default=True,
    metavar="N",
    help="Requests that decode at the same time; repeatable.",
)
@click.option("--steps", "num_steps", default=200, show_default=True, type=COUNT, help="Steps to measure.")
@click.option(
    "--draft-length",
    "num_draft_tokens",
    default=7,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="K",
    help="Drafts per step.",
)
@click.option(
    "--ranks",
    "num_ranks",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Ranks of the engine: this process is rank 0, with a worker process for each of the others.",
)
@click.option(
    "--prompt-tokens", "num_prompt_tokens", default=1000, show_default=True, type=COUNT, help="Tokens of every prompt."
)
@CSV
@JSON
def host(sizes: tuple[int, ...], csv_path: Path | None, as_json: bool, **counts: int) -> None:
    """CPU time of the engine's thread per step, with an executor that costs nothing; no engine is needed.

    Medians over steps of verify blocks: all of a step (planning, packing, reading, committing, delivering), and the
    part between two dependent submissions, for which a device could wait.
    """
    from dflash_trt.bench.host import measure_host

    check_paths({"csv_path": csv_path})
    reports = [measure_host(size, is_chained=is_chained, **counts) for size in sizes for is_chained in (True, False)]
    report = Report(rows=[asdict(report) for report in reports], lines=[_host_line(report) for report in reports])
    report.publish({"csv_path": csv_path, "as_json": as_json})


def _host_line(report: "HostReport") -> str:
    loop = "chained loop" if report.is_chained else "plain loop  "
    return (
        f"{report.num_requests:4d} requests, {loop}  {report.step_ms:6.3f} ms per step, "
        f"{report.between_ms:6.3f} ms of it between two submissions"
    )
