"""`dflash-trt bench`: what an engine does on this machine, measured."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.bench_host import host
from dflash_trt.cli.bench_machine import MACHINE, context_len_of, machine, measure_now, read_machine, roofs_of
from dflash_trt.cli.bench_options import (
    CONCURRENCY,
    FIXED_BY_ROUNDS,
    INPUT,
    JSON,
    LENGTH,
    PER_CLIENT,
    ROUNDS,
    print_reports,
    read_rows,
)
from dflash_trt.cli.bench_serve import serve
from dflash_trt.cli.help_text import examples
from dflash_trt.cli.other_engines import Group
from dflash_trt.cli.runtime_options import runtime_from_options, runtime_options
from dflash_trt.core.draft_lengths import lengths_text
from dflash_trt.core.request import SamplingParams

if TYPE_CHECKING:
    from dflash_trt.bench.speedup import SideReport
    from dflash_trt.bench.throughput import PolicyReport


@click.group(
    cls=Group,
    short_help="Measure an engine on this machine.",
    epilog=examples("dflash-trt bench speedup engine --input-file prompts.jsonl"),
)
def bench() -> None:
    """Measurements that anybody can repeat."""


bench.add_command(host)
bench.add_command(machine)
bench.add_command(serve)


@bench.command(
    short_help="Drafters against each other and none, one batch at a time.",
    epilog=examples(
        "dflash-trt bench speedup engine --input-file prompts.jsonl --concurrency 4",
        "dflash-trt bench speedup engine_dflash engine_eagle3",
    ),
)
@click.argument("engine_dirs", metavar="ENGINE_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@INPUT
@LENGTH
@CONCURRENCY
@ROUNDS
@runtime_options(without=[*FIXED_BY_ROUNDS, "use_drafter", "adaptive_draft_length"])
@MACHINE
@JSON
def speedup(
    engine_dirs: tuple[Path, ...],
    input_file: Path,
    max_new_tokens: int,
    concurrency: int,
    rounds: int,
    machine: Path | None,
    as_json: bool,
    **runtime: Any,
) -> None:
    """Run the same prompts greedily without a drafter and with each engine's, in alternating rounds of one process.

    All sides share scheduler, kernels and target; the autoregressive side is the first engine with its drafter unused,
    for which it pays nothing. Stop tokens are ignored, so that all sides make the same number of tokens. K is each
    engine's max_draft_len, or --draft-length for all.
    """
    from dflash_trt.bench.speedup import compare

    config, rows = runtime_from_options(runtime), read_rows(input_file)
    prompts = [row.prompt for row in rows]
    measured = read_machine(machine)
    reports = compare(
        engine_dirs,
        prompts,
        SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
        config=config,
        concurrency=concurrency,
        num_rounds=rounds,
        categories=[row.category for row in rows],
        progress=lambda line: click.echo(line, err=True),
    )
    at_hand, context_len = measured or measure_now(config), context_len_of(engine_dirs[0], prompts, max_new_tokens)
    rooflines = [
        roofs_of(Path(report.engine_dir), at_hand, config).beside(
            report.output_tok_per_s,
            num_requests=concurrency,
            context_len=context_len,
            num_draft_tokens=report.num_draft_tokens,
            acceptance_length=report.acceptance_length,
            label=_name(report),
        )
        for report in reports
    ]
    if as_json:
        found = [asdict(report) | {"roofline": asdict(roof)} for report, roof in zip(reports, rooflines, strict=True)]
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(
        f"{len(prompts)} prompts, {max_new_tokens} new tokens each, {concurrency} at a time, median of {rounds} rounds"
    )
    click.echo("\n".join([*_table(reports), *map(str, rooflines)]))


@bench.command(
    short_help="Throughput by the number of clients, for each K.",
    epilog=examples("dflash-trt bench throughput engine --input-file prompts.jsonl --concurrency 16"),
)
@click.argument("engine_dir", metavar="ENGINE_DIR", type=click.Path(path_type=Path))
@INPUT
@click.option(
    "--concurrency",
    "concurrencies",
    multiple=True,
    type=click.IntRange(min=1),
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
    type=click.IntRange(min=1),
    default=192,
    show_default=True,
    help="Longest answer in tokens; the mean is a third of it.",
)
@PER_CLIENT
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Measured rounds; one more warms up."
)
@runtime_options(
    without=[*FIXED_BY_ROUNDS, "use_drafter", "adaptive_draft_length", "draft_length", "overlap_scheduling"]
)
@MACHINE
@JSON
def throughput(
    engine_dir: Path,
    input_file: Path,
    concurrencies: tuple[int, ...],
    fixed_lengths: tuple[int, ...],
    max_new_tokens: int,
    requests_per_client: int,
    rounds: int,
    machine: Path | None,
    as_json: bool,
    **runtime: Any,
) -> None:
    """Closed-loop load of N clients with each fixed K and with the adaptive policy, step by step in turn.

    The policies share one executor. The one that has used the least time steps next, so a machine that slows down for a
    while slows all of them. The adaptive policy keeps its estimates from round to round. The last line is the table of
    the best fixed K for --draft-length.
    """
    from dflash_trt.bench.throughput import best_lengths, compare_policies

    config, prompts = runtime_from_options(runtime), [row.prompt for row in read_rows(input_file)]
    measured = read_machine(machine)
    reports = compare_policies(
        engine_dir,
        prompts,
        concurrencies=concurrencies,
        fixed_lengths=fixed_lengths,
        num_rounds=rounds,
        requests_per_client=requests_per_client,
        max_new_tokens=max_new_tokens,
        config=config,
        progress=lambda line: click.echo(line, err=True),
    )
    roofs = roofs_of(engine_dir, measured, config)
    context_len = context_len_of(engine_dir, prompts, max_new_tokens / 3)
    rooflines = [
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
    print_reports(reports, _policies_line, as_json=as_json, rooflines=rooflines)
    if not as_json:
        click.echo(f"draft_length: --draft-length {lengths_text(best_lengths(reports))}, the best fixed K by requests")


def _policies_line(report: "PolicyReport") -> str:
    speeds = "  ".join(f"{speed.policy}: {speed.output_tok_per_s:.0f}" for speed in report.speeds)
    return (
        f"{report.concurrency:3d} clients  tok/s  {speeds}  | adaptive / best fixed ({report.best_fixed}) "
        f"{report.adaptive_to_best_fixed:.3f} ({_listed(report.adaptive_to_best_fixed_by_round)})"
    )


def _name(report: "SideReport") -> str:
    if report.algorithm is None:
        return "autoregressive"
    return f"{report.algorithm}, K = {report.num_draft_tokens} ({Path(report.engine_dir).name})"


def _table(reports: "Sequence[SideReport]") -> list[str]:
    """Speeds of all sides, then what each drafter's drafts came to."""
    width = max(len(_name(report)) for report in reports)
    lines = [f"{'':{width}}     tok/s  speedup  by round"]
    for report in reports:
        speedup = "" if report.algorithm is None else f"{report.speedup:.2f}x  {_listed(report.speedup_by_round)}"
        lines.append(f"{_name(report):{width}}  {report.output_tok_per_s:8.1f}  {speedup:>7}".rstrip())
    for report in reports:
        if report.algorithm is not None:
            lines += ["", *_drafts(report)]
    return lines


def _drafts(report: "SideReport") -> list[str]:
    rates = "  ".join(f"{i}: {rate:.2f}" for i, rate in enumerate(report.accepted_fraction_by_position, start=1))
    lengths = (report.acceptance_length, report.specdec_bench_acceptance_length)
    length, harness = ("none" if value is None else f"{value:.2f}" for value in lengths)
    ends = report.acceptance_length_interval
    interval = "" if ends is None else f" (95% interval over prompts: {ends[0]:.2f} to {ends[1]:.2f})"
    by_category = ", ".join(f"{name} {value:.2f}" for name, value in report.acceptance_length_by_category.items())
    return [
        _name(report),
        f"  acceptance length {length} tokens per verify step, bonus included{interval}",
        f"  by specdec_bench {harness} tokens per step, the prefill's first token a step of 1, mean over requests",
        *([f"  acceptance length by category: {by_category}"] if by_category else []),
        f"  accepted by draft position {rates}",
        f"  equal texts {report.num_equal_texts} of {report.num_prompts}",
        f"  distinct 4-grams {report.distinct_4gram_fraction:.2f} of all",
    ]


def _listed(ratios: "Sequence[float]") -> str:
    return " ".join(f"{ratio:.2f}" for ratio in ratios)
