"""The figure of drafts: how many survive to each draft position, and where they fail, as a heat map of each drafter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_trt.bench.acceptance import Acceptance
from dflash_trt.bench.figure_file import WIDTH, Page, draw_frame, line_style, write_figure
from dflash_trt.bench.speedup import SideReport

_TITLE = "Draft acceptance"
_EXPLANATION = (
    "Above: fraction of verify steps that accept the draft at a position and all drafts before it, with its 95% "
    "interval over prompts. Below: the same by temperature, and at the first of them by category and by the tokens "
    "before a step; at the right of a row its acceptance length, bonus included."
)
_TOP, _CURVES, _BETWEEN, _ROW = 0.36, 2.3, 0.78, 0.19  # inches, downwards
_LEFT, _RIGHT, _GAP = 1.25, 0.4, 0.45
_DARK = 0.55  # fractions above have white text


def draw_acceptance(reports: Sequence[SideReport], path: Path, caption: tuple[str, ...]) -> None:
    """Write the picture of all sides that drafted. Raises ConfigError as `check_figure` does."""
    paragraphs = (_EXPLANATION, *caption)
    write_figure(lambda: canvas_of(reports, paragraphs), path, title=_TITLE, description="\n".join(paragraphs))


def canvas_of(reports: Sequence[SideReport], paragraphs: Sequence[str]) -> Any:
    """The matplotlib figure: curves, heat maps and caption, one below the other."""
    groups = _groups(reports)
    labels = list(dict.fromkeys(label for rows in groups.values() for label in rows))
    map_height = _ROW * len(labels)
    page = Page(_TITLE, paragraphs, height=_TOP + _CURVES + _BETWEEN + map_height, left=_LEFT)
    _draw_curves(page.axes(_LEFT, map_height + _BETWEEN, WIDTH - _LEFT - _RIGHT, _CURVES), reports)
    num_positions = {name: max(len(found.by_position) for found in rows.values()) for name, rows in groups.items()}
    cell = (WIDTH - _LEFT - _RIGHT - _GAP * (len(groups) - 1)) / sum(num_positions.values())
    left = _LEFT
    for name, rows in groups.items():
        width = cell * num_positions[name]
        axes = page.axes(left, 0, width, map_height)
        _draw_map(axes, [rows.get(label) for label in labels], num_positions[name])
        axes.set_title(name, fontsize=8.5, parse_math=False)
        axes.set_yticks(range(len(labels)), labels if left == _LEFT else [], fontsize=7.5)
        left += width + _GAP
    return page.finish()


def _groups(reports: Sequence[SideReport]) -> dict[str, dict[str, Acceptance]]:
    """Rows of the heat map of each drafter: temperatures; categories and contexts at the first of them."""
    has_one = len({report.temperature for report in reports}) == 1
    groups: dict[str, dict[str, Acceptance]] = {}
    for report in reports:
        if report.acceptance is not None:
            rows = groups.setdefault(report.name, {})
            rows["all" if has_one else f"T = {report.temperature:g}"] = report.acceptance
    first = reports[0].temperature
    for report in reports:
        if report.name in groups and report.temperature == first:
            groups[report.name] |= report.acceptance_by_category
            contexts = report.acceptance_by_context_len.items()
            groups[report.name] |= {f"context {name}": found for name, found in contexts}
    return groups


def _draw_curves(axes: Any, reports: Sequence[SideReport]) -> None:
    """A curve of each drafter and temperature."""
    has_one = len({report.temperature for report in reports}) == 1
    drafted = [(report, report.acceptance) for report in reports if report.acceptance is not None]
    for index, (report, found) in enumerate(drafted):
        colour, marker = line_style(index)
        positions = range(1, len(found.by_position) + 1)
        name = report.name if has_one else f"{report.name}, T = {report.temperature:g}"
        label = f"{name}: acceptance length {found.length:.2f}"
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.5}
        axes.plot(positions, found.by_position, label=label, gid=f"curve-{index}", **style)
        ends = [[getattr(interval, end) for interval in found.by_position_interval] for end in ("low", "high")]
        axes.fill_between(positions, *ends, color=colour, alpha=0.15, linewidth=0)
    most = max((len(found.by_position) for _, found in drafted), default=1)
    axes.set_xticks(range(1, most + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("Draft position", fontsize=8.5)
    axes.set_ylabel("Fraction accepted", fontsize=8.5)
    draw_frame(axes)
    for text in axes.legend(fontsize=8, frameon=False, loc="upper right").get_texts():
        text.set_parse_math(False)


def _draw_map(axes: Any, rows: Sequence[Acceptance | None], num_positions: int) -> None:
    """A cell for each group and draft position, with its fraction in percent."""
    cells = [_padded(found, num_positions) for found in rows]
    axes.imshow(cells, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for y, (found, row) in enumerate(zip(rows, cells, strict=True)):
        for x, fraction in enumerate(row):
            if found is not None and x < len(found.by_position):
                colour = "white" if fraction > _DARK else "black"
                axes.text(x, y, f"{100 * fraction:.0f}%", ha="center", va="center", fontsize=6.5, color=colour)
        if found is not None:
            axes.text(num_positions - 0.4, y, f"{found.length:.2f}", ha="left", va="center", fontsize=7)
    axes.set_xticks(range(num_positions), range(1, num_positions + 1))
    axes.set_xlabel("Draft position", fontsize=8.5)
    axes.tick_params(labelsize=7.5, length=0)
    axes.spines[:].set_visible(False)


def _padded(found: Acceptance | None, num_positions: int) -> list[float]:
    fractions = () if found is None else found.by_position
    return [*fractions, *[float("nan")] * (num_positions - len(fractions))]
