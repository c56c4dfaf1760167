"""`dflash-trt plan --gpus N`: the best layout, format, batch and K of a node for a goal."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from dflash_trt.cli.build import build
from dflash_trt.cli.help_text import POSITIVE, OptionSet
from dflash_trt.cli.plan_sweep import require_bandwidth
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.draft_lengths import lengths_text
from dflash_trt.core.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from dflash_trt.checkpoint.specs import PairSpecs
    from dflash_trt.plan.gpus import Gpu
    from dflash_trt.plan.step_costs import StepClock, StepCosts
    from dflash_trt.simulation.acceptance import AcceptanceByPosition
    from dflash_trt.simulation.advice import Choice, Goal

_NUM_ALTERNATIVES = 6
_LARGE = {"max_batch_size": 256, "max_num_tokens": 8192}  # limits to choose within, where none are told
_WIDTH = 100  # columns, where there is no terminal
_ASSUMED_RATE = 0.8  # of each draft after an accepted one, where nothing is told
_FACTORS = (0.85, 1.0, 1.1)
# Options of `build` that the choice decides, and those that need a drafter.
_CHOSEN = ("tp_size", "ep_size", "dcp_size", "attention_dp", "quantization", "max_batch_size", "max_num_tokens")
_OF_DRAFTS = ("drafter", "drafter_overrides", "drafter_quantization", "draft_window", "max_draft_len")

OPTIONS = OptionSet(
    click.option(
        "--gpus",
        "num_gpus",
        type=click.IntRange(1, 1024),
        metavar="N",
        help="Name the best layout, format, batch and K of N GPUs: the most tok/s, for --per-user and --ttft if given.",
    ),
    click.option(
        "--throughput",
        type=POSITIVE,
        metavar="TOK_PER_S",
        help="With --gpus: the most tok/s per user while all GPUs make this much.",
    ),
    click.option("--ttft", "ttft_ms", type=POSITIVE, metavar="MS", help="With --gpus: time to first token, at most."),
    click.option(
        "--price", type=POSITIVE, metavar="PER_HOUR", help="With --gpus: price of a GPU hour, for the cost of tokens."
    ),
)
SHARED = ("accepted", "per_user", "prompt_tokens", "output_tokens")  # with --sweep


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError: options of an advice without --gpus."""
    if given := OPTIONS.given(options):
        expected, hint = "--gpus with its options", "Add --gpus N."
        raise ConfigError.about("plan", expected=expected, found=", ".join(given.values()), hint=hint)


def run_advice(
    config: BuildConfig,
    pair: "PairSpecs",
    target: "PairSpecs",
    gpu: "Gpu",
    costs: "StepCosts | None",
    options: dict[str, Any],
    *,
    command: "BuildCommand",
    as_json: bool,
) -> None:
    """Compare every engine of the pair, and of the target alone, on the GPUs, and print the best.

    Raises:
        ConfigError: nothing is known about the GPU's speed, or an option is wrong.
        CapacityError: no engine fits, or none is as fast as asked.
    """
    from dflash_trt.plan.step_costs import clock_of
    from dflash_trt.simulation.advice import Goal, choices, layouts
    from dflash_trt.simulation.load import Lengths

    require_bandwidth(gpu, "--gpus")
    if not config.model_fields_set & {"max_batch_size", "max_num_tokens"}:
        config = config.model_copy(update=_LARGE)
    if len(options["per_user"]) > 1 or len(options["accepted"]) > 1:
        raise ConfigError.about("--gpus", expected="one --per-user and one --accepted", found="several")
    goal = Goal(
        num_gpus=options["num_gpus"],
        lengths=Lengths(
            num_prompt_tokens=options["prompt_tokens"] or 1024, num_output_tokens=options["output_tokens"] or 256
        ),
        per_user=next(iter(options["per_user"]), None),
        time_to_first_token_s=options["ttft_ms"] and options["ttft_ms"] / 1e3,
        throughput=options["throughput"],
    )
    clock = clock_of(gpu, costs)
    acceptance, is_assumed = _acceptance(pair, options["accepted"])
    sides = [(pair, acceptance), (target, None)] if acceptance is not None else [(target, None)]
    found, reasons = layouts(config, sides, clock, goal)
    if not found:
        raise CapacityError("plan --gpus: no engine fits\n" + "\n".join(reasons))
    best = choices(found, goal)
    if not best:
        alone = [layout.best_k(1) for layout in found]
        fastest = max(speed.tok_per_s_per_user for speed in alone)
        soonest_ms = 1e3 * min(speed.time_to_first_token_s for speed in alone)
        most = max(speed.output_tok_per_s for layout in found for speed in layout.by_batch_size.values())
        hint = f"A single user gets at most {fastest:.0f} tok/s, and a first token in {soonest_ms:.1f} ms at best."
        hint += f" All users together get at most {most:.0f} tok/s."
        wanted = " and ".join(_goals(goal))
        raise CapacityError.about("plan --gpus", expected=wanted, found="no engine that is as fast", hint=hint)
    report = _report(config, command, goal, clock, best, options["price"])
    report["left_out"] = reasons
    report["accepted"] = None if acceptance is None else list(acceptance.fractions)
    report["is_acceptance_assumed"] = is_assumed
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)


def _goals(goal: "Goal") -> list[str]:
    texts = [] if goal.per_user is None else [f"{goal.per_user:g} tok/s per user"]
    texts += [] if goal.throughput is None else [f"{goal.throughput:g} tok/s in all"]
    limit_s = goal.time_to_first_token_s
    return texts if limit_s is None else [*texts, f"a first token in {1e3 * limit_s:g} ms"]


def _acceptance(pair: "PairSpecs", accepted: Sequence[str]) -> "tuple[AcceptanceByPosition | None, bool]":
    """What was told, or what is assumed; None without a drafter."""
    from dflash_trt.simulation.acceptance import AcceptanceByPosition, read_acceptance

    if pair.draft is None:
        return None, False
    if accepted:
        return read_acceptance(accepted[0], algorithm=pair.draft.algorithm), False
    return AcceptanceByPosition(tuple(_ASSUMED_RATE**i for i in range(1, pair.draft.max_draft_len + 1))), True


def _report(
    config: BuildConfig,
    command: "BuildCommand",
    goal: "Goal",
    clock: "StepClock",
    best: "Sequence[Choice]",
    price: float | None,
) -> dict[str, Any]:
    from dflash_trt.plan.step_costs import assumptions_of
    from dflash_trt.simulation.advice import TRANSFER_NOTE, other_acceptance

    def row(choice: "Choice") -> dict[str, Any]:
        speed, layout = choice.speed, choice.layout
        per_hour = None if price is None else price * goal.num_gpus
        cost = None if per_hour is None else 1e6 * per_hour / (3600 * speed.output_tok_per_s)
        return {
            "layout": layout.name,
            "num_prefill_workers": layout.num_prefill_workers,
            "format": layout.format,
            "has_drafter": layout.has_drafter,
            **asdict(speed),
            "output_tok_per_s_per_gpu": speed.output_tok_per_s / goal.num_gpus,
            "kv_tokens": layout.made.num_kv_tokens,
            "max_requests": layout.max_requests,
            "price_per_million_tokens": cost,
        }

    first, shown = best[0], _distinct(best)
    lengths = first.layout.draft_lengths()
    return {
        "subject": Path(str(config.target)).name,
        "gpu": clock.gpu.name,
        "num_gpus": goal.num_gpus,
        "goals": _goals(goal),
        "prompt_tokens": goal.lengths.num_prompt_tokens,
        "output_tokens": goal.lengths.num_output_tokens,
        "choices": [row(choice) for choice in shown],
        "draft_lengths": {str(size): length for size, length in lengths.items()},
        "commands": [command.of(first), _serve_command(first)],
        "sensitivity": [
            {"factor": factor, **row(other_acceptance(first, factor))}
            for factor in _FACTORS
            if first.layout.has_drafter
        ],
        "assumptions": [
            *assumptions_of(clock),
            *([TRANSFER_NOTE] if any(choice.layout.num_prefill_workers for choice in shown) else []),
        ],
    }


def _distinct(best: "Sequence[Choice]") -> "list[Choice]":
    """The best of each layout in its best format, with a drafter and without, and the best of each other format.

    Of those with prefill workers, the best alone.
    """
    kept: dict[object, Choice] = {}
    for choice in best:
        layout = choice.layout
        kept.setdefault((layout.name if not layout.num_prefill_workers else None, layout.has_drafter), choice)
        kept.setdefault(choice.layout.format, choice)
    rows = list({id(choice): choice for choice in kept.values()}.values())
    plain = [choice for choice in rows if not choice.layout.has_drafter]
    drafted = [choice for choice in rows if choice.layout.has_drafter]
    if not drafted:
        shown = plain[:_NUM_ALTERNATIVES]
    else:
        apart = [choice for choice in drafted if choice.layout.num_prefill_workers][:1]
        together = [choice for choice in drafted if not choice.layout.num_prefill_workers]
        shown = [*apart, *together[: _NUM_ALTERNATIVES - 2 - len(apart)], *plain[:2]]
    return sorted(shown, key=best.index)


@dataclass(frozen=True, slots=True)
class BuildCommand:
    """What was given of `build`: the configuration's file or recipe, and the words of each option by name."""

    config_file: str | None
    options: Mapping[str, Sequence[str]]

    @classmethod
    def given(cls, config_file: str | None, flags: Mapping[str, Any]) -> Self:
        options = {}
        for param in build.params:
            value, flag = flags.get(param.name or ""), param.opts[0]
            values = value if isinstance(value, tuple) else () if value in (None, False) else (value,)
            options[str(param.name)] = [
                word for each in values for word in ((flag,) if each is True else (flag, str(each)))
            ]
        return cls(config_file, options)

    def of(self, choice: "Choice") -> str:
        """The command that builds the choice."""
        layout, mapping = choice.layout, choice.layout.made.pretrained_config.mapping
        limits = layout.made.build_config
        decided = _CHOSEN if layout.has_drafter else (*_CHOSEN, *_OF_DRAFTS)
        words = ["dflash-trt", "build", *([self.config_file] if self.config_file else [])]
        words += [word for name, given in self.options.items() if name not in decided for word in given]
        words += [] if layout.has_drafter else ["--drafter", "none"]
        num_ranks = mapping.world_size
        words += ["--tp-size", str(num_ranks), "--ep-size", str(mapping.ep_size)] if num_ranks > 1 else []
        words += ["--attention-dp"] if mapping.dp_size > 1 else []
        words += ["--dcp-size", str(mapping.dcp_size)] if mapping.dcp_size > 1 else []
        words += ["--quantization", layout.format] if layout.format else []
        words += ["--max-batch-size", str(limits.max_batch_size), "--max-num-tokens", str(limits.max_num_tokens)]
        return shlex.join([*words, "-o", "build/engine"])


def _serve_command(choice: "Choice") -> str:
    layout = choice.layout
    words = ["dflash-trt", "serve", "build/engine"]
    num_gpus = layout.num_replicas * layout.made.pretrained_config.mapping.world_size
    words += ["--gpus", ",".join(map(str, range(num_gpus)))] if num_gpus > 1 else []
    words += ["--draft-length", lengths_text(layout.draft_lengths())] if layout.has_drafter else []
    if layout.num_prefill_workers:
        host_bytes = layout.prompt_bytes * choice.speed.num_requests
        words += ["--prefill-workers", str(layout.num_prefill_workers)]
        words += ["--host-cache-bytes", f"{max(1, round(host_bytes / 2**30))}GiB"]
    return shlex.join(words)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    console.width = max(console.width, _WIDTH)
    subject, goals = report["subject"], " and ".join(report["goals"]) or "the most tok/s"
    lengths = f"{report['prompt_tokens']} tokens a prompt, {report['output_tokens']} an answer"
    node = f"{report['num_gpus']} x {report['gpu']}"
    click.echo(f"{subject} on {node} for {goals}, {lengths}: calculated, not measured")
    has_price = report["choices"][0]["price_per_million_tokens"] is not None
    table = Table()
    for heading in ("layout", "prefill", "format", "K", "requests", "tok/s", "per GPU", "per user", "TTFT ms"):
        table.add_column(heading, justify="left" if heading in ("layout", "format") else "right")
    if has_price:
        table.add_column("per M tokens", justify="right")
    for choice in report["choices"]:
        table.add_row(*_cells(choice, has_price=has_price))
    console.print(table)
    best = report["choices"][0]
    by_requests = {int(size): length for size, length in report["draft_lengths"].items()}
    if not best["has_drafter"]:
        click.echo("the drafter does not pay here: best without it")
    else:
        click.echo(f"K by requests of a replica: {lengths_text(by_requests)}")
    for item in report["sensitivity"]:
        click.echo(
            f"drafts accepted {item['factor']:g} times as often: K = {item['num_draft_tokens']}, "
            f"{item['acceptance_length']:.2f} tokens a step, {item['tok_per_s_per_user']:.0f} tok/s per user, "
            f"{item['output_tok_per_s_per_gpu']:.0f} per GPU"
        )
    for command in report["commands"]:
        click.echo(f"    {command}")
    if report["is_acceptance_assumed"]:
        click.echo(
            f"assumed: {_ASSUMED_RATE:.0%} of drafts are accepted after an accepted one; --accepted takes what "
            "`dflash-trt bench speedup --json` measured"
        )
    for text in (*report["assumptions"], *(f"left out: {reason}" for reason in report["left_out"])):
        click.echo(text if text.startswith("left out") else f"assumed: {text}")


def _cells(choice: dict[str, Any], *, has_price: bool) -> list[str]:
    cells = [
        choice["layout"],
        str(choice["num_prefill_workers"] or ""),
        choice["format"] or "as stored",
        str(choice["num_draft_tokens"]) if choice["has_drafter"] else "AR",
        f"{choice['num_requests']}",
        f"{choice['output_tok_per_s']:.0f}",
        f"{choice['output_tok_per_s_per_gpu']:.0f}",
        f"{choice['tok_per_s_per_user']:.0f}",
        f"{1e3 * choice['time_to_first_token_s']:.0f}",
    ]
    return [*cells, f"{choice['price_per_million_tokens']:.3g}"] if has_price else cells
