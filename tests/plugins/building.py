"""Builds the plugin library for tests, under build/ so that a second run only looks whether anything changed."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Every kernel once or twice, of a size that compiles fast and is executed fast on a CPU.
SMALL_KERNELS = (
    *("--dtypes", "float32", "--pages", "network,float8_e4m3fn", "--head-dims", "16", "--max-requests", "16"),
    *(
        "--softcaps",
        "without,with",
        "--chains",
        "without,with",
        "--tiles",
        "16,64",
        "--vocab-tiles",
        "64",
        "--widths",
        "16",
    ),
)


@dataclass(frozen=True, kw_only=True)
class BuiltLibrary:
    """`plugin` and `host` are None without TensorRT's headers."""

    kernels: Path
    fake_driver: Path
    fake_nccl: Path
    manifest: Path
    plugin: Path | None
    host: Path | None


def compile_kernels(
    out: Path, *options: str, module: str = "plugins.aot", timeout_s: float = 280
) -> subprocess.CompletedProcess[str]:
    """`python -m plugins.aot`, in a process where Triton compiles. Runs of the tests share what they compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cache = ROOT / "build" / "test_kernel_cache"
    command = [sys.executable, "-m", module, str(out), "--cache", str(cache), *options]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def build_library(out: Path, *options: str, module: str = "plugins.aot", timeout_s: float = 280) -> BuiltLibrary:
    """With the kernels that `options` of the kernel compiler name. Skips the test where a tool is missing."""
    tools = [tool for tool in ("cmake", "ninja", "c++") if shutil.which(tool) is None]
    if tools:
        pytest.skip(f"needs {', '.join(tools)} to build the plugin library")
    compiled = compile_kernels(out / "kernels", *options, module=module, timeout_s=timeout_s)
    assert compiled.returncode == 0, compiled.stderr
    return build_sources(out)


def build_sources(out: Path) -> BuiltLibrary:
    """The library around the kernels that stand in `out`/kernels."""
    headers = tensorrt_headers()
    targets = ["dflash_trt_kernels", "fake_driver", "fake_nccl"] + (
        ["dflash_trt_plugin", "plugin_host"] if headers else []
    )
    definitions = {
        "DFLASH_TRT_KERNELS": out / "kernels",
        "CUDA_INCLUDE_DIR": cuda_headers(),
        "TENSORRT_INCLUDE_DIR": headers or "",
    }
    build = out / "cmake"
    _run(
        ["cmake", "-S", str(ROOT / "plugins"), "-B", str(build), "-G", "Ninja"]
        + [f"-D{name}={value}" for name, value in definitions.items()]
    )
    _run(["ninja", "-C", str(build), *targets])
    return BuiltLibrary(
        kernels=build / "libdflash_trt_kernels.so",
        fake_driver=build / "libcuda.so.1",
        fake_nccl=build / "libnccl.so.2",
        manifest=out / "kernels" / "manifest.json",
        plugin=build / "libdflash_trt_plugin.so" if headers else None,
        host=build / "plugin_host" if headers else None,
    )


def tensorrt_headers() -> Path | None:
    """Where scripts/build_plugin looks, too. No package registry carries them."""
    system = (f"/usr/include/{platform.machine()}-linux-gnu", "/usr/include", "/usr/local/tensorrt/include")
    named = os.environ.get("TENSORRT_INCLUDE_DIR")
    candidates = [named] if named else [*system, "/opt/tensorrt/include"]
    return next((Path(path) for path in candidates if (Path(path) / "NvInferRuntime.h").is_file()), None)


def cuda_headers() -> Path:
    """Triton's package has them."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "include"


def run_python(module: str, *arguments: Path, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = [sys.executable, "-m", module, *(str(argument) for argument in arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
