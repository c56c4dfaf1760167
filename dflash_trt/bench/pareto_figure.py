"""The figure of tok/s per user against tok/s per GPU as SVG, written without a plotting library.

Both axes start at 0 and are linear. Each point carries its load: clients, or requests/s.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from dflash_trt.bench.pareto import Point, hull, per_gpu_at, ratios_at

_WIDTH, _PLOT_HEIGHT, _LEFT, _RIGHT, _TOP = 900, 460, 84, 28, 46
_LINE_HEIGHT, _NUM_TICKS, _CAPTION_COLUMNS = 17, 6, 136
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito's
_HULL = "#9a9a9a"


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


def svg(figure: Figure) -> str:
    """The whole document."""
    ratios = tuple(ratio_text(figure.curves, per_user) for per_user in figure.interactivity)
    texts = ("Numbers beside points: clients, or requests/s.", *ratios, *figure.caption)
    lines = [line for text in texts for line in textwrap.wrap(text, _CAPTION_COLUMNS)]
    axes = _Axes.over([point for points in figure.curves.values() for point in points])
    height = _TOP + _PLOT_HEIGHT + 62 + _LINE_HEIGHT * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LEFT, 28, figure.title, extra='font-size="17" font-weight="bold"'),
        *axes.drawn(figure.unit),
        *_verticals(figure, axes),
        *_curves(figure, axes),
        *_legend(figure),
        *(
            _text(_LEFT - 60, _TOP + _PLOT_HEIGHT + 68 + _LINE_HEIGHT * i, line, extra='font-size="12" fill="#333"')
            for i, line in enumerate(lines)
        ),
        "</svg>\n",
    ]
    return "\n".join(parts)


def ratio_text(curves: Mapping[str, Sequence[Point]], per_user: float) -> str:
    """A sentence that compares the configurations at a speed per user."""
    first = next(iter(curves))
    ratios = ratios_at(curves, per_user)
    words = [f"{name} {ratio:.2f}x" for name, ratio in ratios.items() if ratio is not None and name != first]
    missing = [name for name, points in curves.items() if per_gpu_at(points, per_user) is None]
    text = f"At {per_user:.4g} tok/s per user, throughput relative to {first}: {', '.join(words) or 'none to compare'}."
    return text + (f" Not as fast at any load: {', '.join(missing)}." if missing else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axes:
    """`max_` of an axis is its last tick."""

    max_x: float
    step_x: float
    max_y: float
    step_y: float

    @classmethod
    def over(cls, points: Sequence[Point]) -> "_Axes":
        max_x, step_x = _scale(max((point.per_user for point in points), default=1.0))
        max_y, step_y = _scale(max((point.per_gpu for point in points), default=1.0))
        return cls(max_x=max_x, step_x=step_x, max_y=max_y, step_y=step_y)

    def x(self, value: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self.max_x, 1)

    def y(self, value: float) -> float:
        return round(_TOP + _PLOT_HEIGHT * (1 - value / self.max_y), 1)

    def drawn(self, unit: str) -> Iterator[str]:
        bottom, right = _TOP + _PLOT_HEIGHT, _WIDTH - _RIGHT
        for value in _ticks(self.max_x, self.step_x):
            yield _line((self.x(value), _TOP), (self.x(value), bottom), 'stroke="#e6e6e6"')
            yield _text(self.x(value), bottom + 19, f"{value:g}", extra='text-anchor="middle"')
        for value in _ticks(self.max_y, self.step_y):
            yield _line((_LEFT, self.y(value)), (right, self.y(value)), 'stroke="#e6e6e6"')
            yield _text(_LEFT - 8, self.y(value) + 4, f"{value:g}", extra='text-anchor="end"')
        yield _line((_LEFT, bottom), (right, bottom), 'stroke="black"')
        yield _line((_LEFT, _TOP), (_LEFT, bottom), 'stroke="black"')
        middle = (_LEFT + right) / 2
        label = "interactivity: output tok/s per user (median over requests of 1 / TPOT)"
        yield _text(middle, bottom + 42, label, extra='text-anchor="middle"')
        y = _TOP + _PLOT_HEIGHT / 2
        place = f'text-anchor="middle" transform="rotate(-90 22 {y:g})"'
        yield _text(22, y, f"throughput: output tok/s per {unit}", extra=place)


def _curves(figure: Figure, axes: _Axes) -> Iterator[str]:
    outline = [(axes.x(point.per_user), axes.y(point.per_gpu)) for point in hull(figure.curves)]
    yield _polyline(outline, f'stroke="{_HULL}" stroke-width="7" stroke-opacity="0.45" stroke-linejoin="round"')
    for index, points in enumerate(figure.curves.values()):
        places = [(axes.x(point.per_user), axes.y(point.per_gpu)) for point in points]
        yield _polyline(places, f'stroke="{_colour(index)}" stroke-width="2"')
        for point, (x, y) in zip(points, places, strict=True):
            yield _marker(index, x, y)
            extra = f'font-size="11" fill="{_colour(index)}"'
            yield _text(x + 7, y - 6, point.label, extra=extra)


def _verticals(figure: Figure, axes: _Axes) -> Iterator[str]:
    for per_user in figure.interactivity:
        if per_user <= axes.max_x:
            x = axes.x(per_user)
            yield _line((x, _TOP), (x, _TOP + _PLOT_HEIGHT), 'stroke="#555" stroke-dasharray="2 4"')


def _legend(figure: Figure) -> Iterator[str]:
    """At the upper right, which no curve reaches: no configuration is best for both users and machine."""
    names = [*figure.curves, "hull of all"]
    width = 46 + 7.2 * max(map(len, names))
    left, top = _WIDTH - _RIGHT - width, _TOP + 8
    yield (
        f'<rect x="{left:g}" y="{top}" width="{width:g}" height="{20 * len(names) + 10}" fill="white" '
        'fill-opacity="0.85" stroke="#ccc"/>'
    )
    for index, name in enumerate(names):
        y = top + 18 + 20 * index
        is_hull = index == len(figure.curves)
        style = f'stroke="{_HULL}" stroke-width="7" stroke-opacity="0.45"' if is_hull else ""
        yield _line((left + 8, y - 4), (left + 34, y - 4), style or f'stroke="{_colour(index)}" stroke-width="2"')
        if not is_hull:
            yield _marker(index, left + 21, y - 4)
        yield _text(left + 41, y, name)


def _marker(index: int, x: float, y: float) -> str:
    """Of a shape of its own, for readers who do not see the colours."""
    colour = _colour(index)
    shape = index % 4
    if shape == 0:
        return f'<circle cx="{x:g}" cy="{y:g}" r="4.5" fill="{colour}"/>'
    corners = {
        1: ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        2: ((0, -5.5), (5, 4), (-5, 4)),
        3: ((0, -6), (6, 0), (0, 6), (-6, 0)),
    }
    places = " ".join(f"{x + dx:g},{y + dy:g}" for dx, dy in corners[shape])
    return f'<polygon points="{places}" fill="{colour}"/>'


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _text(x: float, y: float, text: str, *, extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {extra}>{escape(text)}</text>'


def _line(start: tuple[float, float], end: tuple[float, float], style: str) -> str:
    return f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" {style}/>'


def _polyline(places: Sequence[tuple[float, float]], style: str) -> str:
    return f'<polyline points="{" ".join(f"{x:g},{y:g}" for x, y in places)}" fill="none" {style}/>'


def _scale(largest: float) -> tuple[float, float]:
    """The end of an axis and the distance of its ticks: 1, 2 or 5 times a power of ten."""
    rough = max(largest, 1e-9) * 1.08 / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough)
    return step * math.ceil(largest * 1.04 / step), step


def _ticks(end: float, step: float) -> list[float]:
    return [round(step * index, 9) for index in range(round(end / step) + 1)]
