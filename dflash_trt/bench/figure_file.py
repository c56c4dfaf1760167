"""Files of figures, as PNG or SVG, drawn by matplotlib for a page of 700 pixels; and what all figures share.

The same figure gives the same file, byte for byte. What the caption has no room for is in the file's description.
matplotlib is imported where it draws, and nowhere else.
"""

import textwrap
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_trt.core.errors import ConfigError

ENDINGS = (".png", ".svg")
WIDTH = 7.3  # inches
DOTS_PER_INCH = 200
_BOTTOM, _CAPTION_LINE = 0.5, 0.137  # inches below axes, and of a line
_CAPTION_COLUMNS, _CAPTION_LINES = 132, 9
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito's
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # for readers who do not see the colours
_GRID, _CAPTION = "#ebebeb", "#444444"
# Text stays text, and ids of SVG elements do not change from run to run.
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "dflash-trt", "font.size": 9, "axes.linewidth": 0.7}


def check_figure(path: Path) -> None:
    """Raise ConfigError for a bad file ending or without matplotlib, before minutes of measurement."""
    if path.suffix not in ENDINGS:
        raise ConfigError.about("figure", expected=f"a name that ends with {' or '.join(ENDINGS)}", found=path.name)
    if find_spec("matplotlib") is None:
        hint = "Install it with: pip install 'dflash-trt[figures]'"
        raise ConfigError.about("figure", expected="the package matplotlib", found="none", hint=hint)


def write_figure(canvas: Callable[[], Any], path: Path, *, title: str, description: str) -> None:
    """Write the picture that `canvas` draws, in the format of the file's ending. Raises ConfigError."""
    check_figure(path)
    import matplotlib as mpl  # type: ignore[import-not-found, unused-ignore]

    # Neither a date nor a version: a stored figure changes with its numbers alone.
    absent = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
    with mpl.rc_context(_SETTINGS):
        metadata = absent | {"Title": title, "Description": description}
        canvas().savefig(path, dpi=DOTS_PER_INCH, metadata=metadata)


class Page:
    """A figure of matplotlib: the title on top, the caption below, and room for axes between them; sizes in inches."""

    def __init__(self, title: str, paragraphs: Sequence[str], *, height: float, left: float) -> None:
        """`height` is that of title and axes."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found, unused-ignore]
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

        self._title, self._left = title, left
        self._lines = caption_lines(paragraphs)
        self._below = _BOTTOM + _CAPTION_LINE * (len(self._lines) + 0.7)
        self._height = height + self._below
        self.canvas = Figure(figsize=(WIDTH, self._height), dpi=DOTS_PER_INCH)
        FigureCanvasAgg(self.canvas)

    def axes(self, left: float, below: float, width: float, height: float) -> Any:
        """Axes at a place above the caption."""
        below += self._below
        return self.canvas.add_axes((left / WIDTH, below / self._height, width / WIDTH, height / self._height))

    def finish(self) -> Any:
        """The canvas, with its title and caption. Dollar signs of a command are no formulas."""
        style: dict[str, Any] = {"va": "top", "parse_math": False}
        top = 1 - 0.08 / self._height
        self.canvas.text(self._left / WIDTH, top, self._title, fontsize=10.5, fontweight="bold", **style)
        style |= {"fontsize": 7.5, "color": _CAPTION, "linespacing": 1.35, "gid": "caption"}
        self.canvas.text(0.01, (self._below - _BOTTOM) / self._height, "\n".join(self._lines), **style)
        return self.canvas


def line_style(index: int) -> tuple[str, str]:
    """Colour and marker of a line."""
    return _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]


def caption_lines(paragraphs: Sequence[str]) -> list[str]:
    lines = [line for text in paragraphs for line in textwrap.wrap(text, _CAPTION_COLUMNS, break_on_hyphens=False)]
    if len(lines) <= _CAPTION_LINES:
        return lines
    end = " ... (in full in the description of this file)"
    kept = lines[:_CAPTION_LINES]
    return [*kept[:-1], textwrap.shorten(kept[-1], _CAPTION_COLUMNS - len(end), placeholder="") + end]


def draw_frame(axes: Any) -> None:
    """Ticks, grid and the two axes."""
    axes.tick_params(labelsize=8, width=0.7, length=3)
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
