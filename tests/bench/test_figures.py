"""Figures have the numbers of their reports: two of everything, each with another number."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.bench import acceptance_figure, comparison_figure, figure_file, throughput_figure
from dflash_trt.bench.acceptance import Acceptance
from dflash_trt.bench.comparison import ComparedText, Comparison
from dflash_trt.bench.intervals import Interval
from dflash_trt.bench.speedup import SideReport
from dflash_trt.bench.throughput import PolicyReport
from tests.distinct import Distinct

pytest.importorskip("matplotlib", reason="needs the extra 'figures'")


def texts(items: Any) -> list[str]:
    return [item.get_text() for item in items]


def test_a_line_of_each_policy_has_its_throughput_at_every_load(tmp_path: Path) -> None:
    distinct = Distinct()
    reports = [distinct.of(PolicyReport, concurrency=count) for count in (4, 1, 16)]
    [axes] = throughput_figure.canvas_of(reports, ("caption",)).axes
    assert texts(axes.get_legend().get_texts()) == [speed.policy for speed in reports[0].speeds]
    for index, line in enumerate(axes.lines):
        assert list(line.get_xdata()) == [4, 1, 16]
        assert list(line.get_ydata()) == [report.speeds[index].output_tok_per_s for report in reports]
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == len(axes.lines) == 2
    assert axes.get_ylim()[0] == 0 and texts(axes.get_xticklabels()) == ["4", "1", "16"]
    throughput_figure.draw_throughput(reports, tmp_path / "f.svg", ("one", "two"))
    drawn = (tmp_path / "f.svg").read_text()
    assert ">one<" in drawn and ">two<" in drawn and "<dc:date>" not in drawn


def compared(num_tokens: int, num_equal: int, kl: list[float] | None) -> ComparedText:
    scores = None if kl is None else np.array(kl)
    return Distinct().of(
        ComparedText, num_tokens=num_tokens, num_equal_tokens=num_equal, kl_nats=scores, is_agreeing=None
    )


def test_texts_that_stay_equal_and_distances_of_all_positions(tmp_path: Path) -> None:
    texts = (compared(4, 1, [0.5, 0.125, 1e-9, 1e-9]), compared(2, 2, [0.25, 2.0]), compared(0, 0, []))
    comparison = Distinct().of(Comparison, texts=texts)
    equal, apart = comparison_figure._canvas(comparison, ("caption",)).axes
    [line] = equal.lines
    assert list(line.get_xdata()) == [1, 2, 3, 4] and list(line.get_ydata()) == [1.0, 0.5, 0.0, 0.0]
    [line] = apart.lines
    assert list(line.get_xdata()) == [1e-6, 1e-6, 0.125, 0.25, 0.5, 2.0]
    assert list(line.get_ydata()) == pytest.approx([6 / 6, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert apart.get_xscale() == "log"
    without = Distinct().of(Comparison, texts=tuple(replace(text, kl_nats=None) for text in texts))
    assert len(comparison_figure._canvas(without, ("caption",)).axes) == 1
    comparison_figure.draw_comparison(comparison, tmp_path / "f.svg", ("of one",))
    assert ">of one<" in (tmp_path / "f.svg").read_text()


def test_a_curve_of_each_drafter_has_its_fractions_between_their_bounds() -> None:
    distinct = Distinct()
    plain = distinct.of(SideReport, acceptance=None, temperature=0.0)
    reports = [plain, *(distinct.of(SideReport, name=name, temperature=0.0) for name in ("one", "two"))]
    curves, *maps = acceptance_figure.canvas_of(reports, ("caption",)).axes
    for line, band, report in zip(curves.lines, curves.collections, reports[1:], strict=True):
        assert report.acceptance is not None
        assert list(line.get_xdata()) == [1, 2] and tuple(line.get_ydata()) == report.acceptance.by_position
        bounds = {value for bound in report.acceptance.by_position_interval for value in (bound.low, bound.high)}
        assert {y for _, y in band.get_paths()[0].vertices} == bounds
        assert band.get_facecolor()[0][:3].tolist() == pytest.approx(_rgb(line.get_color()))
    assert [axes.get_title() for axes in maps] == ["one", "two"]
    for axes, report in zip(maps, reports[1:], strict=True):
        groups = [
            report.acceptance,
            *report.acceptance_by_category.values(),
            *report.acceptance_by_context_len.values(),
        ]
        of_rows = {text.get_position()[1]: [] for text in axes.texts}
        for text in axes.texts:
            of_rows[text.get_position()[1]].append(text.get_text())
        shown = [row for row in of_rows.values() if row]
        expected = [
            [*(f"{100 * x:.0f}%" for x in found.by_position), f"{found.length:.2f}"] for found in groups if found
        ]
        assert shown == expected


def test_maps_of_drafters_share_the_width_by_their_positions() -> None:
    distinct = Distinct()
    nothing: dict[str, Any] = {"acceptance_by_category": {}, "acceptance_by_context_len": {}}
    reports = []
    for num in (2, 6):
        bounds = (Interval(low=0.25, high=0.75),) * num
        found = distinct.of(Acceptance, by_position=(0.5,) * num, by_position_interval=bounds)
        reports.append(distinct.of(SideReport, name=str(num), acceptance=found, **nothing))
    _, first, second = (axes.get_position() for axes in acceptance_figure.canvas_of(reports, ()).axes)
    assert 0 < first.x0 < first.x1 < second.x0 < second.x1 < 1
    assert second.width == pytest.approx(3 * first.width) and first.width + second.width > 0.6


def _rgb(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


@pytest.mark.parametrize("num_lines", [8, 9, 10])
def test_a_caption_has_nine_lines_at_most(num_lines: int) -> None:
    paragraphs = [f"line {i}" for i in range(num_lines)]
    lines = figure_file.caption_lines(paragraphs)
    assert lines[:8] == paragraphs[:8] and len(lines) == min(num_lines, 9)
    assert lines[8:] == ([] if num_lines == 8 else ["line 8"] if num_lines == 9 else [f"line 8{_CUT}"])


_CUT = " ... (in full in the description of this file)"


def test_a_long_last_line_is_cut_at_a_word_and_fits() -> None:
    lines = figure_file.caption_lines([" ".join(["word"] * 400)])
    assert len(lines) == 9 and lines[-1].endswith(f"word{_CUT}")
    assert 120 < len(lines[-1]) <= 132 and max(map(len, lines)) <= 132
