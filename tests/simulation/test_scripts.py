"""Short runs of the scripts that hold the simulation, and K by default, against what is measured here."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_trt.cli.main import cli
from scripts import cold_start, host_tier, simulation_check
from tests.plan.test_machine_file import MACHINE

PROMPTS = "dflash_trt/demo/prompts.jsonl"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "demo"
    built = CliRunner().invoke(cli, ["build", "demo", "-o", str(path)])
    assert built.exit_code == 0, built.output
    return path


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_check, "machine", lambda: MACHINE)


def run(main: Callable[[], Any], words: Sequence[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
    main()


def test_cold_starts_are_compared_at_each_number_of_requests(
    engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(cold_start.main, [engine, PROMPTS, "--rounds", 1, "--tokens", 4, "--requests", "1,2"], monkeypatch)
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in rows] == ["1", "2"]
    assert all(row.count("|") == title.count("|") for row in rows)


def test_conversations_come_back_from_host_memory_and_disk_as_if_they_had_stayed(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--conversations", 12, "--turns", 2, "--held", 7, "--rounds", 1]
    run(host_tier.main, [engine, PROMPTS, *options, "--directory", tmp_path / "prefixes"], monkeypatch)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith(("| 1 |", "| 2 |"))]
    hits, accepted = [int(row[3].strip(" %")) for row in rows], [row[5] for row in rows]
    assert hits[::2] == [0, 0, 0, 0] and hits[1] < 30 < hits[3] == hits[5] == hits[7]
    assert accepted == accepted[:2] * 4


@pytest.mark.parametrize(
    ("options", "loads"),
    [
        (["--concurrency", "1,2", "--shared-prefix", 96], {"1 clients", "2 clients"}),
        (["--request-rate", "50"], {"50 requests/s"}),
    ],
    ids=["clients", "arrivals"],
)
def test_loads_are_simulated_beside_what_they_take(
    engine: Path, tmp_path: Path, options: list[object], loads: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [engine, PROMPTS, "--rounds", 1, "--tokens", 4, "--json", tmp_path / "rows.json", *options]
    run(simulation_check.main, words, monkeypatch)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["load"] for row in rows} == loads
    assert all(
        row[f"{side}_{name}"] > 0
        for row in rows
        for side in ("measured", "simulated")
        for name in ("tok_per_s", "ttft_ms")
    )
