"""`dflash-trt doctor`: versions, devices and what works here, for bug reports."""

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

_TIME_LIMIT_S = 30.0


@click.command(short_help="Print versions, devices and what works here.")
@click.option(
    "--time-limit",
    "time_limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=_TIME_LIMIT_S,
    show_default=True,
    metavar="SECONDS",
    help="Time that each check may take.",
)
@click.option("--full", "is_full", is_flag=True, help="Import all of ModelOpt, too, which takes ten seconds or more.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def doctor(time_limit_s: float, is_full: bool, as_json: bool) -> None:
    """Print versions, devices and what works here: paste it into a bug report.

    It tries imports and small computations, each in a process of its own, and exits with 0 whatever is missing. Home
    directories and values of variables such as HF_TOKEN are left out.

    Example: dflash-trt doctor
    """
    from dflash_trt.doctor.report import make_report

    report = make_report(time_limit_s=time_limit_s, is_full=is_full)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.filesize import decimal

    console = Console(highlight=False, markup=False)
    machine = report["machine"]
    console.print(", ".join(f"{name} {version or 'missing'}" for name, version in report["versions"].items()))
    console.print(f"{machine['platform']}; {machine['processor']}, {machine['num_cores']} cores")
    console.print(
        f"memory {decimal(machine['memory_bytes'])}, {decimal(machine['free_memory_bytes'])} free; "
        f"disk {decimal(machine['free_disk_bytes'])} free; "
        + "; ".join(
            f"{name.upper()} {machine[name] or 'unset'}" for name in ("omp_num_threads", "cuda_visible_devices")
        )
    )
    for gpu in report["gpus"]:
        fields = f"{gpu['name']}, {gpu['memory_mib']} MiB, compute capability {gpu['compute_capability']}"
        console.print(f"GPU: {fields}, driver {gpu['driver']}")
    if not report["gpus"]:
        console.print(f"GPU: none that nvidia-smi lists; driver: {report['nvidia_driver'] or 'none loaded'}")
    console.print(_works_table(report["works"]))


def _works_table(works: dict[str, Any]) -> "Table":
    from rich.table import Table

    from dflash_trt.doctor.report import TITLES

    table = Table("", "works", "detail")
    for name, title in TITLES.items():
        table.add_row(title, "yes" if works[name]["works"] else "no", works[name]["detail"])
    return table
