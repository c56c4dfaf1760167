"""Places for the labels of a plot's points, by a rule of its own: geometry in points of 1/72 inch, no drawing.

A label takes the cheapest of some places around its point, never over a marker or another label. One that is not
required is left out rather than laid over a line, next to another's marker, or far away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

MARKER_RADIUS: Final = 3.0
_NEAR_GAP: Final = 4.5  # from the point to the label
_FAR_GAPS: Final = (9.0, 16.0, 25.0, 36.0, 50.0, 70.0)  # from here on, a leader line connects the two
_DIRECTIONS: Final = ((1, 1), (1, 0), (0, 1), (-1, 1), (1, -1), (0, -1), (-1, 0), (-1, -1))
_CROSSING_COST: Final = 4.0  # per point of a line under the label; a step to the next direction costs 1
_LEADER_CROSSING_COST: Final = 20.0
_DISTANCE_COST: Final = 0.5


class Box(NamedTuple):
    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def is_inside(self, other: Box) -> bool:
        return (
            other.left <= self.left
            and self.right <= other.right
            and other.bottom <= self.bottom
            and self.top <= other.top
        )

    def distance(self, x: float, y: float) -> float:
        return math.hypot(max(self.left - x, 0.0, x - self.right), max(self.bottom - y, 0.0, y - self.top))


class Segment(NamedTuple):
    x0: float
    y0: float
    x1: float
    y1: float

    def length_in(self, box: Box) -> float:
        """Length of the part inside the box (Liang and Barsky's clipping)."""
        dx, dy = self.x1 - self.x0, self.y1 - self.y0
        enter, leave = 0.0, 1.0
        for step, low, high in (
            (dx, box.left - self.x0, box.right - self.x0),
            (dy, box.bottom - self.y0, box.top - self.y0),
        ):
            if step == 0:
                if not low < 0 < high:
                    return 0.0
                continue
            enter = max(enter, min(low / step, high / step))
            leave = min(leave, max(low / step, high / step))
        return max(0.0, leave - enter) * math.hypot(dx, dy)

    def crosses(self, other: Segment) -> bool:
        """Ends that touch do not cross."""
        return self._sides(other) < 0 and other._sides(self) < 0

    def _sides(self, other: Segment) -> float:
        """Negative if the other's ends lie on different sides of this segment's line."""
        dx, dy = self.x1 - self.x0, self.y1 - self.y0
        first = dx * (other.y0 - self.y0) - dy * (other.x0 - self.x0)
        second = dx * (other.y1 - self.y0) - dy * (other.x1 - self.x0)
        return first * second


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """A text of this size for the point at (x, y). `is_above`: above its curve, where that is free; else below."""

    x: float
    y: float
    width: float
    height: float
    is_required: bool
    is_above: bool = True


class Place(NamedTuple):
    """`side` is -1, 0 or 1: the label is left of its point, centred on it or right of it. `cost` is without lines."""

    box: Box
    side: int
    leader: Segment | None
    cost: float


def place_labels(
    labels: Sequence[Label],  # those that matter most come first
    points: Sequence[tuple[float, float]],  # centres of the markers
    lines: Sequence[Segment],
    bounds: Box,
) -> list[Place | None]:
    """The place of each label, None where it is left out. The same input gives the same places."""
    taken = [Box(x - MARKER_RADIUS, y - MARKER_RADIUS, x + MARKER_RADIUS, y + MARKER_RADIUS) for x, y in points]
    crossed, places = list(lines), list[Place | None]()
    for label in labels:
        found: tuple[float, Place] | None = None
        for place in _candidates(label):
            if not place.box.is_inside(bounds) or any(place.box.overlaps(box) for box in taken):
                continue
            crossing = sum(line.length_in(place.box) for line in crossed)
            cost = place.cost + _CROSSING_COST * crossing
            if place.leader is not None:
                cost += _LEADER_CROSSING_COST * sum(line.crosses(place.leader) for line in crossed)
            is_clear = label.is_required or not crossing
            if is_clear and (found is None or cost < found[0]) and not _misleads(label, place, points, taken):
                found = cost, place
        places.append(found and found[1])
        if found is not None:
            taken.append(found[1].box)
            crossed += [found[1].leader] if found[1].leader else []
    return places


def _candidates(label: Label) -> list[Place]:
    """From the most wanted: near before far, and the curve's free side before the other."""
    found = []
    for gap in (_NEAR_GAP, *(_FAR_GAPS if label.is_required else ())):
        for order, (right, up) in enumerate(_DIRECTIONS if label.is_above else _DIRECTIONS[::-1]):
            reach = gap * 0.8 if right and up else gap
            left = label.x + right * reach + (right - 1) / 2 * label.width
            bottom = label.y + up * reach + (up - 1) / 2 * label.height
            box = Box(left, bottom, left + label.width, bottom + label.height)
            leader = _leader(label, box) if gap > _NEAR_GAP else None
            found.append(Place(box, right, leader, order + _DISTANCE_COST * gap))
    return found


def _leader(label: Label, box: Box) -> Segment:
    """From the point to the nearest place of the box."""
    x, y = min(max(label.x, box.left), box.right), min(max(label.y, box.bottom), box.top)
    return Segment(label.x, label.y, x, y)


def _misleads(label: Label, place: Place, points: Sequence[tuple[float, float]], taken: Sequence[Box]) -> bool:
    """Nearer to another's marker than to its own, or led to across another label or marker."""
    own = place.box.distance(label.x, label.y)
    if place.leader is not None:
        return any(place.leader.length_in(box) > 0 for box in taken if box.distance(label.x, label.y) > 0)
    return any(place.box.distance(x, y) < own for x, y in points if (x, y) != (label.x, label.y))
