"""Versions of packages, and the machine: GPUs, processor, memory, disk. Imports none of the packages."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import dflash_trt
from dflash_trt.core.host_resources import available_cores, available_memory_bytes, total_memory_bytes

PACKAGES: Final = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "tensorrt",
    "tensorrt-rtx",
    "nvidia-modelopt",
    "tritonclient",
)
_GPU_FIELDS: Final = ("name", "memory_mib", "compute_capability", "driver")
_GPU_QUERY: Final = "name,memory.total,compute_cap,driver_version"
_TIME_LIMIT_S: Final = 10.0
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str | None]:
    """Versions of dflash-trt, Python and the packages; None for packages that are not installed."""
    own = {"dflash-trt": dflash_trt.__version__, "python": platform.python_version()}
    return own | {name: _version(name) for name in PACKAGES}


def machine() -> dict[str, Any]:
    """The host, without names of it or of its users."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "num_cores": available_cores(),
        "memory_bytes": total_memory_bytes(),
        "free_memory_bytes": available_memory_bytes(),
        "free_disk_bytes": shutil.disk_usage(Path.cwd()).free,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def gpus() -> list[dict[str, str]]:
    """The GPUs that nvidia-smi lists."""
    words = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.split(", ") for line in ran.stdout.splitlines())
    return [dict(zip(_GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(_GPU_FIELDS)]


def driver_module() -> str | None:
    """NVIDIA's kernel module, if loaded: a driver without a usable GPU indicates a container."""
    try:
        return _DRIVER_FILE.read_text().partition("\n")[0]
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The model, as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
