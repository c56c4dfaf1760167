"""The plugin library, compiled on this machine: kernels by Triton, their launchers by a C++ compiler.

Needs neither a GPU nor a CUDA toolkit: Triton's package has the CUDA headers. The sources are a part of the wheel; in a
checkout they are its own.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from dflash_trt.core.errors import BuildError, problem, raise_all

PLUGIN: Final = "dflash_trt_plugin"
KERNELS: Final = "dflash_trt_kernels"  # the same without TensorRT
_TOOLS: Final = {"cmake": "cmake", "ninja": "ninja-build"}  # and the Debian packages that have them
_PACKAGE: Final = Path(__file__).parents[1]
_HEADER: Final = "NvInferRuntime.h"
_HEADERS_HINT: Final = (
    "The wheels of TensorRT do not have it. Install libnvinfer-headers-dev of NVIDIA's repository for apt, or clone"
    " github.com/NVIDIA/TensorRT and set TENSORRT_INCLUDE_DIR to its include/."
)


def build_plugin_library(options: Sequence[str], output: Path, *, kernels_only: bool = False) -> Path | None:
    """Compile the kernels that `options` of the kernel compiler name, and the library around them, into `output`.

    None if the kernel compiler has refused the options, or failed, and has said why on stderr. `kernels_only`: the same
    kernels behind a C interface, without TensorRT's headers.

    Raises:
        BuildError: a tool or headers are missing, or the library does not compile.
    """
    compiler = os.environ.get("CXX") or "c++"
    raise_all(BuildError, "plugin library", list(_missing_tools(compiler)))
    headers = None if kernels_only else tensorrt_headers()
    root, kernels = _sources(), output / "kernels"
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "plugins.aot", str(kernels), *options]
    if subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode:
        return None
    build, target = output / "cmake", KERNELS if kernels_only else PLUGIN
    sizes = {"CMAKE_BUILD_TYPE": "Release", "DFLASH_TRT_KERNELS": str(kernels.resolve())}
    sizes |= {"CUDA_INCLUDE_DIR": str(_cuda_headers()), "TENSORRT_INCLUDE_DIR": str(headers or "")}
    definitions = [f"-D{name}={value}" for name, value in sizes.items()]
    _run(["cmake", "-S", str(root / "plugins"), "-B", str(build), "-G", "Ninja", *definitions])
    _run(["ninja", "-C", str(build), target])
    library = output / f"lib{target}.so"
    shutil.copy2(build / library.name, library)
    return library


def _missing_tools(compiler: str) -> list[str]:
    tools = _TOOLS | {compiler: "g++"}
    problems = [
        problem(tool, expected="a program", found="none", hint=f"Debian and Ubuntu: apt install {package}.")
        for tool, package in tools.items()
        if shutil.which(tool) is None
    ]
    if find_spec("triton") is None:
        hint = "Install it: pip install 'dflash-trt[kernels]' (on Linux)."
        problems.append(problem("triton", expected="an importable Python package", found="none", hint=hint))
    return problems


def _sources() -> Path:
    """The directory of `plugins`."""
    in_wheel = _PACKAGE / "plugin_sources"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent


def _cuda_headers() -> Path:
    spec = find_spec("triton")
    assert spec is not None and spec.origin is not None, "`_missing_tools` has looked"
    named = os.environ.get("CUDA_INCLUDE_DIR")
    directory = Path(named) if named else Path(spec.origin).parent / "backends" / "nvidia" / "include"
    if not (directory / "cuda.h").is_file():
        found, hint = f"none in {directory}", "Set CUDA_INCLUDE_DIR."
        raise BuildError.about("CUDA headers", expected="cuda.h", found=found, hint=hint)
    return directory


def tensorrt_headers() -> Path:
    """Of TensorRT 11, where the system or TENSORRT_INCLUDE_DIR has them. Raises BuildError."""
    named = os.environ.get("TENSORRT_INCLUDE_DIR")
    system = (f"/usr/include/{platform.machine()}-linux-gnu", "/usr/include", "/usr/local/tensorrt/include")
    places = [Path(place) for place in ([named] if named else [*system, "/opt/tensorrt/include"])]
    directory = next((place for place in places if (place / _HEADER).is_file()), None)
    if directory is None:
        found = f"none in {named}" if named else "none"
        expected = f"{_HEADER} of TensorRT 11"
        raise BuildError.about("TensorRT headers", expected=expected, found=found, hint=_HEADERS_HINT)
    version = headers_version(directory)
    if version[:1] != ("11",):
        found = version[0] if version else "an unknown one"
        raise BuildError.about(f"TensorRT headers in {directory}", expected="version 11", found=found)
    return directory


def headers_version(directory: Path) -> tuple[str, ...]:
    """Major and minor version of TensorRT's headers; empty where they do not say one."""
    text = (directory / "NvInferVersion.h").read_text()
    found = [
        re.search(rf"^#define (?:TRT_{part}_ENTERPRISE|NV_TENSORRT_{part}) (\d+)", text, re.M)
        for part in ("MAJOR", "MINOR")
    ]
    return tuple(match[1] for match in found if match is not None)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-2000:]
        hint = "Report it with this message."
        raise BuildError.about(f"{command[0]} of the plugin library", expected="a library", found=said, hint=hint)
