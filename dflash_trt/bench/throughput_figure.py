"""The figure of throughput by the number of clients, with a line for each K and for the adaptive policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_trt.bench.figure_file import WIDTH, Page, draw_frame, line_style, write_figure
from dflash_trt.bench.throughput import PolicyReport

_TITLE = "Throughput by clients and draft length"
_TOP, _PLOT, _LEFT, _RIGHT = 0.36, 3.2, 0.72, 0.14  # inches


def draw_throughput(reports: Sequence[PolicyReport], path: Path, caption: tuple[str, ...]) -> None:
    """Write the picture. Raises ConfigError as `check_figure` does."""
    write_figure(lambda: canvas_of(reports, caption), path, title=_TITLE, description="\n".join(caption))


def canvas_of(reports: Sequence[PolicyReport], paragraphs: Sequence[str]) -> Any:
    """The matplotlib figure: lines and caption, one below the other."""
    page = Page(_TITLE, paragraphs, height=_TOP + _PLOT, left=_LEFT)
    axes = page.axes(_LEFT, 0, WIDTH - _LEFT - _RIGHT, _PLOT)
    clients = [report.concurrency for report in reports]
    for index, speed in enumerate(reports[0].speeds):
        colour, marker = line_style(index)
        heights = [report.speeds[index].output_tok_per_s for report in reports]
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.5}
        axes.plot(clients, heights, label=speed.policy, gid=f"curve-{index}", **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(clients, [str(count) for count in clients])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("Clients (closed loop)")
    axes.set_ylabel("Throughput (output tok/s)")
    draw_frame(axes)
    axes.legend(fontsize=8, frameon=False)
    return page.finish()
