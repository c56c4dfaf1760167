"""`dflash-trt bench`: what an engine does on this machine, measured."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.bench_drafters import drafters
from dflash_trt.cli.bench_host import host
from dflash_trt.cli.bench_machine import MACHINE, context_len_of, machine, read_machine, roofs_of
from dflash_trt.cli.bench_options import (
    CONCURRENCY,
    FIXED_BY_ROUNDS,
    INPUT,
    JSON,
    LENGTH,
    PER_CLIENT,
    ROUNDS,
    print_reports,
    read_prompts,
)
from dflash_trt.cli.bench_serve import serve
from dflash_trt.cli.help_text import examples
from dflash_trt.cli.other_engines import Group
from dflash_trt.cli.runtime_options import runtime_from_options, runtime_options
from dflash_trt.core.draft_lengths import lengths_text
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.request import SamplingParams
from dflash_trt.core.runtime_config import KV_BUDGET, RuntimeConfig

if TYPE_CHECKING:
    from dflash_trt.bench.lockstep import PolicyReport
    from dflash_trt.bench.serving_sweep import ConcurrencyReport
    from dflash_trt.bench.speculation import SpeculationReport

_FIXED_BY_COMPARISONS = (
    *FIXED_BY_ROUNDS,
    "use_drafter",
    "num_draft_tokens",
    "adaptive_draft_length",
    "draft_length",
    "draft_length_by_context",
    "overlap_scheduling",
)
_FIXED_BY_SOAK = (*KV_BUDGET, "adaptive_draft_length", "max_queue_len", "seed")
_SOAK_QUEUE_LEN = 64

_ENGINE = click.argument("engine_dir", metavar="ENGINE_DIR", type=click.Path(path_type=Path))


@click.group(
    cls=Group,
    short_help="Measure an engine on this machine.",
    epilog=examples("dflash-trt bench speedup engine --input-file prompts.jsonl"),
)
def bench() -> None:
    """Measurements that anybody can repeat."""


bench.add_command(drafters)
bench.add_command(host)
bench.add_command(machine)
bench.add_command(serve)


@bench.command(
    short_help="Speculative against autoregressive decoding.",
    epilog=examples("dflash-trt bench speedup engine --input-file prompts.jsonl --concurrency 4"),
)
@_ENGINE
@INPUT
@LENGTH
@CONCURRENCY
@ROUNDS
@runtime_options(without=[*FIXED_BY_ROUNDS, "use_drafter", "adaptive_draft_length"])
@MACHINE
@JSON
def speedup(
    engine_dir: Path,
    input_file: Path,
    max_new_tokens: int,
    concurrency: int,
    rounds: int,
    machine: Path | None,
    as_json: bool,
    **runtime: Any,
) -> None:
    """Run the same prompts with and without the drafter, in alternating rounds of one process, greedily.

    Both sides are the same engine and the same code; the autoregressive side leaves the drafter unused and pays
    nothing for it. Stop tokens are ignored, so that both sides make the same number of tokens.
    """
    from dflash_trt.bench.speculation import compare

    config, prompts = runtime_from_options(runtime), read_prompts(input_file)
    measured = read_machine(machine)
    report = compare(
        engine_dir,
        prompts,
        SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
        config=config,
        concurrency=concurrency,
        num_rounds=rounds,
        progress=lambda line: click.echo(line, err=True),
    )
    roofs = roofs_of(engine_dir, measured, config)
    shape = {"num_requests": concurrency, "context_len": context_len_of(engine_dir, prompts, max_new_tokens)}
    sides = {
        "autoregressive": (report.autoregressive_tok_per_s, None, 0),
        "speculative": (report.speculative_tok_per_s, report.acceptance_length, roofs.fixed_drafts(config)),
    }
    rooflines = [
        roofs.beside(speed, acceptance_length=length, num_draft_tokens=drafts, label=name, **shape)
        for name, (speed, length, drafts) in sides.items()
    ]
    if as_json:
        click.echo(json.dumps(asdict(report) | {"rooflines": [asdict(roof) for roof in rooflines]}, indent=2))
    else:
        click.echo("\n".join([*_lines(report, config), *map(str, rooflines)]))


_POSITIVE = click.IntRange(min=1)
_CLIENTS = click.option(
    "--concurrency",
    "concurrencies",
    multiple=True,
    type=_POSITIVE,
    default=(1, 4, 16, 64),
    show_default=True,
    help="Clients. May be given several times.",
)
_LONGEST = click.option(
    "--max-new-tokens",
    type=_POSITIVE,
    default=192,
    show_default=True,
    help="The longest answer; a third of it on average.",
)
_ROUNDS = click.option(
    "--rounds", type=_POSITIVE, default=3, show_default=True, help="Rounds that count; one more warms up."
)


@bench.command(
    short_help="Throughput by concurrency, in-flight against static batching.",
    epilog=examples("dflash-trt bench serving engine --input-file prompts.jsonl --concurrency 1 --concurrency 16"),
)
@_ENGINE
@INPUT
@_CLIENTS
@_LONGEST
@PER_CLIENT
@_ROUNDS
@runtime_options(without=_FIXED_BY_COMPARISONS)
@MACHINE
@JSON
def serving(
    engine_dir: Path,
    input_file: Path,
    concurrencies: tuple[int, ...],
    max_new_tokens: int,
    requests_per_client: int,
    rounds: int,
    machine: Path | None,
    as_json: bool,
    **runtime: Any,
) -> None:
    """A closed load of so many clients: in-flight against static batching, the overlapped loop against the plain one.

    In-flight and static batching run in lockstep over one executor, the two loops in alternating rounds.
    """
    from dflash_trt.bench.serving_sweep import sweep

    config, prompts = runtime_from_options(runtime), read_prompts(input_file)
    measured = read_machine(machine)
    reports = sweep(
        engine_dir,
        prompts,
        config=config,
        concurrencies=concurrencies,
        num_rounds=rounds,
        requests_per_client=requests_per_client,
        max_new_tokens=max_new_tokens,
        progress=lambda line: click.echo(line, err=True),
    )
    roofs = roofs_of(engine_dir, measured, config)
    context_len = context_len_of(engine_dir, prompts, max_new_tokens / 3)
    rooflines = [
        [
            roofs.beside(
                report.output_tok_per_s,
                num_requests=report.concurrency,
                context_len=context_len,
                acceptance_length=report.acceptance_length,
            )
        ]
        for report in reports
    ]
    print_reports(reports, _serving_line, as_json=as_json, rooflines=rooflines)


@bench.command(
    "draft-length",
    short_help="Adaptive draft length against each fixed K.",
    epilog=examples("dflash-trt bench draft-length engine --input-file prompts.jsonl --fixed-lengths 3"),
)
@_ENGINE
@INPUT
@_CLIENTS
@click.option(
    "--fixed-lengths",
    multiple=True,
    type=click.IntRange(min=0),
    metavar="K",
    help="May be given several times.  [default: 0, 2, 3, 4 and the engine's maximum]",
)
@_LONGEST
@PER_CLIENT
@_ROUNDS
@runtime_options(without=_FIXED_BY_COMPARISONS)
@MACHINE
@JSON
def draft_length(
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
    """A closed load of so many clients on every policy at once, step by step in turn.

    The policies share one executor. Whichever has used the least time steps next, so a machine that slows down for a
    while slows all of them. What the adaptive policy has learned stays from round to round. The last line is the table
    of the best fixed K for --draft-length.
    """
    from dflash_trt.bench.lockstep import best_lengths, compare_policies

    config, prompts = runtime_from_options(runtime), read_prompts(input_file)
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


@bench.command(
    short_help="Random traffic; nothing may be lost.", epilog=examples("dflash-trt bench soak engine --duration 10")
)
@_ENGINE
@click.option(
    "--duration", "duration_s", default=60.0, show_default=True, metavar="SECONDS", help="Length of the traffic."
)
@click.option("--seed", default=0, show_default=True, help="Of the traffic.")
@runtime_options(without=_FIXED_BY_SOAK)
@JSON
def soak(engine_dir: Path, duration_s: float, seed: int, as_json: bool, **runtime: Any) -> None:
    """Random arrivals, cancellations, slow and dead readers. Fails when a page or a request is lost.

    The K/V memory is kept small, so that requests are preempted and prefixes evicted. Drafting is adaptive unless
    --draft-length says otherwise.
    """
    from dflash_trt.bench.soak import Traffic
    from dflash_trt.bench.soak import soak as run_soak
    from dflash_trt.serving.llm import LLM

    config = runtime_from_options(runtime)
    with LLM(engine_dir, config) as probe:
        vocab_size, plan = probe.engine.manifest.target.vocab_size, probe.page_plan
        has_drafter = config.use_drafter and probe.engine.manifest.build_config.max_draft_len > 0
    if plan is None:
        hint = "Soak an engine of backend torch or tensorrt."
        raise ConfigError.about("bench soak", expected="an engine with pages", found="TensorRT-LLM's", hint=hint)
    small = config.replaced(
        kv_cache_bytes=plan.bytes_per_token * plan.max_seq_len * 2,
        adaptive_draft_length=has_drafter and not (config.draft_length or config.draft_length_by_context),
        max_queue_len=_SOAK_QUEUE_LEN,
    )
    with LLM(engine_dir, small) as llm:
        report = run_soak(llm, vocab_size, Traffic(duration_s=duration_s, seed=seed))
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
        return
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.num_by_outcome.items()))
    click.echo(f"{report.num_sent} requests in {report.duration_s:.0f} s: {outcomes}")
    click.echo(
        f"{report.num_output_tokens} tokens, {report.num_preemptions} preemptions, "
        f"prefix hits {report.prefix_hit_fraction or 0:.2f} of prompt tokens, leaked pages: {report.num_leaked_pages}"
    )


def _serving_line(report: "ConcurrencyReport") -> str:
    return (
        f"{report.concurrency:3d} clients  {report.output_tok_per_s:.0f} tok/s, first token after "
        f"{1e3 * report.mean_time_to_first_token_s:.0f} ms  | in-flight / static batching "
        f"{report.in_flight_to_static_batching:.2f} ({_listed(report.in_flight_to_static_batching_by_round)})"
        f"  | overlapped / plain loop {report.overlapped_to_plain:.2f}"
    )


def _policies_line(report: "PolicyReport") -> str:
    speeds = "  ".join(f"{speed.policy}: {speed.output_tok_per_s:.0f}" for speed in report.speeds)
    return (
        f"{report.concurrency:3d} clients  tok/s  {speeds}  | adaptive / best fixed ({report.best_fixed}) "
        f"{report.adaptive_to_best_fixed:.3f} ({_listed(report.adaptive_to_best_fixed_by_round)})"
    )


def _listed(ratios: Sequence[float]) -> str:
    return " ".join(f"{ratio:.2f}" for ratio in ratios)


def _lines(report: "SpeculationReport", config: RuntimeConfig) -> list[str]:
    drafts = lengths_text(config.draft_length) if config.draft_length else report.num_draft_tokens
    rates = "  ".join(f"{i}: {rate:.2f}" for i, rate in enumerate(report.accepted_fraction_by_position, start=1))
    lengths = (report.acceptance_length, report.specdec_bench_acceptance_length)
    length, harness = ("none" if value is None else f"{value:.2f}" for value in lengths)
    return [
        f"{report.num_prompts} prompts, {report.max_new_tokens} new tokens each, {report.concurrency} at a time, "
        f"median of {report.num_rounds} rounds",
        f"autoregressive     {report.autoregressive_tok_per_s:8.1f} tok/s",
        f"speculative, K = {drafts} {report.speculative_tok_per_s:8.1f} tok/s",
        f"speedup            {report.speedup:8.2f} x  "
        f"(rounds: {', '.join(f'{ratio:.2f}' for ratio in report.speedup_by_round)})",
        f"acceptance length  {length:>8} tokens per verify step, bonus included",
        f"by specdec_bench   {harness:>8} tokens per step, the prefill's first token a step of 1, mean over requests",
        f"accepted by draft position: {rates}",
        f"equal texts: {report.num_equal_texts} of {report.num_prompts}",
        f"distinct 4-grams: {report.distinct_4gram_fraction:.2f} of all",
    ]
