"""`dflash-trt doctor`: versions, devices and what works here, for bug reports."""

import json
from typing import Any

import click

from dflash_trt.cli.help_text import POSITIVE, examples

_TIME_LIMIT_S = 30.0


@click.command(short_help="Print versions, devices and what works here.", epilog=examples("dflash-trt doctor"))
@click.option(
    "--time-limit",
    "time_limit_s",
    type=POSITIVE,
    default=_TIME_LIMIT_S,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of each check.",
)
@click.option("--full", "is_full", is_flag=True, help="Import all of ModelOpt, too, which takes ten seconds or more.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def doctor(time_limit_s: float, is_full: bool, as_json: bool) -> None:
    """Print versions, devices and what works here: paste it into a bug report.

    It tries imports and small computations, each in a process of its own, and exits with 0 whatever is missing. Home
    directories and values of variables such as HF_TOKEN are left out.
    """
    from dflash_trt.doctor.report import make_report

    report = make_report(time_limit_s=time_limit_s, is_full=is_full)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    """Lines that survive being pasted."""
    from rich.filesize import decimal

    from dflash_trt.doctor.report import TITLES

    machine = report["machine"]
    click.echo(", ".join(f"{name} {version or 'missing'}" for name, version in report["versions"].items()))
    click.echo(f"{machine['platform']}; {machine['processor']}, {machine['num_cores']} cores")
    memory, free = decimal(machine["memory_bytes"]), decimal(machine["free_memory_bytes"])
    click.echo(f"memory {memory}, {free} free; disk {decimal(machine['free_disk_bytes'])} free")
    for name in ("omp_num_threads", "cuda_visible_devices"):
        click.echo(f"{name.upper()} {machine[name] or 'unset'}")
    for gpu in report["gpus"]:
        fields = f"{gpu['name']}, {gpu['memory_mib']} MiB, compute capability {gpu['compute_capability']}"
        click.echo(f"GPU: {fields}, driver {gpu['driver']}")
    if not report["gpus"]:
        click.echo(f"GPU: none that nvidia-smi lists; driver: {report['nvidia_driver'] or 'none loaded'}")
    for name, title in TITLES.items():
        result = report["works"][name]
        click.echo(f"{'yes' if result['works'] else 'no ':3} {title}: {result['detail']}")
