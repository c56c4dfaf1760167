"""What the benches share: names of sources, files to write, and the machine that is measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli import bench_machine
from dflash_trt.cli.bench_options import check_names, named
from dflash_trt.cli.bench_report import _write_table, check_paths
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.runtime_config import RuntimeConfig
from tests.bench.test_load_report import REPORT
from tests.plan.test_machine_file import MACHINE

URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("source", "name", "place"),
    [
        ("a=dir/b", "a", "dir/b"),
        ("dir/b", "b", "dir/b"),
        ("dir/b=c", "b=c", "dir/b=c"),
        ("a=b=c", "a", "b=c"),
        ("=c", "=c", "=c"),
        (f"a={URL}", "a", URL),
        (f"{URL}/v1?key=value", f"{URL}/v1?key=value", f"{URL}/v1?key=value"),
        ("https://h/v1", "https://h/v1", "https://h/v1"),
        (".", Path.cwd().name, "."),
    ],
)
def test_a_source_has_the_name_that_it_is_given_or_that_of_its_place(source: str, name: str, place: str) -> None:
    assert named(source) == (name, place)


def test_names_are_distinct() -> None:
    check_names(iter("ab"), "engines")
    with pytest.raises(ConfigError, match=r"engines: expected distinct names, found a, b, a\. Name them"):
        check_names(iter("aba"), "engines")


@pytest.mark.parametrize("name", ["table.csv", "figure.svg"])
def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'figures'")

    def check(path: Path) -> None:
        check_paths(
            {"csv_path": tmp_path / "t.csv", "figure": None, "csv_path" if path.suffix == ".csv" else "figure": path}
        )

    (tmp_path / name).touch()
    (tmp_path / "dir" / name).mkdir(parents=True)
    check(tmp_path / name)
    check(tmp_path / f"new-{name}")
    for wrong in (tmp_path / "dir" / name, tmp_path / "none" / name, tmp_path / name / name):
        with pytest.raises(ConfigError, match="expected a file in a directory that exists"):
            check(wrong)


@pytest.mark.parametrize("name", ["input_file", "baseline", "machine", "figure"])
def test_a_table_replaces_no_other_file_of_its_command(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'figures'")
    (tmp_path / "link").symlink_to(tmp_path / "f.svg")
    options = {"csv_path": tmp_path / "link", "figure": None, name: tmp_path / "f.svg"}
    for content in (None, "as it was"):
        if content is not None:
            (tmp_path / "f.svg").write_text(content)
        with pytest.raises(ConfigError) as caught:
            check_paths(options)
        flags = ["--csv", f"--{name.replace('_', '-')}"]
        assert str(caught.value) == f"{' and '.join(flags if name == 'figure' else flags[::-1])} name the same file."
    check_paths(options | {"csv_path": tmp_path / "other"})
    check_paths(options | {"csv_path": Path("/dev/null"), name: Path("/dev/null")} | {"figure": None})


def test_the_machine_is_measured_on_the_device_and_the_threads_of_the_engine(monkeypatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("dflash_trt.bench.machine.device_at_hand", lambda *given: asked.append(given) or "device")
    monkeypatch.setattr("dflash_trt.bench.machine.measure_roofs", lambda *given: given)
    monkeypatch.setattr(bench_machine, "machine_name", lambda: "name")
    assert bench_machine.measure_now(RuntimeConfig(device="cpu", num_threads=3)) == ("name", "device")
    assert asked == [("cpu", 3)]


def test_floors_are_of_the_machine_file_or_of_this_machine(monkeypatch) -> None:
    monkeypatch.setattr("dflash_trt.bench.roofline.Roofs", lambda *given: given)
    monkeypatch.setattr("dflash_trt.engine_dir.EngineDir.open", lambda path: f"engine {path}")
    monkeypatch.setattr(bench_machine, "measure_now", lambda config: f"measured with {config.num_threads}")
    config = RuntimeConfig(num_threads=3)
    assert bench_machine.roofs_of(Path("dir"), MACHINE, config) == ("engine dir", MACHINE)
    assert bench_machine.roofs_of(Path("dir"), None, config) == ("engine dir", "measured with 3")


def test_a_measured_machine_is_named_with_its_copies(monkeypatch, tmp_path: Path, invoke) -> None:
    found = MACHINE.model_copy(update={"name": "n", "copy_bytes_per_s": 12.34e9})
    monkeypatch.setattr("dflash_trt.bench.machine.measure_machine", lambda *_: found)
    ran = invoke("bench", "machine", "--device", "cpu", "-o", tmp_path / "m.json")
    assert (ran.stdout, ran.stderr) == ("", f"{tmp_path / 'm.json'}: n, 12.34 GB/s copied\n")
    assert (tmp_path / "m.json").read_text() == found.text() == invoke("bench", "machine", "--device", "cpu").stdout
    for wrong in (tmp_path, tmp_path / "none" / "m.json"):
        assert "--output: expected a file in a directory" in invoke("bench", "machine", "-o", wrong).stderr


def test_servers_that_are_engines_run_on_this_machine_and_each_side_has_its_gpus(monkeypatch, tmp_path, invoke) -> None:
    pytest.importorskip("dynamo.common.backend", reason="needs the extra 'serve'")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    monkeypatch.setattr("dflash_trt.cli.serve.worker_settings", lambda *_: ("settings", "engine"))
    monkeypatch.setattr("dflash_trt.cli.bench_serve.floors_beside", lambda reports, *_: [None] * len(reports))
    monkeypatch.setattr("dflash_trt.doctor.machine.gpus", lambda: [{"name": "GPU A"}, {"name": "GPU B"}])
    swept: list[Any] = []

    def sweep(sides: list[Any], *_: object, **__: object) -> list[Any]:
        swept[:] = sides
        return [replace(REPORT, server=side.name) for side in sides]

    monkeypatch.setattr("dflash_trt.bench.server_sweep.sweep_servers", sweep)
    words = [
        "--input-file",
        tmp_path / "rows.jsonl",
        "--num-gpus",
        3,
        "--autoregressive",
        "--model-name",
        "m",
        "--json",
    ]
    for sources, hardware in ((["a", "b"], "1 x GPU A, 1 x GPU B"), (["a", f"u={URL}", "b"], "not stated")):
        ran = invoke("bench", "serve", *sources, *words)
        assert ran.exit_code == 0, ran.stderr
        assert json.loads(ran.stdout)["hardware"] == hardware
        assert {side.num_gpus for side in swept} == {3}
        assert [side.model for side in swept if side.name == "u"] == ["m"] * ("u" in ran.stdout.split('"'))
        assert {side.model for side in swept if side.name != "u"} == {None}


def test_a_table_has_every_number_of_every_row_zeros_too(tmp_path: Path) -> None:
    rows = [
        {"name": "a", "count": 0, "is_good": False, "time_s": {"p50": 0.0, "p99": None}, "rates": (0.5, 0.0)},
        {"name": "b", "time_s": None, "rates": [], "more": ""},
    ]
    _write_table(tmp_path / "t.csv", rows)
    lines = ["name,count,is_good,time_s_p50,rates_1,rates_2,more", "a,0,False,0.0,0.5,0.0,", "b,,,,,,"]
    assert (tmp_path / "t.csv").read_text().splitlines() == lines
