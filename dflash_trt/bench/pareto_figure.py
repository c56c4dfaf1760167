"""The figure of tok/s per user against tok/s per GPU, as PNG or SVG, drawn by matplotlib.

Both axes start at 0 and are linear. Each point carries its load: clients, or requests/s. The same figure gives the same
SVG, byte for byte. matplotlib is imported where it draws, and nowhere else.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_trt.bench.pareto import Point, hull, per_gpu_at, ratios_at
from dflash_trt.core.errors import ConfigError

ENDINGS = (".png", ".svg")
_WIDTH, _PLOT_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 9.4, 4.8, 0.85, 0.25, 0.5, 0.65  # inches
_LINE_HEIGHT, _CAPTION_COLUMNS, _DOTS_PER_INCH = 0.18, 130, 160
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito's
_MARKERS = ("o", "s", "^", "D")  # for readers who do not see the colours
_HULL, _GRID, _CAPTION = "#9a9a9a", "#e6e6e6", "#333333"
# Text stays text, and ids of SVG elements do not change from run to run.
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "dflash-trt", "font.size": 9.5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """`unit` is what speeds are per: GPU, or server. `caption` are paragraphs; each starts a line.

    `interactivity` are speeds per user, in tok/s, at which the curves are compared with the first.
    """

    title: str
    curves: Mapping[str, Sequence[Point]]
    unit: str
    caption: tuple[str, ...]
    interactivity: tuple[float, ...] = ()


def draw(figure: Figure, path: Path) -> None:
    """Write the picture, in the format of the file's ending. Raises ConfigError as `check_figure` does."""
    check_figure(path)
    import matplotlib as mpl  # type: ignore[import-not-found, unused-ignore]

    with mpl.rc_context(_SETTINGS):
        canvas = _canvas(figure)
        # Neither a date nor a version: a stored figure changes with its numbers alone.
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
        canvas.savefig(path, dpi=_DOTS_PER_INCH, metadata=metadata)


def check_figure(path: Path) -> None:
    """Raises ConfigError for an ending that is not drawn, and without matplotlib: before minutes of measurement."""
    if path.suffix not in ENDINGS:
        raise ConfigError.about("figure", expected=f"a name that ends with {' or '.join(ENDINGS)}", found=path.name)
    if find_spec("matplotlib") is None:
        hint = "Install it with: pip install 'dflash-trt[figures]'"
        raise ConfigError.about("figure", expected="the package matplotlib", found="none", hint=hint)


def ratio_text(curves: Mapping[str, Sequence[Point]], per_user: float) -> str:
    """A sentence that compares the configurations at a speed per user."""
    first = next(iter(curves))
    ratios = ratios_at(curves, per_user)
    words = [f"{name} {ratio:.2f}x" for name, ratio in ratios.items() if ratio is not None and name != first]
    missing = [name for name, points in curves.items() if per_gpu_at(points, per_user) is None]
    text = f"At {per_user:.4g} tok/s per user, throughput relative to {first}: {'; '.join(words) or 'none to compare'}."
    return text + (f" Not as fast at any load: {'; '.join(missing)}." if missing else "")


def _canvas(figure: Figure) -> Any:
    """The matplotlib figure: plot above, caption below, with room for as many lines as it has."""
    from matplotlib.figure import Figure as Canvas  # type: ignore[import-not-found, unused-ignore]

    lines = _caption_lines(figure)
    below = _BOTTOM + _LINE_HEIGHT * (len(lines) + 0.5)
    height = _TOP + _PLOT_HEIGHT + below
    canvas = Canvas(figsize=(_WIDTH, height))
    box = (_LEFT / _WIDTH, below / height, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, _PLOT_HEIGHT / height)
    axes = canvas.add_axes(box)
    _draw_curves(axes, figure)
    _draw_frame(axes, figure)
    top = (below - _BOTTOM) / height
    # Dollar signs of a command are no formulas.
    style = {"va": "top", "fontsize": 8.5, "color": _CAPTION, "linespacing": 1.45, "parse_math": False}
    canvas.text(0.02, top, "\n".join(lines), **style)
    return canvas


def _caption_lines(figure: Figure) -> list[str]:
    ratios = [ratio_text(figure.curves, per_user) for per_user in figure.interactivity] if figure.curves else []
    texts = ("Numbers beside points: clients, or requests/s.", *ratios, *figure.caption)
    return [line for text in texts for line in textwrap.wrap(text, _CAPTION_COLUMNS)]


def _draw_curves(axes: Any, figure: Figure) -> None:
    """The hull lies below all curves, so that they stay readable where they are it."""
    outline = hull(figure.curves)
    # Labels of the curve that is most of the hull stand outside of it, those of the others inside of their own.
    outer = max(figure.curves.values(), key=lambda points: sum(point in outline for point in points), default=())
    for index, (name, points) in enumerate(figure.curves.items()):
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        x, y = [point.per_user for point in points], [point.per_gpu for point in points]
        axes.plot(x, y, color=colour, marker=marker, markersize=6, linewidth=1.8, label=name, gid=f"curve-{index}")
        offset, anchor = ((6, 5), "left") if points is outer else ((-6, -12), "right")
        for point in points:
            _note(axes, point.label, (point.per_user, point.per_gpu), offset=offset, ha=anchor, color=colour)
    x, y = [point.per_user for point in outline], [point.per_gpu for point in outline]
    axes.plot(x, y, color=_HULL, linewidth=7, alpha=0.45, zorder=1, label="hull of all", gid="hull")
    for per_user in figure.interactivity if figure.curves else ():
        _draw_ratios(axes, figure, per_user)


def _draw_ratios(axes: Any, figure: Figure, per_user: float) -> None:
    """A vertical line at that speed per user, and the ratios where it meets the curves."""
    axes.axvline(per_user, color="#555555", linestyle=(0, (2, 4)), linewidth=1, zorder=1)
    first = next(iter(figure.curves))
    for name, ratio in ratios_at(figure.curves, per_user).items():
        height = per_gpu_at(figure.curves[name], per_user)
        if name != first and ratio is not None and height is not None:
            _note(axes, f"{ratio:.2f}x", (per_user, height), offset=(5, 8), fontweight="bold", color=_CAPTION)


def _note(axes: Any, text: str, place: tuple[float, float], *, offset: tuple[int, int], **style: Any) -> None:
    """`offset` is in points from the place."""
    axes.annotate(text, place, xytext=offset, textcoords="offset points", fontsize=8.5, parse_math=False, **style)


def _draw_frame(axes: Any, figure: Figure) -> None:
    """Axes, title and legend. The legend is at the upper right, which few curves reach: seldom is a configuration best
    for both users and machine. Where one is, the legend goes to the corner or side that covers least.
    """
    points = [point for points in figure.curves.values() for point in points]
    axes.set_xlim(0, 1.16 * max((point.per_user for point in points), default=1.0))
    axes.set_ylim(0, 1.08 * max((point.per_gpu for point in points), default=1.0))
    axes.set_title(figure.title, loc="left", fontsize=12.5, fontweight="bold", parse_math=False)
    axes.set_xlabel("interactivity: output tok/s per user (median over requests of 1 / TPOT)")
    axes.set_ylabel(f"throughput: output tok/s per {figure.unit}")
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="#cccccc")
    for text in legend.get_texts():
        text.set_parse_math(False)
