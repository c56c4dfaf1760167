"""The figure of tok/s per user against tok/s per GPU.

Both axes start at 0 and are linear. Ends of curves and the best points carry their load, other points where there is
room.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dflash_trt.bench.figure_file import DOTS_PER_INCH, WIDTH, Page, draw_frame, line_style, write_figure
from dflash_trt.bench.label_places import MARKER_RADIUS, Box, Label, Place, Segment, place_labels
from dflash_trt.bench.pareto import Point, hull, per_gpu_at, ratios_at

_PLOT_HEIGHT, _LEFT, _RIGHT, _TITLE = 3.7, 0.72, 0.14, 0.36  # inches
_LEGEND_ROW, _LEGEND_KEY, _LEGEND_CHARACTER = 0.165, 0.5, 0.068
_POINT = 72 / DOTS_PER_INCH
_LABEL_PAD = 0.8  # points around a label, as other viewers have other fonts
_FRONTIER = "Pareto frontier"
_HULL, _GREY = "#bdbdbd", "#777777"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """`unit` is what speeds are per: GPU, or server. `interactivity` are speeds per user, in tok/s, to compare at.

    `caption` are paragraphs, the longest last: it is cut where there is no room. `details` are in the description only.
    """

    title: str
    curves: Mapping[str, Sequence[Point]]
    unit: str
    caption: tuple[str, ...]
    interactivity: tuple[float, ...] = ()
    label_meaning: str = "clients, or requests/s"
    details: tuple[str, ...] = ()

    def paragraphs(self) -> tuple[str, ...]:
        speeds = self.interactivity if self.curves else ()
        ratios = " ".join(ratio_text(self.curves, per_user) for per_user in speeds)
        return tuple(filter(None, (f"Next to points: {self.label_meaning}.", ratios, *self.caption)))


def draw(figure: Figure, path: Path) -> None:
    """Write the picture, in the format of the file's ending. Raises ConfigError as `check_figure` does."""
    description = "\n".join((*figure.paragraphs(), *figure.details))
    write_figure(lambda: canvas_of(figure), path, title=figure.title, description=description)


def ratio_text(curves: Mapping[str, Sequence[Point]], per_user: float) -> str:
    """A sentence that compares the configurations at a speed per user."""
    first = next(iter(curves))
    ratios = ratios_at(curves, per_user)
    words = [f"{name} {_ratio(ratio)}" for name, ratio in ratios.items() if ratio is not None and name != first]
    missing = [name for name, points in curves.items() if per_gpu_at(points, per_user) is None]
    speed = f"{float(f'{per_user:.3g}'):g}"
    text = f"At {speed} tok/s per user, throughput relative to {first}: {'; '.join(words) or 'none to compare'}."
    return text + (f" Not as fast at any load: {'; '.join(missing)}." if missing else "")


def _ratio(ratio: float) -> str:
    """Two digits, as runs differ by more than the third."""
    rounded = float(f"{ratio:.2g}")
    return f"{rounded:.1f}x" if 1 <= rounded < 10 else f"{rounded:g}x"


def canvas_of(figure: Figure) -> Any:
    """The matplotlib figure: title, legend, plot and caption, one below the other."""
    num_rows = _legend_rows(list(figure.curves) + [_FRONTIER] * _has_frontier(figure))
    height = _TITLE + _LEGEND_ROW * num_rows + _PLOT_HEIGHT
    page = Page(figure.title, figure.paragraphs(), height=height, left=_LEFT)
    axes = page.axes(_LEFT, 0, WIDTH - _LEFT - _RIGHT, _PLOT_HEIGHT)
    _draw_curves(axes, figure)
    _draw_axes(axes, figure)
    if figure.curves:
        _draw_legend(axes, num_rows)
    _draw_labels(axes, figure)
    return page.finish()


def _draw_curves(axes: Any, figure: Figure) -> None:
    """The frontier lies below all curves, and is left out where it is one of them."""
    for index, (name, points) in enumerate(figure.curves.items()):
        colour, marker = line_style(index)
        x, y = [point.per_user for point in points], [point.per_gpu for point in points]
        style = {"markersize": 2 * MARKER_RADIUS - 1, "linewidth": 1.5, "gid": f"curve-{index}"}
        axes.plot(x, y, color=colour, marker=marker, label=name, **style)
    if _has_frontier(figure):
        outline = hull(figure.curves)
        x, y = [point.per_user for point in outline], [point.per_gpu for point in outline]
        axes.plot(x, y, color=_HULL, linewidth=5, alpha=0.6, zorder=1, label=_FRONTIER, gid="hull")
    for per_user in figure.interactivity if figure.curves else ():
        axes.axvline(per_user, color=_GREY, linestyle=(0, (1.5, 3)), linewidth=0.9, zorder=1)


def _has_frontier(figure: Figure) -> bool:
    return hull(figure.curves) not in [[], *map(list, figure.curves.values())]


def _draw_axes(axes: Any, figure: Figure) -> None:
    points = [point for points in figure.curves.values() for point in points]
    axes.set_xlim(0, 1.1 * max((point.per_user for point in points), default=1.0))
    axes.set_ylim(0, 1.1 * max((point.per_gpu for point in points), default=1.0))
    axes.set_xlabel("Interactivity (output tok/s per user, median over requests of 1 / TPOT)")
    axes.set_ylabel(f"Throughput (output tok/s per {figure.unit})")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
    draw_frame(axes)


def _draw_legend(axes: Any, num_rows: int) -> None:
    """Between title and plot, where no curve can be."""
    handles, names = axes.get_legend_handles_labels()
    where = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.3, "borderpad": 0}
    spacing = {
        "handlelength": 1.9,
        "columnspacing": 1.5,
        "labelspacing": 0.3,
        "ncols": math.ceil(len(names) / num_rows),
    }
    for text in axes.legend(handles, names, **where, **spacing, fontsize=8.5, frameon=False).get_texts():
        text.set_parse_math(False)


def _legend_rows(names: Sequence[str]) -> int:
    """The fewest in which the names fit over the plot; matplotlib fills them column by column."""
    for num_rows in range(1, len(names)):
        columns = [names[start : start + num_rows] for start in range(0, len(names), num_rows)]
        width = sum(_LEGEND_KEY + _LEGEND_CHARACTER * max(map(len, column)) for column in columns)
        if width < WIDTH - _LEFT - _RIGHT:
            return num_rows
    return len(names)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Note:
    """The label of a point, or a ratio where a curve has a compared speed. Low ranks are placed first."""

    point: Point
    curve: int
    rank: int  # 0: ends of curves and best points; 1: ratios; these are required. 2: on the frontier; 3: others
    is_best: bool  # on the frontier: no curve is above it


def _draw_labels(axes: Any, figure: Figure) -> None:
    """Each where `place_labels` puts it, from the sizes that the texts have when drawn."""
    to_points = axes.transData.transform
    curves = [
        [tuple(_POINT * to_points((point.per_user, point.per_gpu))) for point in points]
        for points in figure.curves.values()
    ]
    lines = [Segment(*a, *b) for curve in curves for a, b in pairwise(curve)]
    frame = Box(*(_POINT * axes.bbox.extents))
    notes = sorted(_notes(figure), key=lambda note: note.rank)
    texts = [_draw_note(axes, note) for note in notes]
    labels = [_label(axes, note, text) for note, text in zip(notes, texts, strict=True)]
    rings = [(label.x, label.y) for label, note in zip(labels, notes, strict=True) if note.rank == 1]
    places = place_labels(labels, [*rings, *(place for curve in curves for place in curve)], lines, frame)
    for text, label, place in zip(texts, labels, places, strict=True):
        if place is None:
            text.remove()
        else:
            _move(axes, text, label, place)


def _notes(figure: Figure) -> Iterator[_Note]:
    outline, compared = hull(figure.curves), figure.interactivity if figure.curves else ()
    for per_user in compared:
        heights = [per_gpu_at(points, per_user) for points in figure.curves.values()]
        for curve, (ratio, height) in enumerate(zip(ratios_at(figure.curves, per_user).values(), heights, strict=True)):
            if curve > 0 and ratio is not None and height is not None:
                point = Point(per_user=per_user, per_gpu=height, label=_ratio(ratio))
                yield _Note(point=point, curve=curve, rank=1, is_best=height == max(filter(None, heights)))
    best = [next((point for point in outline if point.per_user >= per_user), None) for per_user in compared]
    for curve, points in enumerate(figure.curves.values()):
        for point in filter(lambda point: point.label, points):
            is_best, is_required = point in outline, point in (points[0], points[-1], *best)
            yield _Note(point=point, curve=curve, rank=0 if is_required else 2 if is_best else 3, is_best=is_best)


def _draw_note(axes: Any, note: _Note) -> Any:
    """The text, still on its point; a ratio also has a ring on its curve."""
    colour, _ = line_style(note.curve)
    style: dict[str, Any] = {"color": colour, "va": "bottom", "textcoords": "offset points", "parse_math": False}
    style |= {"bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.2}}
    place = (note.point.per_user, note.point.per_gpu)
    if note.rank == 1:
        ring = {"marker": "o", "markersize": 3.5, "markerfacecolor": "white", "markeredgewidth": 0.9}
        axes.plot(*([value] for value in place), color=colour, **ring)
        return axes.annotate(note.point.label, place, xytext=(0, 0), fontsize=8.5, fontweight="bold", **style)
    return axes.annotate(note.point.label, place, xytext=(0, 0), fontsize=7.5, **style)


def _label(axes: Any, note: _Note, text: Any) -> Label:
    x, y = _POINT * axes.transData.transform((note.point.per_user, note.point.per_gpu))
    size = text.get_window_extent(axes.figure.canvas.get_renderer())
    width, height = (2 * _LABEL_PAD + _POINT * side for side in (size.width, size.height))
    return Label(x=x, y=y, width=width, height=height, is_required=note.rank < 2, is_above=note.is_best)


def _move(axes: Any, text: Any, label: Label, place: Place) -> None:
    box = place.box
    anchor = {-1: box.right - _LABEL_PAD, 0: (box.left + box.right) / 2, 1: box.left + _LABEL_PAD}[place.side]
    text.set_horizontalalignment({-1: "right", 0: "center", 1: "left"}[place.side])
    text.set_position((anchor - label.x, box.bottom + _LABEL_PAD - label.y))
    if place.leader is not None:
        end = (place.leader.x1 - label.x, place.leader.y1 - label.y)
        line = {"arrowstyle": "-", "linewidth": 0.5, "color": text.get_color(), "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", text.xy, xytext=end, textcoords="offset points", arrowprops=line)
