"""`dflash-trt build --check`: shows the progress of TensorRT's builder and prints what it understood."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.time_left import StageLines
from dflash_trt.core.config import BuildConfig

if TYPE_CHECKING:
    from rich.table import Table

    from dflash_trt.backends.tensorrt.builder import StepsCallback
    from dflash_trt.compile.tensorrt_check import CheckReport


def check(config: BuildConfig, base_dir: Path, *, is_full: bool, as_json: bool) -> None:
    """Build the network of `config` on this CPU and print the report; writes nothing."""
    from dflash_trt.compile.tensorrt_check import check_config

    with steps_shown() as progress:
        report = check_config(config, base_dir=base_dir, is_full=is_full, progress=progress)
    fields = describe(report)
    if as_json:
        click.echo(json.dumps(fields, indent=2))
    else:
        _print(fields)


def describe(report: "CheckReport") -> dict[str, Any]:
    """The report as plain JSON types. Sizes are totals of all layers, per rank."""
    built = report.built[0]
    sizes, limits = report.sizes, report.limits
    return {
        "tensorrt_version": built.tensorrt_version,
        "compute_capability": report.compute_capability,
        "build_config": limits.model_dump(),
        "ranks": list(report.built),
        "layer_ids": {model: list(layer_ids) for model, layer_ids in report.layer_ids.items()},
        "num_model_layers": report.num_layers,
        "num_layers": built.num_layers,
        "layer_counts": built.layer_counts,
        "inputs": list(built.inputs),
        "outputs": list(built.outputs),
        "profiles": {
            profile.name: {axis: [sizes.min, sizes.opt, sizes.max] for axis, sizes in profile.axes.items()}
            for profile in built.profiles
        },
        "flags": list(built.flags),
        "weights_bytes": sizes.weights_bytes,
        "plan_bytes": sizes.plan_bytes,
        "kv_bytes_per_token": sizes.kv_bytes_per_token,
        "state_bytes_per_slot": sizes.state_bytes_per_slot,
        "full_kv_bytes": sizes.kv_bytes_per_token * limits.max_batch_size * limits.max_seq_len,
        "build_time_s": round(sum(each.build_time_s for each in report.built.values()), 3),
        "peak_memory_bytes": max(each.peak_memory_bytes for each in report.built.values()),
        "warnings": list(dict.fromkeys(line for each in report.built.values() for line in each.warnings)),
        "notes": list(report.notes),
    }


@contextmanager
def steps_shown() -> Iterator["StepsCallback"]:
    """TensorRT's phases as bars on a terminal; elsewhere lines. Always on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        lines = StageLines()
        yield lambda phase, done, total: lines.show(phase, done, total, f"{done} of {total} steps")
        return
    with Progress(console=console, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done)

        yield show


def _print(fields: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.filesize import decimal

    console = Console(highlight=False, markup=False)
    click.echo(
        f"check passed: TensorRT-RTX {fields['tensorrt_version']} built the network for {fields['compute_capability']} "
        "on this CPU, with stubs of its plugin nodes"
    )
    for model, layer_ids in fields["layer_ids"].items():
        click.echo(_layers_line(model, layer_ids, fields["num_model_layers"][model]))
    if len(fields["ranks"]) > 1:
        console.print(f"ranks: {', '.join(map(str, fields['ranks']))}, which have different networks")
    kinds = ", ".join(f"{count} {kind.lower()}" for kind, count in list(fields["layer_counts"].items())[:8])
    click.echo(f"TensorRT layers: {fields['num_layers']} ({kinds}, ...)")
    for title in ("inputs", "outputs"):
        console.print(f"{title}:")
        for line in fields[title]:
            console.print(f"  {line}")
    console.print(profiles_table(fields["profiles"]))
    console.print(f"limits: {', '.join(f'{name} {value}' for name, value in fields['build_config'].items())}")
    click.echo(f"flags: {', '.join(fields['flags']) or 'none'}")
    slot_bytes = fields["state_bytes_per_slot"]
    slots = f", recurrent state {decimal(slot_bytes)} per request" if slot_bytes else ""
    click.echo(
        f"each rank: weights {decimal(fields['weights_bytes'])}, plan {decimal(fields['plan_bytes'])} and kernels, "
        f"K/V {fields['kv_bytes_per_token']:,} bytes per token, {decimal(fields['full_kv_bytes'])} for full batches"
        f"{slots}"
    )
    console.print(f"check: {fields['build_time_s']:.1f} s, peak memory {decimal(fields['peak_memory_bytes'])}")
    for line in (*fields["warnings"], *fields["notes"]):
        click.echo(f"note: {line}")


def _layers_line(model: str, layer_ids: list[int], num_layers: int) -> str:
    if len(layer_ids) == num_layers:
        return f"{model} layers: all {num_layers}"
    return f"{model} layers: {', '.join(map(str, layer_ids))}, one of each kind of {num_layers} (--check=full: all)"


def profiles_table(profiles: dict[str, dict[str, list[int]]]) -> "Table":
    """Min, opt and max size of each axis, one column per profile."""
    from rich.table import Table

    table = Table("axis", *profiles)
    for axis in next(iter(profiles.values())):
        table.add_row(axis, *("{} .. {} .. {}".format(*axes[axis]) for axes in profiles.values()))
    return table
