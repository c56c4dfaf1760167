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
CAPTION_LINE = 0.137  # inches
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


def new_canvas(height: float) -> Any:
    """A figure of matplotlib, as high as this many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    canvas = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH)
    FigureCanvasAgg(canvas)
    return canvas


def add_axes(canvas: Any, left: float, below: float, width: float, height: float) -> Any:
    """Axes at a place in inches."""
    wide, high = canvas.get_size_inches()
    return canvas.add_axes((left / wide, below / high, width / wide, height / high))


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


def draw_texts(canvas: Any, title: str, lines: Sequence[str], *, left: float, caption_top: float) -> None:
    """The title on top, and the caption below `caption_top` inches. Dollar signs of a command are no formulas."""
    height = canvas.get_size_inches()[1]
    style: dict[str, Any] = {"va": "top", "parse_math": False}
    canvas.text(left / WIDTH, 1 - 0.08 / height, title, fontsize=10.5, fontweight="bold", **style)
    style |= {"fontsize": 7.5, "color": _CAPTION, "linespacing": 1.35, "gid": "caption"}
    canvas.text(0.01, caption_top / height, "\n".join(lines), **style)


def draw_frame(axes: Any) -> None:
    """Ticks, grid and the two axes."""
    axes.tick_params(labelsize=8, width=0.7, length=3)
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
