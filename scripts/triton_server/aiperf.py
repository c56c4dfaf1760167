"""aiperf against our model: its command line, and what its report says. aiperf itself lives in its own environment."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.core.errors import ConfigError, problem, raise_all

REPORT_NAME = "profile_export_aiperf.json"
# A file, for aiperf cuts a template on its command line at the first comma.
PAYLOAD_TEMPLATE = (
    '{"text_input": {{ text|tojson }}, "max_tokens": {{ max_tokens or 16 }}, "stream": {{ stream|tojson }}, '
    '"end_id": -1}\n'
)


@dataclass(frozen=True, kw_only=True)
class AiperfReport:
    """Of the requests that succeeded. Tokens are counted by aiperf, with the tokenizer it was given."""

    num_requests: int
    num_errors: int
    request_per_s: float
    output_tok_per_s: float
    time_to_first_token_p50_ms: float
    inter_token_latency_mean_ms: float
    request_latency_p50_ms: float


def command(
    aiperf: Path,
    url: str,
    *,
    model_name: str,
    payload: Path,
    tokenizer: Path,
    output: Path,
    concurrency: int,
    count: int,
) -> list[str]:
    """A run over the generate_stream endpoint; `payload` is a file with PAYLOAD_TEMPLATE."""
    return [
        str(aiperf),
        "profile",
        *("--model-names", model_name),
        *("--endpoint-type", "template"),
        "--streaming",
        *("--url", url),
        *("--custom-endpoint", f"/v2/models/{model_name}/generate_stream"),
        *("--extra-inputs", f"payload_template:{payload}"),
        *("--extra-inputs", "response_field:text_output"),
        *("--tokenizer", str(tokenizer)),
        *("--concurrency", str(concurrency)),
        *("--request-count", str(count)),
        *("--synthetic-input-tokens-mean", "64"),
        *("--output-tokens-mean", "64"),
        *("--output-artifact-dir", str(output)),
        *("--ui", "none"),
    ]


def read_report(path: Path) -> AiperfReport:
    """Read profile_export_aiperf.json.

    Raises:
        ConfigError: it is no report of a streamed run, or lacks something.
    """
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError.about(
            str(path), expected="a report of aiperf", found=str(error), hint="Look at aiperf's own log."
        ) from error
    problems: list[str] = []

    def value(metric: str, statistic: str) -> float:
        entry = report.get(metric) if isinstance(report, Mapping) else None
        found = entry.get(statistic) if isinstance(entry, Mapping) else None
        if not isinstance(found, int | float):
            hint = "Use the aiperf version that scripts/serve_triton_demo installs, with --streaming."
            problems.append(problem(f"{metric} {statistic}", expected="a number", found=repr(found), hint=hint))
            return 0.0
        return float(found)

    found = AiperfReport(
        num_requests=int(value("request_count", "avg")),
        num_errors=int(_optional(report, "error_request_count")),
        request_per_s=value("request_throughput", "avg"),
        output_tok_per_s=value("output_token_throughput", "avg"),
        time_to_first_token_p50_ms=value("time_to_first_token", "p50"),
        inter_token_latency_mean_ms=value("inter_token_latency", "avg"),
        request_latency_p50_ms=value("request_latency", "p50"),
    )
    raise_all(ConfigError, str(path), problems)
    return found


def _optional(report: Any, metric: str) -> float:
    """A count that is missing when there is nothing to count."""
    entry = report.get(metric) if isinstance(report, Mapping) else None
    return float(entry.get("avg", 0.0)) if isinstance(entry, Mapping) else 0.0
