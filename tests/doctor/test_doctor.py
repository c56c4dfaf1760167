"""`dflash-trt doctor` on machines where things are missing, broken or slow: it reports, and never fails."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.doctor import machine
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
    "import os, sys\nprint('terminate called', file=sys.stderr, flush=True)\nos.abort()": (
        "its process ended with -6: terminate called"
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
