"""Tables of planned against published speeds: they are what the planner says now, and within their bars."""

import re
from pathlib import Path

import pytest

pytest.importorskip("aiconfigurator_core", reason="the extra `silicon`")

from scripts.published_points import OTHERS, claims, fitted, read, split, summaries, table

DOCS = Path(__file__).resolve().parents[2] / "docs"
SERIES = read()


def shown(page: str, mark: str) -> list[str]:
    return (DOCS / page).read_text().split(f"<!-- {mark} -->")[1].strip().splitlines()


def planned(text: str) -> list[float]:
    """Ratios of a row or a part, those of ranges included."""
    return [float(number) for number in re.findall(r"(?:: | to )(\d\.\d\d)", text)]


def test_every_tenth_series_is_planned_as_the_page_says() -> None:
    _, _, *rows = (line.strip("| ").split(" | ") for line in shown("published_speeds.md", "points"))
    parts = [([*cells], part.replace("*", "")) for *cells, last in rows for part in last.split("; ")]
    assert len(parts) == len(SERIES)
    _, _, *found = (line.strip("| ").split(" | ") for line in table(SERIES[::10]))
    for *cells, last in found:
        for part in last.replace("*", "").split("; "):
            lengths = part.partition(" ")[0]
            known = [planned(other) for row, other in parts if row == cells and other.startswith(f"{lengths} ")]
            values = planned(part)
            assert any(len(values) == len(them) and values == pytest.approx(them, abs=0.02) for them in known), part


def test_claims_are_planned_as_the_page_says() -> None:
    assert shown("simulation.md", "claims") == list(claims())


def test_half_of_the_held_out_points_are_within_ten_percent() -> None:
    (line,) = (line for line in shown("simulation.md", "summary") if line.startswith("| **held out**"))
    points, median, within = re.findall(r"\| (\d+) \| ([\d.]+)% \| (\d+)%", line)[0]
    assert int(points) == sum(len(item.points) for item in split(SERIES)[1]) > 200
    assert float(median) <= 10 and int(within) >= 80


@pytest.mark.slow
def test_the_constants_are_fitted_to_the_first_half_alone() -> None:
    assert fitted(split(SERIES)[0]) == pytest.approx(OTHERS, rel=0.02)
    assert shown("simulation.md", "summary") == list(summaries(SERIES))


def test_no_series_is_both_fitted_and_held_out() -> None:
    fit, held_out = split(SERIES)
    assert not {id(item) for item in fit} & {id(item) for item in held_out}
    assert {item.gpu for item in held_out} == {"h100", "h200", "b200", "b300"}
    assert all(item.url.startswith("https://") and item.points for item in SERIES)
