"""Load reports as a table for people, and as rows for a spreadsheet."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from dflash_trt.bench.load_report import Acceptance, LoadReport, Percentiles
from dflash_trt.bench.request_load import counted_clients

_HEADINGS = ("tok/s", "tok/s/user", "TTFT ms", "TPOT ms", "ITL ms", "end to end ms", "accepted", "errors")


def table(reports: Sequence[LoadReport], *, unit: str) -> list[str]:
    """A line for each report; latencies are p50 / p90 / p99, speeds per user p50."""
    head = ("server", "load", f"tok/s per {unit}", *_HEADINGS, "good/s")
    rows = [head, *(_row(report) for report in reports)]
    if all(report.goodput_request_per_s is None for report in reports):
        rows = [row[:-1] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]


def acceptance_lines(reports: Sequence[LoadReport]) -> list[str]:
    """By draft position and by category, for each server under its last load."""
    last = {report.server: report for report in reports if report.acceptance is not None}
    lines = []
    for name, report in last.items():
        assert report.acceptance is not None
        rates = "  ".join(f"{i}: {rate:.2f}" for i, rate in enumerate(report.acceptance.by_position, start=1))
        lines.append(f"{name}: accepted by draft position: {rates}")
        found = sorted(report.acceptance_by_category.items())
        if found:
            words = ", ".join(f"{category} {value.length:.2f}" for category, value in found)
            lines.append(f"{name}: acceptance length by category: {words}")
    return lines


def flat_rows(reports: Sequence[LoadReport]) -> list[dict[str, Any]]:
    """One row per report, with the same columns: a percentile, a draft position or a category is a column."""
    rows = [_flat(report) for report in reports]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in columns} for row in rows]


def _row(report: LoadReport) -> tuple[str, ...]:
    load = counted_clients(report.concurrency) if report.concurrency else f"{report.request_rate_per_s:g} req/s"
    per_user = report.tok_per_s_per_user
    good = report.goodput_request_per_s
    return (
        report.server,
        load,
        f"{report.output_tok_per_s_per_gpu:.1f}",
        f"{report.output_tok_per_s:.1f}",
        f"{per_user.p50:.1f}" if per_user else "-",
        _milliseconds(report.time_to_first_token_s),
        _milliseconds(report.time_per_output_token_s),
        _milliseconds(report.inter_token_latency_s),
        _milliseconds(report.end_to_end_s),
        f"{report.acceptance.length:.2f}" if report.acceptance else "-",
        str(report.num_errors),
        "-" if good is None else f"{good:.2f}",
    )


def _milliseconds(found: Percentiles | None) -> str:
    if found is None:
        return "-"
    return " / ".join(f"{1e3 * value:.4g}" for value in (found.p50, found.p90, found.p99))


def _flat(report: LoadReport) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for entry in fields(report):
        value = getattr(report, entry.name)
        if isinstance(value, Percentiles):
            row |= {f"{entry.name}_{part.name}": getattr(value, part.name) for part in fields(value)}
        elif isinstance(value, Acceptance):
            row |= {"acceptance_length": value.length, "num_verify_steps": value.num_verify_steps}
            row |= {f"accepted_fraction_{i}": rate for i, rate in enumerate(value.by_position, start=1)}
        elif entry.name == "acceptance":
            continue  # the server reports none
        elif entry.name == "acceptance_by_category":
            row |= {f"acceptance_length_{name}": found.length for name, found in value.items()}
        elif entry.name == "output_tok_per_s_by_round":
            row |= {f"output_tok_per_s_round_{i}": speed for i, speed in enumerate(value, start=1)}
        else:
            assert not is_dataclass(value), entry.name
            row[entry.name] = value
    return row
