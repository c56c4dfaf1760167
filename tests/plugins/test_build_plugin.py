"""`dflash-trt build-plugin` says what is missing before it begins, and builds from a wheel's sources, too."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from dflash_trt.compile import plugin_build
from dflash_trt.compile.plugin_build import build_plugin_library
from dflash_trt.core.errors import BuildError
from tests.factories import make_target
from tests.plugins.building import ROOT, tensorrt_headers

TOOLS = ("cmake", "ninja", "c++")


@pytest.fixture
def _tools() -> None:
    if any(shutil.which(tool) is None for tool in TOOLS):
        pytest.skip("needs cmake, ninja and a C++ compiler")


def make_headers(directory: Path, *, major: int) -> Path:
    directory.mkdir()
    (directory / "NvInferRuntime.h").touch()
    (directory / "NvInferVersion.h").write_text(f"#define TRT_MAJOR_ENTERPRISE {major}\n")
    return directory


@pytest.mark.usefixtures("_tools")
def test_headers_that_are_not_there_or_of_another_version_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_headers(tmp_path / "old", major=10)
    for directory, expected in (
        (tmp_path, rf"expected NvInferRuntime.h of TensorRT 11, found none in {tmp_path}\."),
        (old, rf"TensorRT headers in {old}: expected version 11, found 10"),
    ):
        monkeypatch.setenv("TENSORRT_INCLUDE_DIR", str(directory))
        with pytest.raises(BuildError, match=expected):
            build_plugin_library([], tmp_path / "out")


@pytest.mark.usefixtures("_tools")
def test_without_headers_it_says_where_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORRT_INCLUDE_DIR", raising=False)
    if tensorrt_headers() is not None:
        pytest.skip("this machine has TensorRT's headers: nothing is missing")
    with pytest.raises(BuildError, match=r"found none\..*libnvinfer-headers-dev.*github.com/NVIDIA/TensorRT"):
        build_plugin_library([], tmp_path / "out")


@pytest.mark.parametrize("tool", TOOLS)
def test_a_missing_tool_is_named_with_the_package_that_has_it(
    tmp_path: Path, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set(TOOLS) - {tool}:
        (tmp_path / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=rf"{re.escape(tool)}: expected a program, found none\. .*: apt install "):
        build_plugin_library([], tmp_path / "out")


def test_without_triton_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(plugin_build, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"triton: expected an importable .*dflash-trt\[kernels\]"):
        build_plugin_library([], tmp_path / "out")


@pytest.mark.slow
@pytest.mark.usefixtures("_tools")
def test_the_sources_of_a_wheel_give_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that setup.py copies, compiled outside of the checkout."""
    sources = tmp_path / "plugin_sources"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "*.md", ".*")
    shutil.copytree(ROOT / "plugins", sources / "plugins", ignore=ignored)
    monkeypatch.setattr(plugin_build, "_sources", lambda: sources)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    make_target(tmp_path / "target", head_dim=16)
    (tmp_path / "build.yaml").write_text("target: target\nbackend: tensorrt\ndtype: bfloat16\n")
    options = [
        "--config",
        str(tmp_path / "build.yaml"),
        "--arch",
        "90a",
        "--cache",
        str(ROOT / "build" / "test_kernel_cache"),
    ]
    library = build_plugin_library(options, tmp_path / "out", kernels_only=True)
    assert library is not None and library.stat().st_size > 100_000
