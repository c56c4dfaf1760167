"""`dflash-trt doctor` on machines where things are missing, broken or slow: it reports, and never fails."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.doctor import machine, probes
from dflash_trt.doctor.probes import run_probe
from dflash_trt.doctor.report import TITLES, _without_secrets, make_report, run_probes
from tests.cli.conftest import Invoke, invoke  # noqa: F401 - a fixture

TOKEN = "hf_abcdefghijklmnop"


@pytest.fixture
def fake_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A writer of modules that the probes import instead of the real ones."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', os.getcwd())}")
    return lambda name, code: (tmp_path / f"{name}.py").write_text(code)


WORKING = "class Logger:\n    ERROR = 1\n    def __init__(self, level): ...\nBuilder = Logger\n__version__ = '11.4'\n"
BROKEN = {
    "raise ImportError('libnvinfer.so.11: cannot open shared object file')": (
        "tensorrt: expected an importable Python package, found libnvinfer.so.11: cannot open shared object file. "
        "Install it: pip install tensorrt (11.0 or newer), or build with --backend torch."
    ),
    "raise RuntimeError('first line\\nCUDA driver version is insufficient')": (
        "RuntimeError: CUDA driver version is insufficient"
    ),
    WORKING.replace("11.4", "10.13"): (
        "tensorrt: expected 11.0 or newer, found 10.13. "
        "Install it: pip install tensorrt (11.0 or newer), or build with --backend torch."
    ),
    "import os\nos._exit(3)": "its process ended with 3",
    "import os, sys\nprint('terminate called\\n  what(): no device\\n', file=sys.stderr, flush=True)\nos.abort()": (
        "its process ended with -6: what(): no device"
    ),
    "import time\ntime.sleep(60)": "no answer in 3 s",
    WORKING.replace("Builder = Logger", "def Builder(logger): return None"): (
        "TensorRT gives no builder: it needs a GPU"
    ),
}


@pytest.mark.parametrize("code", BROKEN)
def test_what_is_broken_has_its_reason_and_those_behind_it_are_tried(fake_module, code) -> None:
    fake_module("tensorrt", code)
    fake_module("tensorrt_rtx", WORKING)
    first, second = run_probes(("tensorrt", "tensorrt_rtx"), 3.0)
    assert first == {"name": "tensorrt", "works": False, "detail": BROKEN[code]}
    assert second == {"name": "tensorrt_rtx", "works": True, "detail": "TensorRT-RTX 11.4"}


def test_what_works_says_so(fake_module) -> None:
    fake_module("tensorrt", WORKING)
    (result,) = run_probes(("tensorrt",), 10.0)
    assert result == {"name": "tensorrt", "works": True, "detail": "TensorRT 11.4"}


def test_probes_that_end_share_a_process_and_its_imports(fake_module) -> None:
    fake_module("tensorrt", f"import os\n{WORKING}__version__ = f'11.{{os.getpid()}}'")
    fake_module("tensorrt_rtx", f"import os\n{WORKING}__version__ = f'11.{{os.getpid()}}'")
    details = [result["detail"].split()[1] for result in run_probes(("tensorrt", "tensorrt_rtx"), 10.0)]
    assert details[0] == details[1]


def test_a_report_has_no_token_and_no_home_directory(fake_module, monkeypatch, tmp_path) -> None:
    home = tmp_path / "somebody"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    fake_module("tensorrt", f"raise RuntimeError('no {home}/lib with {TOKEN}')")
    monkeypatch.setattr("dflash_trt.doctor.report._GROUPS", (("tensorrt",),))
    monkeypatch.setattr("dflash_trt.doctor.report.TITLES", {"tensorrt": "TensorRT"})
    report = make_report(time_limit_s=10.0)
    assert report["works"]["tensorrt"]["detail"] == "RuntimeError: no ~/lib with ***"
    assert report["machine"]["cuda_visible_devices"] == "0,1"
    assert TOKEN not in json.dumps(report) and str(home) not in json.dumps(report)


def test_gpus_are_those_that_nvidia_smi_lists(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == []
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 9.0, 580.95.05'\n")
    smi.chmod(0o755)
    (gpu,) = machine.gpus()
    assert gpu == {"name": "NVIDIA H200", "memory_mib": "143771", "compute_capability": "9.0", "driver": "580.95.05"}
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert machine.gpus() == []
    smi.write_text("#!/bin/sh\necho 'No devices were found'\necho 'NVIDIA H200, 1, 9.0, 5'\n")
    assert [gpu["memory_mib"] for gpu in machine.gpus()] == ["1"]


def test_the_machine_is_what_its_processes_may_use(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: 64)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 16)
    monkeypatch.setattr(machine, "available_cores", lambda: 3)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(total=9, used=7, free=2))
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = machine.machine()
    assert [found[f"{part}_bytes"] for part in ("memory", "free_memory", "free_disk")] == [64, 16, 2]
    assert (found["num_cores"], found["omp_num_threads"], found["cuda_visible_devices"]) == (3, "5", None)
    driver = tmp_path / "version"
    monkeypatch.setattr(machine, "_DRIVER_FILE", driver)
    assert machine.driver_module() is None
    driver.write_text("NVRM version: 580\nGCC version: 12\n")
    assert machine.driver_module() == "NVRM version: 580"


def test_a_report_for_a_person_has_each_fact_under_its_name(invoke: Invoke, monkeypatch) -> None:  # noqa: F811
    gpu = {"name": "NVIDIA H200", "memory_mib": "143771", "compute_capability": "9.0", "driver": "580.95"}
    host = {"platform": "Linux", "processor": "a CPU", "num_cores": 3, "memory_bytes": 64_000, "free_disk_bytes": 2000}
    host |= {"free_memory_bytes": 16_000, "omp_num_threads": "5", "cuda_visible_devices": None}
    works = {name: {"works": False, "detail": "d"} for name in TITLES}
    report = {"versions": {"torch": None, "numpy": "2"}, "machine": host, "gpus": [gpu], "works": works}
    report["nvidia_driver"] = "NVRM 580"
    monkeypatch.setattr("dflash_trt.doctor.report.make_report", lambda **options: report)
    facts = ["torch missing, numpy 2", "Linux; a CPU, 3 cores", "memory 64.0 kB, 16.0 kB free; disk 2.0 kB free"]
    facts += ["OMP_NUM_THREADS 5", "CUDA_VISIBLE_DEVICES unset"]
    of_gpu = "GPU: NVIDIA H200, 143771 MiB, compute capability 9.0, driver 580.95"
    assert invoke("doctor").stdout.splitlines()[: -len(TITLES)] == [*facts, of_gpu]
    report["gpus"] = []
    none = "GPU: none that nvidia-smi lists; driver: NVRM 580"
    assert invoke("doctor").stdout.splitlines()[: -len(TITLES)] == [*facts, none]


def test_a_home_within_another_and_a_secret_in_json_are_left_out(monkeypatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/people/one"))
    monkeypatch.setenv("HOME", "/people/one/inner")
    assert _without_secrets('"/people/one/inner/x /people/one/y"') == '"~/x ~/y"'
    monkeypatch.setenv("HOME", "/")
    assert _without_secrets('"/a"') == '"/a"'


def test_a_triton_server_that_does_not_start_says_why(monkeypatch, tmp_path) -> None:
    server = tmp_path / "tritonserver"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(probes, "_TRITON_SERVERS", ("none", "empty"))
    assert run_probe("triton_server")["detail"] == "no tritonserver on the PATH, nor in .triton_server"
    cases = {"echo 'Usage: tritonserver [options]'; exit 1": "tritonserver starts"}
    cases["echo 'Usage: tritonserver [options]' >&2; exit 1"] = "tritonserver starts"
    cases["echo 'no libpython' >&2"] = "tritonserver does not start: no libpython"
    for code, detail in cases.items():
        server.write_text(f"#!/bin/sh\n{code}\n")
        server.chmod(0o755)
        works = detail == "tritonserver starts"
        assert run_probe("triton_server") == {"name": "triton_server", "works": works, "detail": detail}


def test_versions_are_those_of_the_packages() -> None:
    import torch

    versions = machine.versions()
    assert versions["torch"] == torch.__version__
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(machine.PACKAGES) < set(versions)


def test_a_package_that_is_missing_has_no_version(monkeypatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("no-such-package",))
    assert machine.versions()["no-such-package"] is None


def test_the_command_reports_and_exits_with_0(invoke: Invoke, monkeypatch) -> None:  # noqa: F811
    result = invoke("doctor", "--json", "--time-limit", 120)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert list(report["works"]) == list(TITLES)
    assert report["works"]["torch"]["works"]
    assert report["machine"]["num_cores"] >= 1 and report["machine"]["free_disk_bytes"] > 0
    monkeypatch.setattr("dflash_trt.doctor.report.make_report", lambda **options: report)
    lines = invoke("doctor").stdout.splitlines()
    assert f"torch {report['versions']['torch']}" in lines[0]
    results = [
        f"{'yes' if part['works'] else 'no '} {TITLES[name]}: {part['detail']}"
        for name, part in report["works"].items()
    ]
    assert lines[-len(results) :] == results


def test_all_of_modelopt_is_imported_if_asked_for(fake_module, tmp_path) -> None:
    (tmp_path / "modelopt" / "torch").mkdir(parents=True)
    (tmp_path / "modelopt" / "__init__.py").write_text("__version__ = '0.47.0'\n")
    (tmp_path / "modelopt" / "torch" / "__init__.py").write_text("raise ImportError('no onnx')\n")
    quick, full = run_probes(("quantization", "full_quantization"), 20.0)
    assert quick["works"]
    assert full == {"name": "full_quantization", "works": False, "detail": "no onnx"}


@pytest.mark.parametrize("name", ["HF_TOKEN", "api_key", "A_SECRET", "PGPASSWORD", "AWS_CREDENTIALS"])
def test_values_of_variables_that_hold_secrets_are_left_out(monkeypatch, name) -> None:
    monkeypatch.setenv(name, 'six"66')
    monkeypatch.setenv("PLAIN", "visible")
    assert _without_secrets(json.dumps('six"66 visible')) == '"*** visible"'
    monkeypatch.setenv(name, "short")  # a value like 1 or true stands everywhere
    assert _without_secrets("short") == "short"
