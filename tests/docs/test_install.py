"""`scripts/install` gives a user the declared dependencies alone, and the build of PyTorch that the machine can use."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.declared_only import declared
from tests.docs.pages import ROOT

REQUIREMENTS = ROOT / "requirements"


def locked(name: str) -> dict[str, str]:
    """Names and versions of a lock; a name with a version for each Python has its last."""
    return dict(re.findall(r"(?m)^([a-z0-9._-]+)==([^\s;]+)", (REQUIREMENTS / name).read_text()))


def test_the_lock_of_the_install_holds_what_the_package_declares_and_no_tool() -> None:
    """colorama is click's on Windows; PyTorch is installed apart."""
    assert set(locked("install.txt")) - {"colorama"} == declared() - {"dflash-trt", "torch"}


def test_development_tools_are_locked_apart_with_the_same_versions() -> None:
    install, dev, references = (locked(f"{name}.txt") for name in ("install", "dev", "references"))
    assert {"ruff", "mypy", "pytest", "hypothesis"} <= set(dev) and set(install).isdisjoint(dev)
    everything = install | dev
    assert {name: references[name] for name in everything} == everything


class _Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Index) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def words_of_pip(tmp_path: Path, index: str, *, driver: bool = False) -> str:
    """What `install_torch` asks of pip, on a machine whose index of CPU builds is `index`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "python": f'[[ $1 == -m ]] && echo "${{@:2}}" || exec {sys.executable} "$@"',
        "nvidia-smi": "exit 0" if driver else "",
    }.items():
        if text:
            (programs / name).write_text(f"#!/bin/bash\n{text}\n")
            (programs / name).chmod(0o755)
    script = f"set -euo pipefail; source scripts/torch_build; CPU_INDEX={index}; install_torch {programs}/python"
    path = os.environ | {"PATH": f"{programs}:/usr/bin:/bin", "no_proxy": "127.0.0.1"}
    return subprocess.run(["bash", "-c", script], cwd=ROOT, env=path, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(
    Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi", path="/usr/bin:/bin") is not None,
    reason="this machine has an NVIDIA driver",
)
def test_a_machine_without_a_driver_takes_pytorch_from_the_index_of_cpu_builds(tmp_path: Path, index: str) -> None:
    assert f"--index-url {index} torch==" in words_of_pip(tmp_path, index)


def test_a_machine_with_a_driver_or_without_that_index_takes_the_default_one(tmp_path: Path, index: str) -> None:
    (tmp_path / "driver").mkdir()
    (tmp_path / "offline").mkdir()
    for words in (
        words_of_pip(tmp_path / "driver", index, driver=True),
        words_of_pip(tmp_path / "offline", "http://127.0.0.1:9"),
    ):
        assert "install torch==" in words and "--index-url" not in words


# What `scripts/test` leaves out, and why.
MISSING = {
    "ai-dynamo": {"aisimulate": "a placeholder that downloads from NVIDIA's own package index"},
    "speculators": dict.fromkeys(
        ("protobuf", "torchaudio", "torchvision"), "not imported by what tests use; two would replace PyTorch"
    ),
}


def test_the_environment_of_the_tests_is_one_that_pip_makes_but_for_what_is_named() -> None:
    absent = [name for name in MISSING if not is_installed(name)]
    if absent:
        pytest.skip(f"{', '.join(absent)}: not installed; scripts/test installs them")
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    told = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    expected = {f"{name} requires {lack}, which is not installed." for name in MISSING for lack in MISSING[name]}
    found = {re.sub(r"(?<=\S) \d\S* requires", " requires", line) for line in told.splitlines()}
    assert found - {"No broken requirements found."} <= expected


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
