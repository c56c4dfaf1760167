"""`dflash-trt plan --sweep`: throughput against speed per user before the hardware, in simulated time."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.bench_report import CSV, FIGURE, check_paths, typed_command
from dflash_trt.cli.help_text import COUNT, POSITIVE, NumberRange, OptionSet
from dflash_trt.cli.time_left import TimeLeft
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import CapacityError, ConfigError, DFlashError

if TYPE_CHECKING:
    from dflash_trt.checkpoint.specs import PairSpecs
    from dflash_trt.plan.gpus import Gpu
    from dflash_trt.plan.step_costs import StepClock, StepCosts
    from dflash_trt.simulation.acceptance import AcceptanceByPosition
    from dflash_trt.simulation.sweep import SimulatedEngine, Workload

_CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
_LAYOUT = re.compile(r"(tp|dp)(\d+)(?:ep(\d+))?(?:dcp(\d+))?(?:x(\d+))?")
_RANKS = ("tp_size", "ep_size", "dcp_size", "attention_dp")  # what a layout says, too
_NAMES = {"dflash": "DFlash", "dflash2": "DFlash2", "eagle3": "EAGLE-3", "mtp": "MTP"}

OPTIONS = OptionSet(
    click.option(
        "--layout",
        "layouts",
        multiple=True,
        metavar="tpNepNxN",
        help="TP ranks (dp: with --attention-dp), expert groups and replicas, such as tp8ep8 or tp1x8; repeatable "
        "(default: from --tp-size).",
    ),
    click.option(
        "--other-drafter",
        "other_drafters",
        multiple=True,
        metavar="DRAFTER",
        help="Another drafter of the target; repeatable.",
    ),
    click.option(
        "--accepted",
        multiple=True,
        metavar="P,...|FILE",
        help="Acceptance rate per draft position, or a JSON report of bench; for each drafter in turn.",
    ),
    click.option(
        "--sweep-draft-length",
        "draft_lengths",
        multiple=True,
        type=COUNT,
        metavar="K",
        help="Drafts per step; repeatable (default: as many as the drafter makes and --accepted has).",
    ),
    click.option("--prompt-tokens", type=COUNT, metavar="N", help="Prompt tokens of a request (default: 1024)."),
    click.option("--output-tokens", type=COUNT, metavar="N", help="Output tokens of a request (default: 256)."),
    click.option(
        "--shared-prefix",
        type=COUNT,
        metavar="N",
        help="Prompt tokens that all requests have in common, in the prefix cache after the first (default: 0).",
    ),
    click.option(
        "--spread", type=NumberRange(0, 0.9), metavar="FRACTION", help="Spread of both lengths (default: 0.2)."
    ),
    click.option(
        "--request-rate",
        "request_rates",
        multiple=True,
        type=POSITIVE,
        metavar="PER_SECOND",
        help="Rate of Poisson arrivals (open loop).",
    ),
    click.option(
        "--requests-per-client", type=COUNT, metavar="N", help="Requests of a client, in sequence (default: 3)."
    ),
    click.option(
        "--duration", type=POSITIVE, metavar="SECONDS", help="How long requests arrive at a rate (default: 60)."
    ),
    click.option(
        "--per-user",
        multiple=True,
        type=POSITIVE,
        metavar="TOK_PER_S",
        help="Name the best configuration at this speed.",
    ),
    CSV,
    FIGURE,
)


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """A drafter of the target, None for autoregressive decoding, and how far its drafts are accepted."""

    config: BuildConfig
    pair: "PairSpecs"
    acceptance: "AcceptanceByPosition | None"

    @property
    def name(self) -> str:
        draft = self.pair.draft
        return "AR" if draft is None else _NAMES.get(draft.algorithm, draft.algorithm)


def refuse_options(options: dict[str, Any], *, allowed: Sequence[str] = ()) -> None:
    """Raises ConfigError: options of a sweep without --sweep."""
    given = [flag for name, flag in OPTIONS.given(options).items() if name not in allowed]
    if given:
        expected, hint = "--sweep with its options", "Add --sweep."
        raise ConfigError.about("plan", expected=expected, found=", ".join(given), hint=hint)


def refuse_ranks(options: dict[str, Any], flags: dict[str, Any]) -> None:
    """Raises ConfigError: flags of ranks, which every --layout has itself. A configuration file may have them."""
    given = [f"--{name.replace('_', '-')}" for name in _RANKS if flags[name]]
    if options["layouts"] and given:
        raise ConfigError(f"options: --layout and {', '.join(given)} are mutually exclusive.")


def require_bandwidth(gpu: "Gpu", option: str) -> None:
    """Raises ConfigError: of this GPU only the memory is known."""
    if gpu.bytes_per_s is None:
        hint = "Name a GPU, or pass --machine FILE of `dflash-trt bench machine`."
        raise ConfigError.about(option, expected="a machine whose bandwidth is known", found=gpu.name, hint=hint)


def run_sweep(
    config: BuildConfig,
    base_dir: Path,
    gpu: "Gpu",
    costs: "StepCosts | None",
    options: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Simulate every drafter in every layout with every K, print the points, and write the files.

    Raises:
        ConfigError: an option is wrong, or nothing is known about this machine's speed.
        CapacityError: no configuration fits.
    """
    from dflash_trt.plan.step_costs import clock_of
    from dflash_trt.simulation.report import SweepReport, assumptions
    from dflash_trt.simulation.sweep import sweep

    require_bandwidth(gpu, "--sweep")
    check_paths(options)
    workload = _workload(options)
    drafted = list(_drafters(config, base_dir, options))
    layouts = [_layout(text) for text in dict.fromkeys(options["layouts"])] or [({}, 1)]
    clock = clock_of(gpu, costs)
    found = [_engines(item, layout, clock, options["draft_lengths"]) for item in drafted for layout in layouts]
    engines = [engine for fitting, _ in found for engine in fitting]
    left_out = tuple(reason for _, reasons in found for reason in reasons)
    if not engines:
        raise CapacityError("plan --sweep: no configuration fits\n" + "\n".join(left_out))
    points = sweep(engines, workload, progress=TimeLeft())
    report = SweepReport(
        subject=Path(str(config.target)).name,
        hardware=f"{max(engine.num_gpus for engine in engines)} x {gpu.name}",
        command=typed_command(),
        assumptions=assumptions(engines, workload, clock),
        points=tuple(points),
        per_user=options["per_user"],
        left_out=left_out,
    )
    if options["csv_path"] is not None:
        report.write_csv(options["csv_path"])
    if options["figure"] is not None:
        report.write_figure(options["figure"])
    click.echo(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines()))


def _drafters(config: BuildConfig, base_dir: Path, options: dict[str, Any]) -> Iterator[Drafted]:
    """Autoregressive decoding, the pair's drafter, and the others, with an acceptance each."""
    from dflash_trt.checkpoint.pair import read_pair
    from dflash_trt.checkpoint.sources import CheckpointSources, find_checkpoints
    from dflash_trt.checkpoint.specs import with_draft_window
    from dflash_trt.simulation.acceptance import read_acceptance

    def found(config: BuildConfig) -> CheckpointSources:
        return find_checkpoints(
            config, base_dir, needs_tensors=False, say=lambda message: click.echo(message, err=True)
        )

    config = found(config).config  # with the known drafter of a target from the hub
    names = [name for name in (config.drafter, *options["other_drafters"]) if name is not None]
    if len(options["accepted"]) != len(names):
        hint = "Acceptance is measured by `dflash-trt bench speedup --json`, or given by position: 0.8,0.6,0.4."
        expected, given = f"one for each of {len(names)} drafters", str(len(options["accepted"]))
        raise ConfigError.about("--accepted", expected=expected, found=given, hint=hint)
    for index, name in enumerate([None, *names]):
        update: dict[str, Any] = {"drafter": name}
        if name != config.drafter:
            update["drafter_overrides"] = {}
        if index != 1:
            update["max_draft_len"] = None
        checkpoints = found(config.model_copy(update=update))
        overrides = checkpoints.config.drafter_overrides
        pair = read_pair(checkpoints.paths["target"], checkpoints.paths.get("drafter"), drafter_overrides=overrides)
        acceptance = None
        if name is not None:
            pair = with_draft_window(pair, config.draft_window)
            assert pair.draft is not None
            acceptance = read_acceptance(options["accepted"][index - 1], algorithm=pair.draft.algorithm)
        yield Drafted(config=checkpoints.config, pair=pair, acceptance=acceptance)


def _engines(
    drafted: Drafted, layout: tuple[dict[str, Any], int], clock: "StepClock", draft_lengths: Sequence[int]
) -> tuple[list["SimulatedEngine"], list[str]]:
    """One for each K, or why there is none."""
    from dflash_trt.core.config import build_config_from
    from dflash_trt.plan.planning import plan_engine
    from dflash_trt.simulation.sweep import SimulatedEngine, check_drafts, ranks_name

    ranks, num_replicas = layout
    name = f"{drafted.name}, {ranks_name(drafted.config.model_copy(update=ranks).mapping)}"
    try:
        config = build_config_from(drafted.config.model_dump() | ranks, source="--layout")
        made = plan_engine(config, drafted.pair, clock.gpu)
    except DFlashError as error:
        return [], [f"{name}: {error}"]
    if made.pages is None or not made.fits:
        return [], [f"{name}: each rank lacks {made.missing_bytes / 2**30:.2f} GiB"]
    first = SimulatedEngine(
        pretrained_config=made.pretrained_config,
        limits=made.build_config,
        num_pages=made.pages.num_pages,
        clock=clock,
        drafter=drafted.name,
        num_draft_tokens=0,
        acceptance=drafted.acceptance,
        num_replicas=num_replicas,
        pads_ranks=config.backend == "tensorrt",
    )
    if drafted.acceptance is None:
        return [first], []
    most = min(made.build_config.max_draft_len, len(drafted.acceptance.fractions))
    lengths = [length for length in draft_lengths if length <= most] or [min(draft_lengths, default=most)]
    engines = [replace(first, num_draft_tokens=length) for length in lengths]
    for engine in engines:
        check_drafts(engine)
    beyond = [str(length) for length in draft_lengths if length not in lengths]
    return engines, [f"{name}: K = {', '.join(beyond)}, beyond its {most}"] if beyond else []


def _layout(text: str) -> tuple[dict[str, Any], int]:
    """Ranks and groups of experts, as fields of BuildConfig; replicas."""
    match = _LAYOUT.fullmatch(text)
    kind, *sizes = match.groups() if match else ("", "0")
    numbers = [int(size or 1) for size in sizes]
    num_ranks, ep_size, dcp_size, num_replicas = numbers if match else (0, 0, 0, 0)
    divides = dcp_size in (1, num_ranks) if kind == "tp" else dcp_size == 1 and num_ranks > 1
    if not divides or not all(1 <= number <= 1024 for number in numbers):
        expected = (
            "tp, or dp for ranks with requests of their own, with the ranks of a replica, ep with groups of experts, "
            "dcp with the number of tp for ranks that divide positions, x with replicas, such as tp8ep8, dp8ep8, "
            "tp8ep8dcp8 or tp1x8"
        )
        raise ConfigError.about("--layout", expected=expected, found=repr(text))
    fields = {"tp_size": num_ranks, "ep_size": ep_size, "dcp_size": dcp_size, "attention_dp": kind == "dp"}
    return fields, num_replicas


def _workload(options: dict[str, Any]) -> "Workload":
    from dflash_trt.simulation.load import Lengths
    from dflash_trt.simulation.sweep import Workload

    rates = options["request_rates"]
    concurrencies = options["concurrencies"] or (() if rates else _CONCURRENCIES)
    return Workload(
        concurrencies=tuple(concurrencies),
        request_rates_per_s=tuple(rates),
        lengths=Lengths(
            num_prompt_tokens=options["prompt_tokens"] or 1024, num_output_tokens=options["output_tokens"] or 256
        ),
        spread_fraction=0.2 if options["spread"] is None else options["spread"],
        requests_per_client=options["requests_per_client"] or 3,
        duration_s=options["duration"] or 60.0,
        num_shared_tokens=options["shared_prefix"] or 0,
    )
