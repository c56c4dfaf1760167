"""What `serve` prints when it is ready, and the servers that `bench serve` starts for an engine."""

import json
import shlex
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli import bench_machine, bench_report, bench_serve
from dflash_trt.cli.serve import _check_ports, _print_ready
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.servers.dynamo.settings import WorkerSettings
from dflash_trt.servers.dynamo.supervisor import Service

WORKER = WorkerSettings(engine_dir=Path("engine"), model_name="m")
H200, B300 = {"name": "NVIDIA H200"}, {"name": "NVIDIA B300"}


@pytest.mark.parametrize(
    ("has_template", "path", "prompt"),
    [
        (True, "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        (False, "completions", {"prompt": "def fibonacci(n):"}),
    ],
)
def test_the_lines_to_copy_are_requests_that_the_model_takes(capsys, has_template, path, prompt) -> None:
    service = Service(worker=WORKER, num_replicas=2, host="0.0.0.0", port=4567, first_metrics_port=1234)
    _print_ready(service, has_template=has_template)
    ready, curl, python, metrics = capsys.readouterr().out.splitlines()
    assert ready == "serving m at http://127.0.0.1:4567/v1 with 2 replica(s)"
    words = shlex.split(curl)
    assert words[:2] == ["curl", f"http://127.0.0.1:4567/v1/{path}"]
    assert json.loads(words[-1]) == {"model": "m", **prompt, "max_tokens": 64}
    assert f".{path.replace('/', '.')}.create(model='m', {next(iter(prompt))}=" in python
    urls = [f"http://127.0.0.1:{port}/metrics" for port in (4567, 1234, 1235)]
    assert metrics.split() == ["metrics:", *urls]


def test_metrics_of_the_replica_without_a_drafter_and_the_page_are_named(capsys) -> None:
    from dflash_trt.servers.dynamo.settings import PageSettings

    page = PageSettings(
        model="m", has_drafter=True, reports_drafts=True, has_chat_template=False, is_chat_model=False, baseline="b"
    )
    service = Service(worker=WORKER, num_replicas=2, baseline="b", port=4567, first_metrics_port=1234, page=page)
    _print_ready(service, has_template=False)
    *_, metrics, browser = capsys.readouterr().out.splitlines()
    assert [url.rpartition(":")[2] for url in metrics.split()[1:]] == [f"{n}/metrics" for n in (4567, 1234, 1235, 1236)]
    assert browser.split() == ["in", "a", "browser:", "http://127.0.0.1:4567"]


def test_the_metrics_of_every_replica_have_a_port_that_is_free() -> None:
    with socket.socket() as taken:
        for port in range(22000, 23000):
            with suppress(OSError):
                taken.bind(("127.0.0.1", port))
                break
        _check_ports(Service(worker=WORKER, num_replicas=2, port=30001, first_metrics_port=port - 2))
        with pytest.raises(ConfigError, match=f"expected 127.0.0.1:{port} free"):
            _check_ports(Service(worker=WORKER, num_replicas=3, port=30001, first_metrics_port=port - 2))
        with pytest.raises(ConfigError, match=f"expected 127.0.0.1:{port} free"):
            _check_ports(Service(worker=WORKER, num_replicas=2, baseline="b", port=30001, first_metrics_port=port - 2))
        with pytest.raises(ConfigError, match=r"expected no-such-address\.invalid:1 free"):
            _check_ports(Service(worker=WORKER, host="no-such-address.invalid", port=1))


def test_each_turn_of_an_engine_has_two_free_ports_and_all_have_one_log(monkeypatch, capsys) -> None:
    pytest.importorskip("dynamo.common.backend", reason="needs the extra 'serve'")
    monkeypatch.setattr("dflash_trt.cli.serve.worker_settings", lambda engine_dir, runtime: (WORKER, "engine"))
    monkeypatch.setattr(bench_serve, "_supervised", lambda service: service)
    start = bench_serve._starter(Path("engine"), RuntimeConfig())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(bench_serve, "_PORTS", range(port - 1, port + 9))
        first, second = start(), start()
        monkeypatch.setattr(bench_serve, "_PORTS", range(port, port + 1))
        with pytest.raises(ConfigError, match=f"ports: expected two of {port} to {port} free, found none"):
            start()
    assert (first.port, first.first_metrics_port, first.num_replicas) == (port + 1, port + 2, 1)
    assert first == second and first.worker == WORKER
    assert first.frontend_arguments == ("--router-mode", "round-robin", "--migration-limit", "0")
    assert capsys.readouterr().err.count(f"the server of engine writes to {first.log_file}") == 1
    first.log_file.unlink()


@pytest.mark.parametrize(
    ("gpus", "of_servers", "of_machine"),
    [
        ([H200, H200, B300], "2 x NVIDIA H200, 1 x NVIDIA B300", "NVIDIA H200"),
        ([], "a CPU, 3 cores, no GPU", "a CPU, 3 cores"),
    ],
)
def test_a_machine_is_named_by_its_gpus_or_its_processor(monkeypatch, gpus, of_servers, of_machine) -> None:
    monkeypatch.setattr("dflash_trt.doctor.machine.gpus", lambda: gpus)
    monkeypatch.setattr("dflash_trt.doctor.machine.machine", lambda: {"processor": "a CPU", "num_cores": 3})
    assert bench_report.this_machine() == of_servers
    assert bench_machine.machine_name() == of_machine


def test_a_workload_is_named_by_what_was_asked_for() -> None:
    fields: dict[str, Any] = {"max_tokens": 9, "temperature": 0.5}
    words = "3 rows of f.jsonl, at most 9 tokens each, temperature 0.5, EOS ends a text, 7 alternating rounds"
    assert bench_serve._workload(Path("a/f.jsonl"), 3, fields, 7) == words
    ignoring = bench_serve._workload(Path("f.jsonl"), 3, fields | {"ignore_eos": True}, 7)
    assert ignoring == words.replace("ends a text", "ignored")


def test_a_slow_rate_has_one_conversation_at_least() -> None:
    options = {"request_rates": (0.01, 0.5, 0.01), "concurrencies": (2, 2), "requests_per_client": 3, "duration_s": 10}
    loads = bench_serve._loads(options)
    assert [(load.num_conversations, load.concurrency, load.request_rate_per_s) for load in loads] == [
        (6, 2, None),
        (1, None, 0.01),
        (5, None, 0.5),
    ]
