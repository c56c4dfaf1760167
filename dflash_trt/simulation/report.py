"""Simulated points for people, spreadsheets and the figure; every one is marked as simulated."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from dflash_trt.plan.step_costs import StepClock, assumptions_of
from dflash_trt.simulation.sweep import SimulatedEngine, SimulatedPoint, Workload, best, curves

SIMULATED: Final = "simulated"
_SHOWN: Final = 0.005  # smallest share of the time whose source is named
_HEADINGS: Final = ("configuration", "load", "tok/s", "per GPU", "per user", "TTFT ms", "accepted", "step ms", "floor")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepReport:
    """`per_user` are speeds to name the best configuration at. `left_out` says what does not fit, and why."""

    subject: str
    hardware: str
    command: str
    assumptions: tuple[str, ...]
    points: tuple[SimulatedPoint, ...]
    per_user: tuple[float, ...]
    left_out: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": SIMULATED,
            "subject": self.subject,
            "hardware": self.hardware,
            "command": self.command,
            "assumptions": list(self.assumptions),
            "left_out": list(self.left_out),
            "points": [asdict(point) for point in self.points],
            "best": [
                {"per_user_tok_per_s": speed, "point": None if found is None else asdict(found)}
                for speed in self.per_user
                for found in [best(self.points, speed)]
            ],
        }

    def lines(self) -> list[str]:
        """A table, the best configurations, and what all of it rests on."""
        rows = [_HEADINGS, *(_row(point) for point in self.points)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        table = [
            "  ".join(text.ljust(width) if i == 0 else text.rjust(width) for i, (text, width) in enumerate(cells))
            for cells in (list(zip(row, widths, strict=True)) for row in rows)
        ]
        return [
            f"{SIMULATED}: {self.subject} on {self.hardware}",
            *table,
            *(_best_line(self.points, speed) for speed in self.per_user),
            *(f"left out: {reason}" for reason in self.left_out),
            f"where the device's time comes from: {_shares(self.points)}",
            *(f"assumed: {text}" for text in self.assumptions),
        ]

    def write_csv(self, path: Path) -> None:
        """One row for each point; the first column says what they are."""
        with path.open("w", newline="") as stream:
            rows = [{"kind": SIMULATED} | asdict(point) for point in self.points]
            writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    def write_figure(self, path: Path) -> None:
        """A curve for each drafter: the best layouts and K of each, where there are several."""
        from dflash_trt.bench.pareto_figure import Figure, draw

        figure = Figure(
            title=f"Throughput against speed per user, {SIMULATED}",
            curves=curves(self.points, attrgetter("drafter")),
            unit="GPU",
            caption=(
                f"Simulated, not measured: {self.subject} on {self.hardware}. Assumptions: in this file's description.",
                f"Command: {self.command}",
            ),
            interactivity=self.per_user,
            label_meaning="layout (x replicas), drafts K, and clients or requests/s",
            details=tuple(f"Assumed: {text}." for text in self.assumptions),
        )
        draw(figure, path)


def assumptions(engines: Sequence[SimulatedEngine], workload: Workload, clock: StepClock) -> tuple[str, ...]:
    """Everything that is not computed."""
    drafters = {engine.drafter: engine.acceptance for engine in engines if engine.acceptance is not None}
    spread = f", within {workload.spread_fraction:.0%}" if workload.spread_fraction else ""
    lengths, num_shared = workload.lengths, workload.num_shared_tokens
    hits = f"the first {num_shared} of a prompt from the prefix cache" if num_shared else "no prefix hits"
    return (
        *assumptions_of(clock),
        "experts are chosen as in NVIDIA's tables, by a power law, or evenly where they are fitted",
        *(f"drafts of {name} accepted by position: {found}" for name, found in drafters.items()),
        "steps accept independently of one another, of the context and of the batch",
        f"{lengths.num_prompt_tokens} tokens a prompt, {lengths.num_output_tokens} an answer{spread}; {hits}",
        "replicas share the load evenly; no network, tokenizer or HTTP",
    )


def _shares(points: Sequence[SimulatedPoint]) -> str:
    """Shares of all steps' time."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for point in points:
        for source, part in point.device_s_by_source.items():
            seconds[source] += part
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{source} {part / total:.0%}" for source, part in ordered if part >= _SHOWN * total)


def _row(point: SimulatedPoint) -> tuple[str, ...]:
    return (
        point.configuration,
        point.load,
        f"{point.output_tok_per_s:.0f}",
        f"{point.output_tok_per_s_per_gpu:.0f}",
        "-" if point.tok_per_s_per_user is None else f"{point.tok_per_s_per_user:.0f}",
        f"{1e3 * point.time_to_first_token_p50_s:.3g}",
        "-" if point.acceptance_length is None else f"{point.acceptance_length:.2f}",
        f"{1e3 * point.mean_step_s:.3g}",
        f"{point.floor_fraction:.0%}",
    )


def _best_line(points: Sequence[SimulatedPoint], per_user: float) -> str:
    found = best(points, per_user)
    if found is None:
        return f"no configuration gives a user {per_user:g} tok/s ({SIMULATED})"
    return (
        f"best at {per_user:g} tok/s per user: {found.configuration}, {found.load_in_words}, "
        f"{found.output_tok_per_s_per_gpu:.0f} tok/s per GPU ({SIMULATED})"
    )
