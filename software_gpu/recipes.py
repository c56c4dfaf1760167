"""Serving runs of recipes and engines on the software GPU, each in a process of its own, and the table of all.

scripts/software_gpu qwen3-8b-fp8 --gpu b300
scripts/software_gpu kimi-k2.5-int4-h200 --set dcp_size=8
scripts/software_gpu --all --reports DIRECTORY
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from dflash_trt.cli.yaml_file import read_yaml
from dflash_trt.core.config import build_config_from
from dflash_trt.engine_dir import EngineDir
from dflash_trt.recipes import Recipe, recipe_path, recipes
from scripts.docs_tables import ROOT, written_again
from software_gpu.runtime.library import environment

GPUS: Final = ("h200", "b300")
PAGE: Final = ROOT / "docs" / "benchmarks.md"
HEADER: Final = "| recipe | ranks | weights GiB | peak GiB, H200 | peak GiB, B300 | launches of a step: plain, mixed |"


def num_ranks(name: str) -> int:
    """Of a recipe or of an engine directory. Raises EngineDirError."""
    path = recipe_path(name)
    if path is None:
        return EngineDir.open(name).manifest.pretrained_config.mapping.world_size
    return build_config_from(read_yaml(path), source=name).mapping.world_size


def serve(name: str, gpu: str, *options: str) -> int:
    """Exit code of a run; what it says goes to this process's output."""
    command = [sys.executable, "-m", "software_gpu.serving.run", name, *options]
    return subprocess.run(
        command, env=os.environ | environment(gpu, num_devices=num_ranks(name)), check=False
    ).returncode


def runs() -> Iterator[tuple[Recipe, str]]:
    """Every recipe on each GPU that it is for; one in a format of Blackwell's on the H200, too, which refuses it."""
    for recipe in recipes():
        for gpu in GPUS:
            is_of_format = recipe.format == "nvfp4"
            if not recipe.gpus or gpu.upper() in recipe.gpus or is_of_format:
                yield recipe, gpu


def serve_all(reports: Path, *options: str) -> None:
    """Run what has no report yet, each in its turn, and write the table of those that have one."""
    reports.mkdir(parents=True, exist_ok=True)
    for recipe, gpu in runs():
        report = reports / f"{recipe.name}.{gpu}.json"
        if not report.exists():
            sys.stderr.write(f"-- {recipe.name} on {gpu}\n")
            serve(recipe.name, gpu, "--json", str(report), *options)
    PAGE.write_text(written_again(PAGE.read_text(), table(reports)))


def table(reports: Path) -> str:
    rows = []
    for recipe in recipes():
        paths = {gpu: reports / f"{recipe.name}.{gpu}.json" for gpu in GPUS}
        found = {gpu: json.loads(path.read_text()) for gpu, path in paths.items() if path.exists()}
        if found:
            rows.append(f"| {' | '.join(_cells(recipe.name, found))} |")
    return "\n".join([HEADER, "|---" * (HEADER.count("|") - 1) + "|", *rows])


def _cells(name: str, reports: dict[str, dict[str, Any]]) -> list[str]:
    """Cells of a recipe; weights and launches are those of the first GPU that serves it."""
    served = [report for report in reports.values() if "refused" not in report]
    ranks, weights, launches = "-", "-", "-"
    if served:
        first = served[0]
        ranks, weights = str(first["num_ranks"]), f"{first['memory_gib']['weights']:.1f}"
        launches = ", ".join(f"{first['serving'][part]['decode']['num_on_device']:.0f}" for part in ("plain", "mixed"))
    return [f"`{name}`", ranks, weights, *(_peak(reports.get(gpu)) for gpu in GPUS), launches]


def _peak(report: dict[str, Any] | None) -> str:
    """The peak and faults, if any."""
    if report is None:
        return "-"
    if "refused" in report:
        return "refused"
    return ", ".join((f"{report['peak_gib']:.1f}", *_faults(report)))


def _faults(report: dict[str, Any]) -> list[str]:
    parts = [report["serving"][part] for part in ("plain", "mixed")]
    counts = {
        "compiled": sum(part["num_compiled"] for part in parts),
        "waits": sum(part["num_waits"] for part in parts),
        "problems": len(report["problems"]),
        "bytes left": report["left_bytes"],
    }
    return [f"{count} {name}" for name, count in counts.items() if count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="a recipe, or an engine directory")
    parser.add_argument("--all", action="store_true", help="every recipe on H200 and B300, and the table in docs")
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="(default: h200)")
    parser.add_argument("--rank", default="0", help="of several ranks the one that is opened (default: 0)")
    parser.add_argument(
        "--shapes", choices=("all", "few"), default="all", help="steps that are captured (default: all)"
    )
    parser.add_argument(
        "--set", metavar="FIELD=VALUE", action="append", default=[], help="a field of the recipe in JSON: dcp_size=8"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report of one run")
    parser.add_argument(
        "--reports", type=Path, default=Path("build/software_gpu"), help="of --all (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.all == (options.name is not None):
        parser.error("expected a name, or --all")
    if options.set and (options.all or recipe_path(options.name) is None):
        parser.error("--set changes one recipe")
    if options.all:
        serve_all(options.reports, "--shapes", options.shapes)
        return 0
    words = ["--rank", options.rank, "--shapes", options.shapes, *(["--json", options.json] if options.json else [])]
    words += [word for change in options.set for word in ("--set", change)]
    return serve(options.name, options.gpu, *words)


if __name__ == "__main__":
    sys.exit(main())
