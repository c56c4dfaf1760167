"""`dflash-trt bench drafters`: drafting algorithms side by side."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.bench_machine import MACHINE, context_len_of, measure_now, read_machine
from dflash_trt.cli.bench_options import CONCURRENCY, FIXED_BY_ROUNDS, INPUT, JSON, LENGTH, ROUNDS, read_prompts
from dflash_trt.cli.help_text import examples
from dflash_trt.cli.runtime_options import runtime_from_options, runtime_options
from dflash_trt.core.request import SamplingParams

if TYPE_CHECKING:
    from dflash_trt.bench.drafters import DrafterReport


@click.command(
    short_help="Engines of one target with other drafters, side by side.",
    epilog=examples("dflash-trt bench drafters engine_dflash engine_eagle3 --input-file prompts.jsonl"),
)
@click.argument("engine_dirs", metavar="ENGINE_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@INPUT
@LENGTH
@CONCURRENCY
@ROUNDS
@runtime_options(without=[*FIXED_BY_ROUNDS, "use_drafter", "adaptive_draft_length"])
@MACHINE
@JSON
def drafters(
    engine_dirs: tuple[Path, ...],
    input_file: Path,
    max_new_tokens: int,
    concurrency: int,
    rounds: int,
    machine: Path | None,
    as_json: bool,
    **runtime: Any,
) -> None:
    """Run the same prompts without a drafter and with each engine's, in alternating rounds of one process, greedily.

    All sides are one scheduler and one set of kernels over the same target; only the drafter differs. The
    autoregressive side is the first engine with its drafter left unused. K is each engine's max_draft_len, or
    --num-draft-tokens for all.
    """
    from dflash_trt.bench.drafters import compare_drafters
    from dflash_trt.bench.roofline import Roofs
    from dflash_trt.engine_dir import EngineDir

    config, prompts = runtime_from_options(runtime), read_prompts(input_file)
    measured = read_machine(machine)
    reports = compare_drafters(
        engine_dirs,
        prompts,
        SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
        config=config,
        concurrency=concurrency,
        num_rounds=rounds,
        progress=lambda line: click.echo(line, err=True),
    )
    at_hand, context_len = measured or measure_now(config), context_len_of(engine_dirs[0], prompts, max_new_tokens)
    rooflines = [
        Roofs(EngineDir.open(Path(report.engine_dir)), at_hand).beside(
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
    width = max(len(_name(report)) for report in reports)
    click.echo(
        f"{'':{width}}     tok/s  speedup  acceptance length  by specdec_bench  equal texts  accepted by draft position"
    )
    for report in reports:
        click.echo(_line(report, width))
    for roof in rooflines:
        click.echo(str(roof))


def _name(report: "DrafterReport") -> str:
    if report.algorithm is None:
        return "autoregressive"
    return f"{report.algorithm}, K = {report.num_draft_tokens} ({Path(report.engine_dir).name})"


def _line(report: "DrafterReport", width: int) -> str:
    lengths = (report.acceptance_length, report.specdec_bench_acceptance_length)
    length, harness = ("" if value is None else f"{value:.2f}" for value in lengths)
    rates = " ".join(f"{rate:.2f}" for rate in report.accepted_fraction_by_position)
    return (
        f"{_name(report):{width}}  {report.output_tok_per_s:8.1f}  {report.speedup:6.2f}x  {length:>17}  {harness:>16}"
        f"  {f'{report.num_equal_texts} of {report.num_prompts}':>11}  {rates}"
    ).rstrip()
