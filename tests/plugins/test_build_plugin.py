"""scripts/build_plugin says what is missing before it begins."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.plugins.building import ROOT, tensorrt_headers

SCRIPT = ROOT / "scripts" / "build_plugin"


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT)], env=dict(os.environ) | environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(autouse=True)
def _tools() -> None:
    if any(shutil.which(tool) is None for tool in ("cmake", "ninja", "c++")):
        pytest.skip("needs cmake, ninja and a C++ compiler")


def test_a_directory_without_tensorrts_headers_is_refused(tmp_path: Path) -> None:
    done = run(TENSORRT_INCLUDE_DIR=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (f"error: TENSORRT_INCLUDE_DIR: expected NvInferRuntime.h in it, found none in {tmp_path}.\n")


def test_headers_of_another_major_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "NvInferRuntime.h").touch()
    (tmp_path / "NvInferVersion.h").write_text("#define TRT_MAJOR_ENTERPRISE 10\n")
    done = run(TENSORRT_INCLUDE_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "expected version 11, found 10" in done.stderr


def test_without_headers_it_says_where_to_get_them() -> None:
    if tensorrt_headers() is not None:
        pytest.skip("this machine has TensorRT's headers: nothing is missing")
    done = run()
    assert done.returncode == 2
    assert re.search("expected NvInferRuntime.h of TensorRT 11, found none.*github.com/NVIDIA/TensorRT", done.stderr)


@pytest.mark.parametrize("tool", ["cmake", "ninja", "c++"])
def test_a_missing_tool_is_named_with_the_package_that_has_it(tmp_path: Path, tool: str) -> None:
    for name in {"cmake", "ninja", "c++", "bash", "env", "dirname"} - {tool}:
        path = shutil.which(name)
        assert path is not None
        (tmp_path / name).symlink_to(path)
    done = run(PATH=str(tmp_path))
    assert done.returncode == 2
    assert re.search(f"^error: {re.escape(tool)}: expected .*, found none\\. Debian: apt install ", done.stderr)
