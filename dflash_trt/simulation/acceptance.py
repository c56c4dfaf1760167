"""Acceptance of drafts: a distribution by position, given or measured, that simulated steps draw from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.errors import ConfigError

_KEYS = ("accepted_fraction_by_position", "by_position")


@dataclass(frozen=True, slots=True)
class AcceptanceByPosition:
    """`fractions[i]` is the fraction of verify steps that accept draft i (from 0) and all earlier ones.

    Steps are independent of one another, and drafts near the end of a request are like others.
    """

    fractions: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise ConfigError if a fraction is not within 0 and 1, or larger than the previous one."""
        before = 1.0
        for fraction in self.fractions:
            if not 0.0 <= fraction <= before + 1e-9:
                expected = "fractions of 0 to 1 by draft position, none above the one before"
                raise ConfigError.about("acceptance", expected=expected, found=str(self))
            before = fraction

    def __str__(self) -> str:
        return ", ".join(f"{fraction:.3g}" for fraction in self.fractions)

    def acceptance_length(self, num_draft_tokens: int) -> float:
        """Mean tokens of a verify step with K drafts, bonus included."""
        return 1.0 + sum(self.fractions[:num_draft_tokens])

    def draw(self, dice: np.random.Generator, num_candidates: Array) -> Array:  # int64 [R] -> int64 [R]
        """Accepted drafts of each request."""
        thresholds = np.array(self.fractions)
        drawn = dice.random(len(num_candidates))
        # The accepted are those whose fraction lies above the drawn number, since fractions fall.
        accepted = (thresholds[None, :] > drawn[:, None]).sum(axis=1)
        drawn_accepted: Array = np.minimum(accepted, num_candidates)
        return drawn_accepted


def read_acceptance(text: str, *, algorithm: str | None = None) -> AcceptanceByPosition:
    """Comma-separated fractions, or the name of a JSON report of `dflash-trt bench`.

    A report may have several sides: the side of `algorithm` counts, or else the last that drafted.

    Raises:
        ConfigError: neither of both.
    """
    try:
        return AcceptanceByPosition(tuple(float(word) for word in text.split(",")))
    except ValueError:
        pass
    try:
        report = json.loads(Path(text).read_text())
    except (OSError, ValueError) as error:
        expected = "fractions by position such as 0.8,0.6,0.4, or a JSON report of `dflash-trt bench`"
        raise ConfigError.about("--accepted", expected=expected, found=f"{text} ({error})") from error
    found = list(_sides(report))
    named = [fractions for name, fractions in found if name == algorithm]
    if not found:
        hint = "Take the --json of bench speedup or serve."
        raise ConfigError.about(text, expected="acceptance by draft position", found="none", hint=hint)
    return AcceptanceByPosition((named or [fractions for _, fractions in found])[-1])


def _sides(report: Any) -> Iterator[tuple[str | None, tuple[float, ...]]]:
    """Algorithm, where it is said, and fractions, however deep."""
    if isinstance(report, Sequence) and not isinstance(report, str):
        for item in report:
            yield from _sides(item)
    elif isinstance(report, dict):
        for key in _KEYS:
            if report.get(key):
                yield report.get("algorithm"), tuple(float(value) for value in report[key])
        for value in report.values():
            yield from _sides(value)
