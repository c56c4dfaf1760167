"""Curves of speed per user against speed per GPU: their hull, and ratios at the same interactivity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_trt.bench.load_report import LoadReport


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Point:
    """tok/s that a user sees (median over requests of 1 / TPOT), and tok/s of a GPU (or of a server)."""

    per_user: float
    per_gpu: float
    label: str = ""


def curves(reports: Sequence[LoadReport]) -> dict[str, list[Point]]:
    """The points of each server in the order of its reports; one without a second token has no point."""
    found: dict[str, list[Point]] = {report.server: [] for report in reports}
    for report in reports:
        if report.tok_per_s_per_user is not None:
            label = str(report.concurrency) if report.concurrency else f"{report.request_rate_per_s:g}/s"
            height = report.output_tok_per_s_per_gpu
            found[report.server].append(Point(per_user=report.tok_per_s_per_user.p50, per_gpu=height, label=label))
    return found


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other exceeds in both speeds, from the slowest for a user to the fastest."""
    kept: list[Point] = []
    for point in sorted(points, reverse=True):
        if not kept or point.per_gpu > kept[-1].per_gpu:
            kept.append(point)
    return kept[::-1]


def hull(curves: Mapping[str, Sequence[Point]]) -> list[Point]:
    """The frontier of all configurations together: the best choice at every speed."""
    return frontier([point for points in curves.values() for point in points])


def per_gpu_at(points: Sequence[Point], per_user: float) -> float | None:
    """tok/s per GPU while every user has at least `per_user` tok/s; None if no point is that fast.

    Linear between the points of the frontier. Below the slowest point, its value: it serves users faster than asked.
    """
    known = frontier(points)
    if not known or per_user > known[-1].per_user:
        return None
    if per_user <= known[0].per_user:
        return known[0].per_gpu
    right = next(index for index, point in enumerate(known) if point.per_user >= per_user)
    a, b = known[right - 1], known[right]
    return a.per_gpu + (b.per_gpu - a.per_gpu) * (per_user - a.per_user) / (b.per_user - a.per_user)


def shared_interactivity(curves: Mapping[str, Sequence[Point]]) -> float | None:
    """The greatest speed per user that every configuration reaches."""
    fastest = [max(point.per_user for point in points) for points in curves.values() if points]
    return min(fastest) if fastest else None


def ratios_at(curves: Mapping[str, Sequence[Point]], per_user: float) -> dict[str, float | None]:
    """tok/s per GPU of each configuration relative to the first, with at least `per_user` tok/s per user."""
    heights = {name: per_gpu_at(points, per_user) for name, points in curves.items()}
    first = next(iter(heights.values()))
    return {
        name: height / first if height is not None and first is not None else None for name, height in heights.items()
    }
