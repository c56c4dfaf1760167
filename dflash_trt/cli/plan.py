"""`dflash-trt plan`: does an engine fit a GPU, and how fast can a step be? From config.json alone."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli import plan_advice, plan_sweep
from dflash_trt.cli.build import build, merged_config
from dflash_trt.cli.help_text import PATH, LongCommand, examples
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.expert_exchange import exchange_costs

if TYPE_CHECKING:
    from rich.table import Table

    from dflash_trt.plan.gpus import Gpu
    from dflash_trt.plan.planning import EnginePlan
    from dflash_trt.plan.remedies import Remedy
    from dflash_trt.plan.step_costs import StepCosts
    from dflash_trt.plan.step_floor import Step

_NOT_OF_PLANS = ("config_file", "output", "checked_layers", "compile_for", "overwrite", "as_json")
_ENGINE_OPTIONS = [param for param in build.params if param.name not in _NOT_OF_PLANS]
_ACCEPTANCE_LENGTHS = (2.0, 3.0, 4.0, 5.0)
_CONCURRENCIES = (1, 8, 64)
_STEPS_WIDTH = 110  # columns, where there is no terminal
_CONTEXTS = (1024, 8192, 32768, 131072)


def _numbers(kind: type[int] | type[float]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A reader of numbers of at least 1 that are separated by commas."""

    def read(context: click.Context, option: click.Parameter, text: str | None) -> tuple[float, ...] | None:
        if text is None:
            return None
        try:
            numbers = tuple(kind(word) for word in text.split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(1 <= number < float("inf") for number in numbers):
            expected = "numbers of at least 1, separated by commas"
            raise ConfigError.about(option.opts[0], expected=expected, found=repr(text))
        return numbers

    return read


@click.command(
    cls=LongCommand,
    common="gpu concurrencies contexts acceptance_lengths sweep accepted layouts per_user num_gpus target "
    "drafter quantization kv_cache tp_size max_batch_size max_seq_len as_json",
    short_help="Plan an engine on GPUs: memory, K/V tokens, floors of a step.",
    epilog=examples(
        "dflash-trt plan Qwen/Qwen3-8B --gpu h200",
        "dflash-trt plan gpt-oss-120b-mxfp4 --gpu b300 --gpus 8 --per-user 200 --price 4",
        "dflash-trt plan qwen3-8b-nvfp4 --gpu b300 --sweep --accepted 0.8,0.6,0.45,0.3 --per-user 200",
    ),
)
@click.argument("sources", metavar="[CONFIG.yaml | RECIPE | TARGET [DRAFTER]]", nargs=-1)
@click.option(
    "--gpu", metavar="NAME", help="h100, h200, b200, b300, or a GPU's memory in GiB (default: this machine's)."
)
@click.option("--machine", type=PATH, metavar="FILE", help="Plan for a machine measured with `bench machine`.")
@click.option(
    "--acceptance-length",
    "acceptance_lengths",
    callback=_numbers(float),
    metavar="N,...",
    help="Tokens per verify step, bonus included (default: 2,3,4,5).",
)
@click.option(
    "--concurrency",
    "concurrencies",
    callback=_numbers(int),
    metavar="N,...",
    help="Requests that decode together (default: 1,8,64).",
)
@click.option(
    "--context",
    "contexts",
    callback=_numbers(int),
    metavar="N,...",
    help="Tokens of each request (default: 1024,8192,32768,131072).",
)
@click.option("--sweep", is_flag=True, help="Simulate loads: tok/s per user against tok/s per GPU.")
@plan_sweep.OPTIONS
@plan_advice.OPTIONS
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def plan(
    sources: tuple[str, ...],
    gpu: str | None,
    machine: Path | None,
    acceptance_lengths: tuple[float, ...] | None,
    concurrencies: tuple[int, ...] | None,
    contexts: tuple[int, ...] | None,
    sweep: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Plan the engine that `build` would make of the same options, before any weight is downloaded.

    Sources are a YAML file of `build` or a recipe's name; or a target and its drafter, names on the Hugging Face hub or
    directories, of which config.json is enough.

    With --gpus N it answers for a node: the layout, format, batch and K with the most tok/s, for --per-user and --ttft
    where they are given, alternatives beside it, and commands to paste.

    With --sweep the scheduler runs in simulated time, over steps that take what their kernels take: tok/s per user
    against tok/s per GPU without a drafter and with each, in every --layout. Nothing of it is measured.
    """
    from dflash_trt.checkpoint.pair import read_pair
    from dflash_trt.checkpoint.sources import find_checkpoints
    from dflash_trt.checkpoint.specs import with_draft_window
    from dflash_trt.plan.planning import plan_engine
    from dflash_trt.plan.remedies import remedies

    chosen, costs = _machine(gpu, machine)
    advice, options = ({name: flags.pop(name) for name in kind.OPTIONS.flags} for kind in (plan_advice, plan_sweep))
    plan_sweep.refuse_ranks(options, flags)
    config_file, flags = _with_sources(sources, flags)
    command = plan_advice.BuildCommand.given(config_file, flags)
    config, base_dir = merged_config(config_file, flags)
    of_steps = {"--acceptance-length": acceptance_lengths, "--context": contexts, "--concurrency": concurrencies}
    _refuse_others(sweep, advice, options, [name for name, given in of_steps.items() if given])
    if sweep:
        options["concurrencies"] = concurrencies
        plan_sweep.run_sweep(config, base_dir, chosen, costs, options | {"machine": machine}, as_json=as_json)
        return
    found = find_checkpoints(config, base_dir, needs_tensors=False, say=lambda message: click.echo(message, err=True))
    config, paths = found.config, (found.paths["target"], found.paths.get("drafter"))
    pair = with_draft_window(read_pair(*paths, drafter_overrides=config.drafter_overrides), config.draft_window)
    if advice["num_gpus"] is not None:
        alone = read_pair(paths[0], None)
        plan_advice.run_advice(config, pair, alone, chosen, costs, options | advice, command=command, as_json=as_json)
        return
    made = plan_engine(config, pair, chosen)
    limits = made.build_config
    report = describe(
        made,
        () if made.fits else tuple(remedies(config, pair, chosen)),
        backend=config.backend,
        costs=costs,
        acceptance_lengths=_checked_lengths(acceptance_lengths, limits.max_draft_len),
        concurrencies=concurrencies or _within(_CONCURRENCIES, limits.max_batch_size),
        contexts=contexts or _within(_CONTEXTS, limits.max_seq_len),
    )
    click.echo(json.dumps(report, indent=2)) if as_json else _print(report)


def _refuse_others(sweep: bool, advice: dict[str, Any], options: dict[str, Any], of_steps: Sequence[str]) -> None:
    """Raises ConfigError: options of one kind of plan with another; `of_steps` are those of floors of steps."""
    has_advice = advice["num_gpus"] is not None
    if sweep and has_advice:
        raise ConfigError.about("plan", expected="--sweep or --gpus", found="both")
    allowed = ("--concurrency",) if sweep else ()
    others = [name for name in of_steps if name not in allowed]
    if (sweep or has_advice) and others:
        kind = "--sweep" if sweep else "--gpus"
        hint = "Say --accepted and --prompt-tokens instead."
        raise ConfigError.about(kind, expected="none of the options of steps", found=", ".join(others), hint=hint)
    if not has_advice:
        plan_advice.refuse_options(advice)
    if not sweep:
        plan_sweep.refuse_options(options, allowed=plan_advice.SHARED if has_advice else ())


def _machine(gpu: str | None, machine: Path | None) -> "tuple[Gpu, StepCosts | None]":
    """By default this machine's GPU. Raises ConfigError: there is none, or both are given."""
    if gpu is not None and machine is not None:
        raise ConfigError.about("plan", expected="--gpu NAME or --machine FILE", found="both")
    if machine is not None:
        from dflash_trt.plan.machine_file import read_machine_file

        read = read_machine_file(machine)
        return read.gpu, read.costs
    from dflash_trt.doctor.machine import gpus
    from dflash_trt.plan.gpus import GPUS, gpu_of, named_like

    if gpu is not None:
        return gpu_of(gpu), None
    here = next(iter(gpus()), None)
    named = None if here is None else named_like(here["name"])
    if here is None or not (named or here["memory_mib"].isdigit()):  # some GPUs have no memory of their own: "[N/A]"
        hint = f"Name one: {', '.join(known.name for known in GPUS)}, or its memory in GiB."
        raise ConfigError.about("plan", expected="--gpu NAME, or a GPU in this machine", found="neither", hint=hint)
    click.echo(f"--gpu: this machine's, {here['name']}", err=True)
    return named or gpu_of(f"{int(here['memory_mib']) / 1024:.1f}"), None


def _with_sources(sources: Sequence[str], flags: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The YAML file or the recipe, and the flags with target and drafter."""
    from dflash_trt.recipes import recipe_path

    if len(sources) == 1:
        (source,) = sources
        if recipe_path(source) is not None or source.endswith((".yaml", ".yml")):
            return source, flags
    if len(sources) > 2:
        found = ", ".join(sources)
        raise ConfigError.about("plan", expected="CONFIG.yaml, or TARGET and DRAFTER", found=found)
    given = dict(zip(("target", "drafter"), sources, strict=False))
    doubled = [f"--{role}" for role in given if flags[role] is not None]
    if doubled:
        raise ConfigError(f"plan: {' and '.join(doubled)} and directories without an option are mutually exclusive.")
    return None, flags | {role: _directory(source) for role, source in given.items()}


def _directory(source: str) -> str:
    """The directory that holds a config.json; other sources unchanged."""
    path = Path(source)
    return str(path.parent) if path.name == "config.json" else source


def _checked_lengths(lengths: tuple[float, ...] | None, max_draft_len: int) -> tuple[float, ...]:
    most = max_draft_len + 1
    if lengths is None:
        return tuple(length for length in _ACCEPTANCE_LENGTHS if length <= most) if max_draft_len else ()
    if max(lengths) > most:
        expected = f"at most {most}, max_draft_len {max_draft_len} and the bonus token"
        raise ConfigError.about("--acceptance-length", expected=expected, found=f"{max(lengths):g}")
    return lengths


def _within(numbers: Sequence[int], most: int) -> tuple[int, ...]:
    return tuple(number for number in numbers if number <= most) or (most,)


def describe(
    made: "EnginePlan",
    remedies: Sequence["Remedy"],
    *,
    backend: str,
    costs: "StepCosts | None",
    acceptance_lengths: Sequence[float],
    concurrencies: Sequence[int],
    contexts: Sequence[int],
) -> dict[str, Any]:
    """All results of `plan` as plain JSON types; models, mapping and limits as in `inspect`.

    `costs` are from a machine file. None means a GPU of the table, whose costs are assumed.
    """
    from dflash_trt.cli.inspect import describe_models
    from dflash_trt.plan.step_floor import Step

    config, limits, gpu = made.pretrained_config, made.build_config, made.gpu
    dp_size = config.mapping.dp_size
    steps = dict.fromkeys(
        Step(num_requests=-(-requests // dp_size), context_len=length, num_draft_tokens=limits.max_draft_len)
        for length in contexts
        for requests in concurrencies
        if requests <= made.max_requests(length)
    )
    return {
        "gpu": asdict(gpu),
        "fits": made.fits,
        "missing_bytes": made.missing_bytes,
        "remedies": [{"change": item.change, "kv_tokens": item.plan.num_kv_tokens} for item in remedies],
        "backend": backend,
        "dtype": config.dtype,
        "quantization": None if config.quantization is None else config.quantization.model_dump(mode="json"),
        "mapping": config.mapping.model_dump(exclude={"rank"}),
        **describe_models(config),
        "build_config": limits.model_dump(),
        "rank_memory": _memory(made),
        "kv_tokens": made.num_kv_tokens,
        "kv_pages": None if made.pages is None else asdict(made.pages),
        "max_requests": {str(length): made.max_requests(length) for length in contexts},
        "steps": [] if gpu.bytes_per_s is None else [_step(made, step, acceptance_lengths, costs) for step in steps],
        "notes": list(made.notes),
    }


def _memory(made: "EnginePlan") -> dict[str, int]:
    """Bytes of each rank."""
    pages = made.pages
    of_pages = (0, 0, 0) if pages is None else (pages.total_bytes, pages.slot_bytes, pages.snapshot_bytes)
    known = asdict(made.memory) | dict(zip(("kv_bytes", "state_bytes", "snapshot_bytes"), of_pages, strict=True))
    return {name: (known | {"left_bytes": made.left_bytes})[name] for name in _PARTS}


def _step(
    made: "EnginePlan", step: "Step", acceptance_lengths: Sequence[float], costs: "StepCosts | None"
) -> dict[str, Any]:
    """Floors of verify and autoregressive steps, and the throughput per user that they allow.

    `expected_s` is the estimate of `plan --sweep`'s cost model, of which `reached_fraction` is the floor, and
    `expected_s_by_source` where its parts come from.
    """
    from dflash_trt.plan.step_costs import clock_of
    from dflash_trt.plan.step_floor import Step
    from dflash_trt.plan.step_work import EngineWork

    has_drafter = made.pretrained_config.draft is not None
    floor = made.floor(step, has_drafter=has_drafter)
    moved_by = exchange_costs(made.gpu.capability)
    work = EngineWork(made.pretrained_config, has_drafter=has_drafter, exchange_costs=moved_by).of(step.rows)
    expected = clock_of(made.gpu, costs).time(work)
    plain = Step(num_requests=step.num_requests, context_len=step.context_len, num_draft_tokens=0)
    return {
        "num_requests": step.num_requests * made.pretrained_config.mapping.dp_size,
        "context_len": step.context_len,
        "num_draft_tokens": step.num_draft_tokens,
        **asdict(floor),
        "total_s": floor.total_s,
        "expected_s": expected.device_s,
        "expected_s_by_source": dict(expected.known_s),
        "reached_fraction": floor.total_s / expected.device_s,
        "autoregressive_tok_per_s": 1 / made.floor(plain, has_drafter=False).total_s,
        "tok_per_s_by_acceptance_length": {f"{length:g}": length / floor.total_s for length in acceptance_lengths},
    }


def _print_windows(pages: dict[str, Any]) -> None:
    windows = " and ".join(str(group["window"]) for group in pages["page_windows"])
    if windows:
        text = f"layers with a window of {windows} tokens: pages of their own, for {pages['num_windows']} requests"
        click.echo(text)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.filesize import decimal

    from dflash_trt.cli.inspect import models_table

    console = Console(highlight=False, markup=False)
    ranks = report["mapping"]["world_size"]
    console.print(models_table(report))
    limits = ", ".join(f"{name} {value}" for name, value in report["build_config"].items())
    click.echo(f"limits: {limits}")
    console.print(_memory_table(report))
    gpus = f"{ranks} x {report['gpu']['name']}" if ranks > 1 else report["gpu"]["name"]
    if report["fits"]:
        click.echo(f"fits on {gpus}: K/V pages for {report['kv_tokens']:,} tokens")
        _print_windows(report["kv_pages"])
    else:
        each = "each lacks" if ranks > 1 else "it lacks"
        click.echo(f"does not fit on {gpus}: {each} {decimal(report['missing_bytes'])}")
        for remedy in report["remedies"]:
            console.print(f"fits with {remedy['change']}: K/V pages for {remedy['kv_tokens']:,} tokens")
        if not report["remedies"]:
            console.print("no single change of ranks, format, pages, context or step size makes it fit")
    console.print(_requests_table(report))
    if report["steps"]:
        drafts = report["build_config"]["max_draft_len"]
        title = (
            f"floors of a verify step in ms, K = {drafts}; tok/s per user: autoregressive (AR), by acceptance length"
        )
        click.echo(title)
        Console(highlight=False, markup=False, width=max(console.width, _STEPS_WIDTH)).print(_steps_table(report))
        sources = ", ".join(dict.fromkeys(name for step in report["steps"] for name in step["expected_s_by_source"]))
        reach = f"Reach: the part of a step that its floor takes. Times of a step: {sources}"
        click.echo(f"No kernel is below a floor. {reach}")
    for note in report["notes"]:
        click.echo(f"note: {note}")


_PARTS = {
    "weights_bytes": "weights",
    "context_bytes": "CUDA context and kernels (assumed)",
    "buffers_bytes": "inputs, outputs and logit rules",
    "workspace_bytes": "workspaces of attention and sampling",
    "activations_bytes": "activations of the largest step",
    "graph_pool_bytes": "activations of CUDA graphs",
    "kv_bytes": "K/V pages",
    "state_bytes": "recurrent state",
    "snapshot_bytes": "snapshots of it, for prefixes",
    "left_bytes": "left over",
}
_OF_HYBRIDS = ("state_bytes", "snapshot_bytes")


def _memory_table(report: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table("memory of each rank", "GiB", show_footer=True)
    for name, title in _PARTS.items():
        if name in _OF_HYBRIDS and not report["rank_memory"][name]:
            continue
        table.add_row(title, f"{report['rank_memory'][name] / 2**30:.2f}")
    table.columns[0].footer = f"one {report['gpu']['name']}"
    table.columns[1].footer = f"{report['gpu']['memory_bytes'] / 2**30:.2f}"
    table.columns[1].justify = "right"
    return table


def _requests_table(report: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table("tokens of a request", *(f"{int(length):,}" for length in report["max_requests"]))
    table.add_row("requests at once", *(f"{count:,}" for count in report["max_requests"].values()))
    return table


def _steps_table(report: dict[str, Any]) -> "Table":
    """Floors of steps, and what they allow each user."""
    from rich.table import Table

    lengths = report["steps"][0]["tok_per_s_by_acceptance_length"]
    has_links = any(step["exchange_s"] for step in report["steps"])
    links = ["links"] if has_links else []
    table = Table("batch x context", "GB", "memory", "compute", *links, "reach", "AR", *lengths)
    for column in table.columns:
        column.no_wrap = True
    for step in report["steps"]:
        table.add_row(
            f"{step['num_requests']} x {step['context_len']:,}",
            f"{(step['weights_bytes'] + step['kv_bytes']) / 1e9:.1f}",
            f"{1e3 * step['memory_s']:.2f}",
            f"{1e3 * step['compute_s']:.2f}",
            *([f"{1e3 * step['exchange_s']:.2f}"] if has_links else []),
            f"{step['reached_fraction']:.0%}",
            f"{step['autoregressive_tok_per_s']:.0f}",
            *(f"{speed:.0f}" for speed in step["tok_per_s_by_acceptance_length"].values()),
        )
    return table


plan.params += _ENGINE_OPTIONS
