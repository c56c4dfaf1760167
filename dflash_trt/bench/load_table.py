"""Load reports as a table for people, and what they are too small to say."""

from collections.abc import Sequence

from dflash_trt.bench.load_report import LoadReport, Percentiles
from dflash_trt.bench.request_load import counted_clients

_HEADINGS = ("tok/s", "tok/s/user", "TTFT ms", "TPOT ms", "ITL ms", "end to end ms", "accepted", "errors")
_EXPLANATION = "Latencies are p50 / p90 / p99, tok/s/user is p50, accepted is the acceptance length, bonus included."
_MIN_REQUESTS = 100


def table(reports: Sequence[LoadReport], *, unit: str) -> list[str]:
    """What the numbers are, the headings, and a line for each report."""
    head = ("server", "load", f"tok/s per {unit}", *_HEADINGS, "good req/s")
    rows = [head, *(_row(report) for report in reports)]
    if all(report.goodput_request_per_s is None for report in reports):
        rows = [row[:-1] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [_EXPLANATION] + [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows
    ]


def acceptance_lines(reports: Sequence[LoadReport]) -> list[str]:
    """By draft position and by category, for each server under its last load."""
    last = {report.server: report for report in reports if report.acceptance is not None}
    lines = []
    for name, report in last.items():
        assert report.acceptance is not None
        rates = "  ".join(f"{i}: {rate:.2f}" for i, rate in enumerate(report.acceptance.by_position, start=1))
        interval = report.acceptance.length_interval
        lines.append(
            f"{name}: acceptance length {report.acceptance.length:.2f} (95% interval over requests: {interval})"
        )
        lines.append(f"{name}: accepted by draft position: {rates}")
        found = sorted(report.acceptance_by_category.items())
        if found:
            words = ", ".join(f"{category} {value.length:.2f} ({value.length_interval})" for category, value in found)
            lines.append(f"{name}: acceptance length by category: {words}")
    return lines


def load_warnings(reports: Sequence[LoadReport]) -> list[str]:
    """Where there are too few requests to say."""
    fewest = min(reports, key=lambda report: report.num_requests)
    if fewest.num_requests >= _MIN_REQUESTS:
        return []
    return [
        f"p99 of {fewest.num_requests} requests is about their maximum: send {_MIN_REQUESTS} or more "
        "(--requests-per-client, --rounds)"
    ]


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
