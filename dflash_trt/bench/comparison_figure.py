"""The figure of a comparison: how long texts stay equal to the baseline's, and how far distributions are apart."""

from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.bench.comparison import ComparedText, Comparison
from dflash_trt.bench.figure_file import WIDTH, Page, draw_frame, line_style, write_figure

_TITLE = "What the candidate loses"
_EXPLANATION = (
    "Left: fraction of texts that are equal to the baseline's up to a token; a text that ends is counted no more. "
    "Right: fraction of generated positions at which the KL divergence from the baseline is at least so large."
)
_TOP, _HEIGHT = 0.36, 2.4  # inches
_LEFT, _RIGHT, _GAP = 0.6, 0.2, 0.75
_LEAST_KL = 1e-6  # nats: less is rounding, and has no place on a logarithmic axis


def draw_comparison(comparison: Comparison, path: Path, caption: tuple[str, ...]) -> None:
    """Write the picture; without scores of the candidate its left half alone. Raises ConfigError as `check_figure`."""
    paragraphs = (_EXPLANATION, *caption)
    write_figure(lambda: _canvas(comparison, paragraphs), path, title=_TITLE, description="\n".join(paragraphs))


def _canvas(comparison: Comparison, paragraphs: tuple[str, ...]) -> Any:
    page = Page(_TITLE, paragraphs, height=_TOP + _HEIGHT, left=_LEFT)
    scored = [text.kl_nats for text in comparison.texts if text.kl_nats is not None]
    num_axes = 2 if scored else 1
    width = (WIDTH - _LEFT - _RIGHT - _GAP * (num_axes - 1)) / num_axes
    axes = page.axes(_LEFT, 0, width, _HEIGHT)
    _draw_line(axes, np.arange(1, len(equal_texts(comparison.texts)) + 1), equal_texts(comparison.texts), "equal")
    axes.set_xlabel("Token of the text", fontsize=8.5)
    axes.set_ylabel("Fraction of texts still equal", fontsize=8.5)
    if scored:
        kl = np.sort(np.concatenate(scored))
        axes = page.axes(_LEFT + width + _GAP, 0, width, _HEIGHT)
        _draw_line(axes, np.maximum(kl, _LEAST_KL), 1 - np.arange(len(kl)) / len(kl), "kl")
        axes.set_xscale("log")
        axes.set_xlabel(f"{comparison.kl_name} (nats)", fontsize=8.5)
        axes.set_ylabel("Fraction of positions", fontsize=8.5)
    return page.finish()


def equal_texts(texts: tuple[ComparedText, ...]) -> list[float]:
    """By token from the first on: of the texts of at least that length, those that are equal up to it."""
    longest = max((text.num_tokens for text in texts), default=0)
    return [
        float(np.mean([text.num_equal_tokens >= end for text in texts if text.num_tokens >= end]))
        for end in range(1, longest + 1)
    ]


def _draw_line(axes: Any, x: Any, y: Any, name: str) -> None:
    axes.plot(x, y, color=line_style(0)[0], linewidth=1.5, drawstyle="steps-post", gid=f"curve-{name}")
    axes.set_ylim(0, 1.02)
    draw_frame(axes)
