"""With the declared dependencies alone: what is imported, what runs, and what is refused by name before any work."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.declared_only import declared, undeclared_modules

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "declared_only.py"
IMPORT_ALL = """
import importlib, json, pkgutil, dflash_trt
missing = {}
for module in pkgutil.walk_packages(dflash_trt.__path__, "dflash_trt."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name
print(json.dumps(missing))
"""
# Modules of an extra, which a command imports after it has asked for the extra. Triton's kernels are apart: PyTorch
# with CUDA brings Triton along.
OF_EXTRAS = {
    "dflash_trt.bench.openai_client": "aiohttp",
    "dflash_trt.bench.server_sweep": "aiohttp",
    "dflash_trt.servers.dynamo.contract": "dynamo",
    "dflash_trt.servers.dynamo.event_broker": "zmq",
    "dflash_trt.servers.dynamo.gateway": "aiohttp",
    "dflash_trt.servers.dynamo.metrics": "prometheus_client",
    "dflash_trt.servers.triton.model": "triton_python_backend_utils",
}
OF_KERNELS = ("dflash_trt.kernels.", "dflash_trt.backends.cuda.", "dflash_trt.backends.tensorrt.")
COMMAND = "from dflash_trt.cli.main import main; main()"


def with_declared_alone(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True, check=False)


def test_tests_hide_the_extras_and_nothing_that_is_declared() -> None:
    hidden = undeclared_modules()
    assert "pytest" in hidden and not {"torch", "transformers", "click", "numpy", "dflash_trt"} & hidden
    assert {"torch", "llguidance", "markupsafe"} <= declared() and "ruff" not in declared()


def test_only_modules_of_an_extra_import_it() -> None:
    ran = with_declared_alone(IMPORT_ALL)
    assert ran.returncode == 0, ran.stderr
    missing = json.loads(ran.stdout)
    of_kernels = {name for name, package in missing.items() if package == "triton" and name.startswith(OF_KERNELS)}
    # What is installed here decides which of them are missing; what an extra's module imports is hidden all the same.
    assert {name: package for name, package in missing.items() if name not in of_kernels} == OF_EXTRAS


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello"}\n')
    return path


@pytest.mark.parametrize(
    "words",
    [("speedup", "--rounds", "1"), ("throughput", "--rounds", "1", "--concurrency", "1")],
    ids=lambda words: words[0],
)
def test_a_benchmark_without_http_needs_no_extra(engine_dir: Path, prompts: Path, words: tuple[str, ...]) -> None:
    options = ("--input-file", prompts, "--max-new-tokens", "2")
    ran = with_declared_alone(COMMAND, "bench", words[0], engine_dir, *options, *words[1:])
    assert ran.returncode == 0, ran.stderr


def test_bench_serve_names_its_extra_before_any_work(tmp_path: Path) -> None:
    ran = with_declared_alone(COMMAND, "bench", "serve", "http://127.0.0.1:9", "--input-file", tmp_path / "none.jsonl")
    assert ran.returncode == 2
    assert "aiohttp" in ran.stderr and "pip install 'dflash-trt[serve]'" in ran.stderr
    assert "none.jsonl" not in ran.stderr and "Traceback" not in ran.stderr


def test_check_wheel_runs_a_command_of_every_extra_and_ci_runs_check_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    script = (ROOT / "scripts" / "check_wheel").read_text()
    (listed,) = re.findall(r"extras=\((\w[^)]*)\)", script)
    commands = re.findall(r"^ {8}(\w+)\) ", script, re.MULTILINE)
    assert sorted(listed.split()) == sorted(commands) == sorted(project["optional-dependencies"].keys() - {"dev"})
    assert "scripts/check_wheel --quick" in (ROOT / ".ci" / "run").read_text()
