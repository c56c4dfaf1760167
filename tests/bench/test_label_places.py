"""Places of labels: what each may cover, and which are left out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.bench.label_places import MARKER_RADIUS, Box, Label, Place, Segment, place_labels

PAGE = Box(0, 0, 400, 300)


def label(x: float, y: float, *, width: float = 40, is_required: bool = True, is_above: bool = True) -> Label:
    return Label(x=x, y=y, width=width, height=10, is_required=is_required, is_above=is_above)


def place(*labels: Label, lines: tuple[Segment, ...] = (), page: Box = PAGE) -> list[Place | None]:
    return place_labels(labels, [(label.x, label.y) for label in labels], lines, page)


coordinate = st.integers(0, 60).map(lambda value: 5.0 * value)
labels = st.builds(label, coordinate, coordinate, width=st.integers(4, 80), is_required=st.booleans())
segments = st.builds(Segment, coordinate, coordinate, coordinate, coordinate)


@settings(deadline=None)
@given(st.lists(labels, max_size=25), st.lists(segments, max_size=10))
def test_labels_cover_neither_each_other_nor_markers(labels: list[Label], lines: list[Segment]) -> None:
    places = place(*labels, lines=tuple(lines))
    assert places == place(*labels, lines=tuple(lines)), "the same every time"
    boxes = [place.box for place in places if place is not None]
    markers = [Box(*(sign * MARKER_RADIUS + at for sign in (-1, 1) for at in (item.x, item.y))) for item in labels]
    assert all(box.is_inside(PAGE) and not any(box.overlaps(marker) for marker in markers) for box in boxes)
    assert not any(box.overlaps(other) for index, box in enumerate(boxes) for other in boxes[:index])
    for item, found in zip(labels, places, strict=True):
        if found is not None and not item.is_required:
            assert found.leader is None and not any(line.length_in(found.box) for line in lines)


def test_a_label_is_on_the_free_side_of_its_curve() -> None:
    falling = Segment(0, 200, 300, 0)
    above, below = place(label(150, 100), lines=(falling,)), place(label(150, 100, is_above=False), lines=(falling,))
    assert above[0].box.left > 150 and above[0].box.bottom > 100 and above[0].side == 1
    assert below[0].box.right < 150 and below[0].box.top < 100 and below[0].side == -1


@pytest.mark.parametrize("is_required", [True, False])
def test_what_has_no_room_nearby_is_led_to_if_it_is_required(is_required: bool) -> None:
    """Three markers around a point leave no side free."""
    around = [(93.0, 100.0), (107.0, 100.0), (100.0, 107.0), (100.0, 93.0)]
    [found] = place_labels([label(100, 100, is_required=is_required)], [(100, 100), *around], [], PAGE)
    assert (found is not None) is is_required
    if found is not None:
        leader = found.leader
        assert (leader.x0, leader.y0) == (100, 100) and found.box.distance(leader.x1, leader.y1) == 0


def test_a_leader_avoids_other_curves() -> None:
    """Left is nearer than what is free on the right, but across a line."""
    page, wall = Box(0, 90, 400, 110), Segment(80, 0, 80, 300)
    markers = [(100.0, 100.0), (112.0, 100.0)]
    [plain] = place_labels([label(100, 100)], markers, [], page)
    [walled] = place_labels([label(100, 100)], markers, [wall], page)
    assert plain.box.right < 100 and walled is not None
    assert not wall.length_in(walled.box)


def test_segments_and_boxes_meet_where_they_do() -> None:
    box = Box(0, 0, 10, 10)
    assert Segment(-5, 5, 20, 5).length_in(box) == pytest.approx(10)
    assert Segment(5, 5, 5, 8).length_in(box) == pytest.approx(3)
    assert Segment(-5, 20, 20, 11).length_in(box) == Segment(10, 0, 10, 10).length_in(box) == 0
    assert Segment(0, 0, 10, 10).crosses(Segment(0, 10, 10, 0))
    assert not Segment(0, 0, 10, 10).crosses(Segment(0, 0, 10, 0)), "they only touch"
    assert not Segment(0, 0, 1, 1).crosses(Segment(0, 10, 10, 0))
