"""The figure of speed per user against speed per GPU: what it says, and where its points are."""

import json
import re
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.bench import figure_file
from dflash_trt.bench.figure_file import check_figure
from dflash_trt.bench.label_places import Box
from dflash_trt.bench.pareto import Point, hull
from dflash_trt.bench.pareto_figure import Figure, canvas_of, draw, ratio_text
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
    for expected in ("T", "plain", "drafted", "Pareto frontier", *CAPTION, "Throughput (output tok/s per GPU)", "2.6x"):
        assert expected in texts
    assert any(text.startswith("Interactivity (output tok/s per user") for text in texts)
    caption = " ".join(texts)
    assert "At 100 tok/s per user, throughput relative to plain: drafted 2.6x." in caption
    assert "none to compare. Not as fast at any load: plain." in caption
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


@dataclass(frozen=True)
class Drawn:
    """Boxes as matplotlib draws them, in pixels: left, bottom, right, top."""

    labels: dict[str, Box]
    markers: list[Box]
    others: list[Box]  # title, legend, caption and labels of the axes
    plot: Box
    page: Box
    caption_fraction: float


def drawn_boxes(figure: Figure) -> Drawn:
    mpl = pytest.importorskip("matplotlib", reason="needs the extra 'figures'")
    canvas = canvas_of(figure)
    canvas.canvas.draw()
    [axes], renderer = canvas.axes, canvas.canvas.get_renderer()
    extent = mpl.text.Text.get_window_extent  # without leader lines, which Annotation's own has
    labels = {f"{text.get_text()} {index}": extent(text, renderer) for index, text in enumerate(axes.texts)}
    legend = axes.get_legend()
    others = [*canvas.texts, axes.xaxis.label, axes.yaxis.label]
    [caption] = [text for text in canvas.texts if text.get_gid() == "caption"]
    centres = [axes.transData.transform((p.per_user, p.per_gpu)) for points in figure.curves.values() for p in points]
    radius = 2.5 * canvas.dpi / 72
    return Drawn(
        labels={text: Box(*box.extents) for text, box in labels.items() if box.width > 1},
        markers=[Box(x - radius, y - radius, x + radius, y + radius) for x, y in centres],
        others=[Box(*item.get_window_extent(renderer).extents) for item in (*others, *filter(None, [legend]))],
        plot=Box(*axes.bbox.extents),
        page=Box(*canvas.bbox.extents),
        caption_fraction=caption.get_window_extent(renderer).height / canvas.bbox.height,
    )


def assert_clear(drawn: Drawn) -> None:
    """No text lies over another one or over a marker, and all are inside the page."""
    for (one, box), (two, other) in combinations(drawn.labels.items(), 2):
        assert not box.overlaps(other), (one, two)
    for text, box in drawn.labels.items():
        assert box.is_inside(drawn.plot), text
        assert not any(box.overlaps(marker) for marker in drawn.markers), text
    for box, other in combinations([*drawn.others, drawn.plot], 2):
        assert not box.overlaps(other)
    assert all(box.is_inside(drawn.page) for box in drawn.others)
    assert drawn.caption_fraction < 0.3


def demo() -> Figure:
    return figure_of(json.loads((ROOT / "docs/bench_serve_demo.json").read_text()))


def test_all_points_of_the_documentation_have_their_label_beside_them() -> None:
    drawn = drawn_boxes(demo())
    assert_clear(drawn)
    assert sorted(text.split()[0] for text in drawn.labels) == sorted(["2.5x", *("1", "2", "4", "8") * 2])


speed = st.integers(1, 400)
label = st.sampled_from(["1", "512", "2.5/s", "tp8ep8x1 K9: 256"])
points = st.lists(st.builds(Point, per_user=speed, per_gpu=speed, label=label), min_size=1, max_size=8)
names = st.text("abcdM $_-", min_size=1, max_size=20).filter(lambda name: name.strip() and name[0] != "_")
words = st.lists(st.sampled_from(["--concurrency", "1,2,4", "a", "held_out.jsonl"]), max_size=200).map(" ".join)


@settings(max_examples=40, deadline=None)  # matplotlib draws each
@given(curves=st.dictionaries(names, points, max_size=5), compared=st.lists(speed, max_size=3), command=words)
def test_no_label_lies_over_another_whatever_the_curves(
    curves: dict[str, list[Point]], compared: list[int], command: str
) -> None:
    caption = ("Hardware: a laptop", f"Command: {command}")
    assert_clear(drawn_boxes(replace(FIGURE, curves=curves, interactivity=tuple(compared), caption=caption)))


def test_crowded_points_lose_their_labels_but_for_the_ends() -> None:
    crowd = [Point(per_user=100 + x, per_gpu=300 - x, label=f"tp8ep8 K9: {x}") for x in range(0, 60, 2)]
    far = curve((900, 10))
    drawn = drawn_boxes(replace(FIGURE, curves={"a": crowd, "b": far}, interactivity=()))
    assert_clear(drawn)
    texts = {text.rsplit(" ", 1)[0] for text in drawn.labels}
    assert {"tp8ep8 K9: 0", "tp8ep8 K9: 58", "0"} <= texts and len(texts) < 15


@pytest.mark.parametrize(
    ("heights", "expected"),
    [((1, 19.47), "19x"), ((1, 1.318), "1.3x"), ((1, 1), "1.0x"), ((3, 1), "0.33x"), ((1, 137.4), "140x")],
)
def test_ratios_have_two_digits_and_speeds_three(heights: tuple[float, float], expected: str) -> None:
    curves = {name: curve((429.63, height)) for name, height in zip("ab", heights, strict=True)}
    assert ratio_text(curves, 429.63) == f"At 430 tok/s per user, throughput relative to a: b {expected}."


def test_a_long_command_is_cut_in_the_picture_and_whole_in_the_description(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'figures'")
    command = "Command: " + " ".join(f"--option-{index} {index}" for index in range(200))
    figure = replace(FIGURE, caption=("Hardware: a laptop", command), details=("Assumed: a <fact>.",))
    for name in ("f.svg", "f.png"):
        draw(figure, tmp_path / name)
    root = ElementTree.parse(tmp_path / "f.svg").getroot()
    texts = " ".join(element.text or "" for element in root.iter(f"{SVG}text"))
    assert "Hardware: a laptop" in texts and "--option-39 39" in texts and "--option-199" not in texts
    assert "... (in full in the description of this file)" in texts and "Assumed" not in texts
    [description] = root.iter("{http://purl.org/dc/elements/1.1/}description")
    assert command in description.text and "Assumed: a <fact>." in description.text
    assert command.encode() in (tmp_path / "f.png").read_bytes()
    assert_clear(drawn_boxes(figure))


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
    monkeypatch.setattr(figure_file, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package matplotlib, found none.*dflash-trt\[figures\]"):
        draw(FIGURE, Path("f.svg"))


def test_the_figure_of_the_documentation_is_drawn_from_the_numbers_stored_beside_it() -> None:
    """Its caption and its points; matplotlib's next version may place a tick elsewhere."""
    figure = demo()
    root = ElementTree.parse(ROOT / "docs/bench_serve_demo.svg").getroot()
    texts = " ".join(element.text or "" for element in root.iter(f"{SVG}text"))
    for part in (*figure.caption, *figure.curves, "throughput relative to served, autoregressive: served 2.5x."):
        assert part in texts
    places = [place for index in range(2) for place in line(root, f"curve-{index}")]
    points = [point for points in figure.curves.values() for point in points]
    for speeds, found in (
        ([p.per_user for p in points], [x for x, _ in places]),
        ([p.per_gpu for p in points], [y for _, y in places]),
    ):
        slope = (found[0] - found[3]) / (speeds[0] - speeds[3])
        assert found == pytest.approx([found[0] + slope * (speed - speeds[0]) for speed in speeds], abs=0.01)
