"""`dflash-trt bench speedup`: drafters against each other and none, with a gate on their acceptance."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.bench_machine import MACHINE, measure_now, read_machine, roofs_of
from dflash_trt.cli.bench_options import FIXED_BY_ROUNDS, INPUT, LENGTH, ROUNDS, check_names, conversations_of, named
from dflash_trt.cli.bench_report import REPORT, Report, check_paths, exit_code, gate_lines, gate_rows
from dflash_trt.cli.help_text import COUNT, PATH, LongCommand, Number, NumberRange, examples
from dflash_trt.cli.prompt_source import PromptSource
from dflash_trt.cli.runtime_options import runtime_from_options, runtime_options
from dflash_trt.cli.time_left import TimeLeft
from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.request import SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from dflash_trt.bench.acceptance import Acceptance
    from dflash_trt.bench.comparison import Gate
    from dflash_trt.bench.conversation import Conversation
    from dflash_trt.bench.roofline import Roofline
    from dflash_trt.bench.speedup import SideReport
    from dflash_trt.plan.machine_file import MachineFile

_SAME = ("prompts_sha256", "max_new_tokens")  # facts that a baseline must share


@click.command(
    cls=LongCommand,
    common="input_file categories num_prompts max_new_tokens concurrency temperatures rounds draft_length "
    "baseline min_acceptance_ratio csv_path figure as_json",
    short_help="Compare drafters with each other and with none: speed and acceptance.",
    epilog=examples(
        "dflash-trt bench speedup engine --input-file prompts.jsonl --concurrency 4",
        "dflash-trt bench speedup dflash=engine_a eagle=engine_b --figure acceptance.svg",
        "dflash-trt bench speedup engine --baseline report.json --min-acceptance-ratio 0.98",
    ),
)
@click.argument("sources", metavar="[NAME=]ENGINE_DIR...", nargs=-1, required=True)
@INPUT
@LENGTH
@click.option("--concurrency", type=COUNT, default=1, show_default=True, help="Requests running at the same time.")
@click.option(
    "--temperature",
    "temperatures",
    multiple=True,
    type=NumberRange(min=0),
    default=(0.0,),
    show_default=True,
    help="0 is greedy; repeatable. Sampled texts have new seeds in every round, and all of them count.",
)
@ROUNDS
@click.option(
    "--baseline",
    type=PATH,
    metavar="FILE",
    help="Compare acceptance with an earlier report of --json, of the same prompts and names.",
)
@click.option(
    "--min-acceptance-ratio",
    type=Number(),
    metavar="X",
    help="Gate: acceptance length over the baseline's, or without one over the first drafter's.",
)
@runtime_options(without=[*FIXED_BY_ROUNDS, "use_drafter", "adaptive_draft_length"])
@MACHINE
@REPORT
@click.pass_context
def speedup(context: click.Context, /, sources: tuple[str, ...], **options: Any) -> None:
    """Run the same prompts without a drafter and with each engine's, in alternating rounds of one process.

    All sides share scheduler, kernels and target; the autoregressive side is the first engine with its drafter unused,
    for which it pays nothing. Stop tokens are ignored, so that all sides make the same number of tokens. K is each
    engine's max_draft_len, or --draft-length for all. Intervals are over prompts (bootstrap), those of speedups over
    rounds, too. With a gate, the exit code is 3 if it is missed.
    """
    from dflash_trt.bench.acceptance_figure import draw_acceptance
    from dflash_trt.bench.speedup import compare, sample_warnings

    check_paths(options)
    config, machine = runtime_from_options(options), read_machine(options["machine"])
    conversations = conversations_of(PromptSource.of_options(options).jobs(takes_turns=True))
    engine_dirs, facts = _engine_dirs(sources), _facts(conversations, options)
    baseline = _baseline(options["baseline"], facts, engine_dirs, options["temperatures"])
    if options["min_acceptance_ratio"] is not None and options["baseline"] is None and len(engine_dirs) == 1:
        expected, hint = "--baseline, or several engines", "Pass the report that `bench speedup --json` printed before."
        raise ConfigError.about("--min-acceptance-ratio", expected=expected, found="one engine", hint=hint)
    reports = compare(
        engine_dirs,
        conversations,
        SamplingParams(max_new_tokens=options["max_new_tokens"], ignore_eos=True),
        temperatures=tuple(dict.fromkeys(options["temperatures"])),
        config=config,
        concurrency=options["concurrency"],
        num_rounds=options["rounds"],
        progress=TimeLeft(),
    )
    roofs = _roofs(reports, machine or measure_now(config), config, options)
    ratios = _ratios(reports, baseline)
    gates = _gates(ratios, options["min_acceptance_ratio"])
    Report(
        rows=[asdict(report) | {"roofline": asdict(roof)} for report, roof in zip(reports, roofs, strict=True)],
        lines=[*_table(reports), *map(str, roofs), *_ratio_lines(ratios, options["baseline"]), *gate_lines(gates)],
        facts=facts | ({"baseline_ratios": ratios} if baseline else {}) | {"gates": gate_rows(gates)},
        warnings=sample_warnings(reports),
        draw=lambda path, caption: draw_acceptance(reports, path, caption),
    ).publish(options)
    context.exit(exit_code(gates))


def _engine_dirs(sources: Sequence[str]) -> dict[str, Path]:
    """By name. Raises ConfigError."""
    found = [named(source) for source in sources]
    check_names(["autoregressive", *(name for name, _ in found)], "engines")
    return {name: Path(place) for name, place in found}


def _facts(conversations: "Sequence[Conversation]", options: Mapping[str, Any]) -> dict[str, Any]:
    rows = json.dumps([asdict(conversation) for conversation in conversations], sort_keys=True)
    temperatures = ", ".join(f"{temperature:g}" for temperature in options["temperatures"])
    workload = (
        f"{len(conversations)} rows of {options['input_file'].name}, {options['max_new_tokens']} new tokens each, "
        f"{options['concurrency']} at a time, temperature {temperatures}, median of {options['rounds']} rounds"
    )
    return {
        "workload": workload,
        "prompts_sha256": hashlib.sha256(rows.encode()).hexdigest(),
        "max_new_tokens": options["max_new_tokens"],
    }


def _baseline(
    path: Path | None, facts: Mapping[str, Any], engine_dirs: Mapping[str, Path], temperatures: Sequence[float]
) -> dict[str, float]:
    """Acceptance lengths of an earlier report by the sides' names and temperatures. Raises ConfigError."""
    if path is None:
        return {}
    try:
        told = json.loads(path.read_bytes())
        lengths = {
            _key(report["name"], report["temperature"]): float(report["acceptance"]["length"])
            for report in told["reports"]
            if report["acceptance"]
        }
        before = {name: told[name] for name in _SAME}
    except (OSError, ValueError, LookupError, TypeError) as error:
        expected = "a report that `bench speedup --json` printed"
        raise ConfigError.about("--baseline", expected=expected, found=f"{path}: {error!r}") from error
    problems = [
        problem(
            f"--baseline: {name}",
            expected=f"{before[name]}, as in {path}",
            found=str(facts[name]),
            hint="Measure it again.",
        )
        for name in _SAME
        if before[name] != facts[name]
    ]
    wanted = [_key(name, temperature) for name in engine_dirs for temperature in temperatures]
    if missing := [key for key in wanted if key not in lengths]:
        hint = "Name engines as they were named then: NAME=ENGINE_DIR."
        problems.append(
            problem("--baseline", expected=", ".join(missing), found=", ".join(lengths) or "none", hint=hint)
        )
    raise_all(ConfigError, "--baseline", problems)
    return lengths


def _key(name: str, temperature: float) -> str:
    return f"{name}, T = {temperature:g}" if temperature else name


def _ratios(reports: "Sequence[SideReport]", baseline: Mapping[str, float]) -> dict[str, float | None]:
    """Acceptance lengths over the baseline's, or without one those of other drafters over the first one's."""
    drafted = [report for report in reports if report.algorithm is not None]
    if not baseline:
        others = [report for report in drafted if report.name != drafted[0].name]
        return {_key(report.name, report.temperature): report.acceptance_ratio for report in others}
    return {
        _key(report.name, report.temperature): report.acceptance.length
        / baseline[_key(report.name, report.temperature)]
        if report.acceptance
        else None
        for report in drafted
    }


def _ratio_lines(ratios: Mapping[str, float | None], path: Path | None) -> list[str]:
    if path is None:
        return []
    return [
        f"{key}: acceptance length {'none' if ratio is None else f'{ratio:.3f}'} times that of {path}"
        for key, ratio in ratios.items()
    ]


def _gates(ratios: Mapping[str, float | None], bound: float | None) -> "list[Gate]":
    from dflash_trt.bench.comparison import Gate

    if bound is None:
        return []
    return [
        Gate(name=f"min_acceptance_ratio, {key}", bound=bound, value=ratio, is_upper=False)
        for key, ratio in ratios.items()
    ]


def _roofs(
    reports: "Sequence[SideReport]", machine: "MachineFile", config: RuntimeConfig, options: Mapping[str, Any]
) -> "list[Roofline]":
    """The floor of each side's steps, half way through its answers."""
    return [
        roofs_of(Path(report.engine_dir), machine, config).beside(
            report.output_tok_per_s,
            num_requests=options["concurrency"],
            context_len=round(report.mean_prompt_tokens + options["max_new_tokens"] / 2),
            num_draft_tokens=report.num_draft_tokens,
            acceptance_length=report.acceptance.length if report.acceptance else None,
            label=report.label,
        )
        for report in reports
    ]


def _table(reports: "Sequence[SideReport]") -> list[str]:
    """Speeds of all sides, then what each drafter's drafts came to."""
    width = max(len(report.label) for report in reports)
    lines = [f"{'':{width}}     tok/s  speedup  95% interval  by round"]
    for report in reports:
        line = f"{report.label:{width}}  {report.output_tok_per_s:8.1f}"
        if report.algorithm is not None:
            by_round = " ".join(f"{ratio:.2f}" for ratio in report.speedup_by_round)
            line += f"  {f'{report.speedup:.2f}x':>7}  {report.speedup_interval!s:12}  {by_round}"
        lines.append(line)
    for report in reports:
        if report.algorithm is not None:
            lines += ["", *_drafts(report)]
    return lines


def _drafts(report: "SideReport") -> list[str]:
    found, harness = report.acceptance, report.specdec_bench_acceptance_length
    if found is None:
        return [report.label, "  acceptance length none: no step verified a draft"]
    rates = "  ".join(f"{i}: {rate:.2f}" for i, rate in enumerate(found.by_position, start=1))
    ratio, interval = report.acceptance_ratio, report.acceptance_ratio_interval
    equal = f"{report.num_equal_texts} of {report.num_texts}" if report.num_equal_texts is not None else "not compared"
    return [
        report.label,
        f"  acceptance length {found.length:.2f} tokens per verify step, bonus included "
        f"(95% interval over prompts: {found.length_interval})",
        *([f"  {ratio:.3f} times the first drafter's ({interval})"] if ratio not in (None, 1) else []),
        f"  by specdec_bench {harness:.2f} tokens per step, the prefill's first token a step of 1, mean over requests",
        *_by_group("category", report.acceptance_by_category),
        *_by_group("context length", report.acceptance_by_context_len),
        f"  accepted by draft position {rates}",
        f"  equal texts {equal}",
        f"  distinct 4-grams {report.distinct_4gram_fraction:.2f} of all",
    ]


def _by_group(name: str, groups: "Mapping[str, Acceptance]") -> list[str]:
    words = ", ".join(f"{group} {found.length:.2f} ({found.length_interval})" for group, found in groups.items())
    return [f"  acceptance length by {name}: {words}"] if words else []
