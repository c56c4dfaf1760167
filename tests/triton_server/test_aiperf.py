"""aiperf, a load client that people use: what its report says, and a run of it where it is installed."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from dflash_trt.core.errors import ConfigError
from scripts.triton_server.aiperf import PAYLOAD_TEMPLATE, REPORT_NAME, command, read_report
from tests.triton_server.clients import counter

REPORT = Path(__file__).with_name("data") / "aiperf_report.json"  # of a run of aiperf 0.13.0 against the demo engine
ENVIRONMENT = "DFLASH_TRT_AIPERF"


def test_a_report_of_aiperf_is_read() -> None:
    written = json.loads(REPORT.read_text())
    report = read_report(REPORT)
    assert (report.num_requests, report.num_errors) == (32, 0)
    assert report.output_tok_per_s == written["output_token_throughput"]["avg"] > 0
    assert report.request_per_s == written["request_throughput"]["avg"] > 0
    assert 0 < report.time_to_first_token_p50_ms <= report.request_latency_p50_ms
    assert report.inter_token_latency_mean_ms == written["inter_token_latency"]["avg"] > 0


def test_a_report_without_streaming_or_of_something_else_is_refused(tmp_path) -> None:
    written = json.loads(REPORT.read_text())
    del written["time_to_first_token"]
    written["request_latency"]["p50"] = None
    path = tmp_path / REPORT_NAME
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="2 problems") as refusal:
        read_report(path)
    assert "time_to_first_token p50: expected a number, found None" in str(refusal.value)
    path.write_text("no report")
    with pytest.raises(ConfigError, match="expected a report of aiperf"):
        read_report(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_report(tmp_path / "missing")


def test_errors_are_counted_where_there_are_any(tmp_path) -> None:
    path = tmp_path / REPORT_NAME
    path.write_text(
        json.dumps(json.loads(REPORT.read_text()) | {"error_request_count": {"unit": "requests", "avg": 3.0}})
    )
    assert read_report(path).num_errors == 3


@pytest.mark.skipif(
    ENVIRONMENT not in os.environ,
    reason=f"aiperf is 1.2 GB: install aiperf==0.13.0 into a virtual environment and name it in {ENVIRONMENT}",
)
def test_aiperf_gets_an_answer_to_every_request(server, engine_dir, tmp_path) -> None:
    payload = tmp_path / "payload.j2"
    payload.write_text(PAYLOAD_TEMPLATE)
    before = counter(server, "requests_total", finish_reason="length")
    words = command(
        Path(os.environ[ENVIRONMENT]) / "bin" / "aiperf",
        server.url,
        model_name="dflash",
        payload=payload,
        tokenizer=engine_dir / "tokenizer",
        output=tmp_path,
        concurrency=4,
        count=12,
    )
    subprocess.run(words, check=True, timeout=240, capture_output=True)
    report = read_report(tmp_path / REPORT_NAME)
    assert (report.num_requests, report.num_errors) == (12, 0)
    assert counter(server, "requests_total", finish_reason="length") - before == 12
