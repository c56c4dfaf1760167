"""`dflash-trt bench throughput`: an engine under a closed load, for each K."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.bench_machine import MACHINE, context_len_of, read_machine, roofs_of
from dflash_trt.cli.bench_options import FIXED_BY_ROUNDS, INPUT, PER_CLIENT
from dflash_trt.cli.bench_report import REPORT, Report, check_paths
from dflash_trt.cli.help_text import COUNT, PATH, examples
from dflash_trt.cli.prompt_source import PromptSource
from dflash_trt.cli.runtime_options import runtime_from_options, runtime_options
from dflash_trt.cli.time_left import TimeLeft
from dflash_trt.core.draft_lengths import lengths_text

if TYPE_CHECKING:
    from dflash_trt.bench.roofline import Roofline, Roofs
    from dflash_trt.bench.throughput import PolicyReport


@click.command(
    short_help="Find the best K for each number of clients.",
    epilog=examples("dflash-trt bench throughput engine --input-file prompts.jsonl --concurrency 16"),
)
@click.argument("engine_dir", metavar="ENGINE_DIR", type=PATH)
@INPUT
@click.option(
    "--concurrency",
    "concurrencies",
    multiple=True,
    type=COUNT,
    default=(1, 4, 16, 64),
    show_default=True,
    help="Number of clients; repeatable.",
)
@click.option(
    "--fixed-lengths",
    multiple=True,
    type=click.IntRange(min=0),
    metavar="K",
    help="Fixed K to compare; repeatable.  [default: 0, 2, 3, 4 and the engine's maximum]",
)
@click.option(
    "--max-new-tokens",
    type=COUNT,
    default=192,
    show_default=True,
    help="Longest answer in tokens; the mean is a third of it.",
)
@PER_CLIENT
@click.option("--rounds", type=COUNT, default=3, show_default=True, help="Measured rounds; one more warms up.")
@runtime_options(
    without=[*FIXED_BY_ROUNDS, "use_drafter", "adaptive_draft_length", "draft_length", "overlap_scheduling"]
)
@MACHINE
@REPORT
def throughput(engine_dir: Path, **options: Any) -> None:
    """Closed-loop load of N clients with each fixed K and with the adaptive policy, step by step in turn.

    The policies share one executor. The one that has used the least time steps next, so a machine that slows down for a
    while slows all of them. The adaptive policy keeps its estimates from round to round. The last line is the table of
    the best fixed K for --draft-length.
    """
    from dflash_trt.bench.throughput import best_lengths, compare_policies
    from dflash_trt.bench.throughput_figure import draw_throughput

    check_paths(options)
    config, machine = runtime_from_options(options), read_machine(options["machine"])
    prompts = [job.prompt for job in PromptSource.of_options(options).jobs()]
    reports = compare_policies(
        engine_dir,
        prompts,
        concurrencies=options["concurrencies"],
        fixed_lengths=options["fixed_lengths"],
        num_rounds=options["rounds"],
        requests_per_client=options["requests_per_client"],
        max_new_tokens=options["max_new_tokens"],
        config=config,
        progress=TimeLeft(),
    )
    context_len = context_len_of(engine_dir, prompts, options["max_new_tokens"] / 3)
    rooflines = _rooflines(reports, roofs_of(engine_dir, machine, config), context_len)
    lengths = lengths_text(best_lengths(reports))
    lines = [
        line
        for report, roofs in zip(reports, rooflines, strict=True)
        for line in (_policies_line(report), *(f"     {roof}" for roof in roofs))
    ]
    workload = (
        f"{len(prompts)} rows of {options['input_file'].name}, at most {options['max_new_tokens']} new tokens each, "
        f"{options['requests_per_client']} requests per client, greedy, median of {options['rounds']} rounds"
    )
    Report(
        rows=[
            asdict(report) | {"rooflines": [asdict(roof) for roof in roofs]}
            for report, roofs in zip(reports, rooflines, strict=True)
        ],
        lines=[*lines, f"draft_length: --draft-length {lengths}, the best fixed K by requests"],
        facts={"workload": workload},
        draw=lambda path, caption: draw_throughput(reports, path, caption),
    ).publish(options)


def _rooflines(reports: "Sequence[PolicyReport]", roofs: "Roofs", context_len: int) -> "list[list[Roofline]]":
    """The floor of each policy's steps under each load."""
    return [
        [
            roofs.beside(
                speed.output_tok_per_s,
                num_requests=report.concurrency,
                context_len=context_len,
                acceptance_length=speed.acceptance_length,
                num_draft_tokens=speed.num_draft_tokens,
                label=speed.policy,
            )
            for speed in report.speeds
        ]
        for report in reports
    ]


def _policies_line(report: "PolicyReport") -> str:
    speeds = "  ".join(f"{speed.policy}: {speed.output_tok_per_s:.0f}" for speed in report.speeds)
    by_round = " ".join(f"{ratio:.2f}" for ratio in report.adaptive_to_best_fixed_by_round)
    return (
        f"{report.concurrency:3d} clients  tok/s  {speeds}  | adaptive / best fixed ({report.best_fixed}) "
        f"{report.adaptive_to_best_fixed:.3f} ({by_round})"
    )
