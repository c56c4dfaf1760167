"""The figure of speed per user against speed per GPU: what it says, and where its points are."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dflash_trt.bench import pareto_figure
from dflash_trt.bench.pareto import Point, hull
from dflash_trt.bench.pareto_figure import Figure, check_figure, draw
from dflash_trt.core.errors import ConfigError
from scripts.draw_figure import figure_of
from tests.docs.pages import ROOT

SVG = "{http://www.w3.org/2000/svg}"
CAPTION = ("Command: dflash-trt bench serve <x> & $y$", "Hardware: a laptop")


def curve(*places: tuple[float, float]) -> list[Point]:
    return [Point(per_user=x, per_gpu=y, label=str(index)) for index, (x, y) in enumerate(places)]


CURVES = {"plain": curve((50, 400), (100, 100)), "drafted": curve((60, 300), (200, 150), (90, 120))}
FIGURE = Figure(title="T", curves=CURVES, unit="GPU", caption=CAPTION, interactivity=(100, 150))


@pytest.fixture
def drawn(tmp_path: Path) -> ElementTree.Element:
    pytest.importorskip("matplotlib", reason="needs the extra 'figures'")
    draw(FIGURE, tmp_path / "f.svg")
    return ElementTree.parse(tmp_path / "f.svg").getroot()


def line(root: ElementTree.Element, name: str) -> list[tuple[float, float]]:
    (group,) = (element for element in root.iter(f"{SVG}g") if element.get("id") == name)
    path = group.find(f"{SVG}path").get("d")
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)]


def test_the_figure_says_what_it_shows(drawn: ElementTree.Element) -> None:
    texts = [element.text for element in drawn.iter(f"{SVG}text")]
    for expected in ("T", "plain", "drafted", "hull of all", *CAPTION, "throughput: output tok/s per GPU", "2.57x"):
        assert expected in texts
    assert any(text.startswith("interactivity: output tok/s per user") for text in texts)
    assert "At 100 tok/s per user, throughput relative to plain: drafted 2.57x." in texts
    assert any("none to compare. Not as fast at any load: plain." in text for text in texts)
    assert [texts.count(label) for label in ("1", "2")] == [2, 1], "loads of the points, in order"


def test_points_are_where_their_speeds_are(drawn: ElementTree.Element) -> None:
    """By one scale for each axis: that of the first two points of the first curve holds for all others."""
    places = [place for index in range(2) for place in line(drawn, f"curve-{index}")]
    points = [point for points in CURVES.values() for point in points]
    (x0, y0), (x1, y1) = places[:2]
    for point, (x, y) in zip(points, places, strict=True):
        assert x == pytest.approx(x0 + (x1 - x0) * (point.per_user - 50) / 50, abs=1e-3)
        assert y == pytest.approx(y0 + (y1 - y0) * (point.per_gpu - 400) / -300, abs=1e-3)
    assert x1 > x0 and y1 > y0, "y of SVG points down"
    by_point = dict(zip(points, places, strict=True))
    assert line(drawn, "hull") == [by_point[point] for point in hull(CURVES)]


def test_the_legend_covers_no_point(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'figures'")
    best = curve((350, 410), (796, 373))  # for users and for the machine
    worse = {name: curve((250, 280), (300, 180)) for name in ("first", "second", "third, with a long name")}
    for curves, stays in ((CURVES, True), ({"best": best, **worse}, False)):
        draw(replace(FIGURE, curves=curves, interactivity=()), tmp_path / "f.svg")
        root = ElementTree.parse(tmp_path / "f.svg").getroot()
        (group,) = (element for element in root.iter(f"{SVG}g") if element.get("id") == "legend_1")
        corners = re.findall(r"[MLQ] ([\d.]+) ([\d.]+)", next(group.iter(f"{SVG}path")).get("d"))
        x, y = [float(corner[0]) for corner in corners], [float(corner[1]) for corner in corners]
        points = [place for index in range(len(curves)) for place in line(root, f"curve-{index}")]
        assert not [place for place in points if min(x) < place[0] < max(x) and min(y) < place[1] < max(y)]
        assert (max(x) > 600 and max(y) < 200) is stays, "the upper right, if that is free"


def test_the_ending_names_the_format_and_a_figure_is_the_same_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'figures'")
    for name in ("a.png", "a.svg", "b.svg", "empty.png"):
        draw(replace(FIGURE, curves={}) if name == "empty.png" else FIGURE, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    for name in ("a.png", "a.svg"):
        drawn = (tmp_path / name).read_bytes()
        assert b"<dc:date>" not in drawn and b"matplotlib v" not in drawn.lower(), "no date, no version"
    draw(replace(FIGURE, title="U"), tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() != (tmp_path / "b.svg").read_bytes()


def test_what_cannot_be_drawn_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ends with \.png or \.svg, found f\.pdf"):
        check_figure(Path("f.pdf"))
    monkeypatch.setattr(pareto_figure, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package matplotlib, found none.*dflash-trt\[figures\]"):
        draw(FIGURE, Path("f.svg"))


def test_the_figure_of_the_documentation_is_drawn_from_the_numbers_stored_beside_it() -> None:
    """Its caption and its points; matplotlib's next version may place a tick elsewhere."""
    figure = figure_of(json.loads((ROOT / "docs/bench_serve_demo.json").read_text()))
    root = ElementTree.parse(ROOT / "docs/bench_serve_demo.svg").getroot()
    texts = " ".join(element.text or "" for element in root.iter(f"{SVG}text"))
    for part in (*figure.caption, *figure.curves, "throughput relative to served, autoregressive: served 2.45x."):
        assert part in texts
    places = [place for index in range(2) for place in line(root, f"curve-{index}")]
    points = [point for points in figure.curves.values() for point in points]
    for speeds, found in (
        ([p.per_user for p in points], [x for x, _ in places]),
        ([p.per_gpu for p in points], [y for _, y in places]),
    ):
        slope = (found[0] - found[3]) / (speeds[0] - speeds[3])
        assert found == pytest.approx([found[0] + slope * (speed - speeds[0]) for speed in speeds], abs=0.01)
