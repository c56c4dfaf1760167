"""Draw the figure of a stored report again: the output of `dflash-trt bench serve --json`.

    python -m scripts.draw_figure docs/bench_serve_demo.json docs/bench_serve_demo.svg

A report needs no other fields here than those of its curve: server, load, and the two speeds.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_trt.bench.pareto import Point, shared_interactivity
from dflash_trt.bench.pareto_figure import Figure, draw


def figure_of(told: Mapping[str, Any], interactivity: tuple[float, ...] = ()) -> Figure:
    """As `bench serve --figure` draws it, by default compared at the greatest speed per user that all reach."""
    points: dict[str, list[Point]] = {}
    for report in told["reports"]:
        clients, speed = report["concurrency"], report["tok_per_s_per_user"]
        if speed is not None:
            label = str(clients) if clients else f"{report['request_rate_per_s']:g}/s"
            point = Point(per_user=speed["p50"], per_gpu=report["output_tok_per_s_per_gpu"], label=label)
            points.setdefault(report["server"], []).append(point)
    shared = shared_interactivity(points)
    unit = "GPU" if told["reports"][0]["num_gpus"] else "server"
    return Figure(
        title=f"Throughput per {unit} against speed per user",
        curves=points,
        unit=unit,
        caption=tuple(f"{name.capitalize()}: {told[name]}" for name in ("hardware", "workload", "command")),
        interactivity=interactivity or ((shared,) if shared is not None else ()),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path, help="ends with .png or .svg")
    parser.add_argument(
        "--interactivity", type=float, action="append", default=[], help="tok/s per user; several times"
    )
    words = parser.parse_args()
    draw(figure_of(json.loads(words.report.read_text()), tuple(words.interactivity)), words.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
