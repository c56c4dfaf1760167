"""Probes of what works here: each imports what it needs and does a little of it.

`python -m dflash_trt.doctor.probes NAME...` runs them and prints a line of JSON after each, so that a probe that
crashes or hangs leaves the results of those before it.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path
from shutil import which
from typing import Any, Final

from dflash_trt.core.errors import DFlashError

_TRITON_SERVERS: Final = ("/opt/tritonserver/bin", ".triton_server/wheel/pytriton/tritonserver/bin")


class NotHereError(Exception):
    """Something is missing; the message is the reason."""


def torch_on_cpu() -> str:
    import torch

    from dflash_trt.backends.torch.native.library import NoKernels, cpu_kernels

    product = torch.ones(2, 3) @ torch.ones(3, 2)
    assert product.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    built_with = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    kernels = cpu_kernels()
    found = f"no CPU kernels: {kernels.reason}" if isinstance(kernels, NoKernels) else kernels.path.name
    return f"PyTorch {torch.__version__} with {built_with}, {torch.get_num_threads()} threads; {found}"


def cuda_kernels() -> str:
    """One of our kernels, compared with PyTorch."""
    import torch

    if torch.version.cuda is None:
        raise NotHereError("this PyTorch is built without CUDA")
    if not torch.cuda.is_available():
        raise NotHereError("PyTorch finds no GPU that it can use")
    from dflash_trt.kernels.norm_launch import rms_norm

    x = torch.linspace(-1.0, 1.0, 256, device="cuda").view(2, 128).bfloat16()
    weight = torch.ones(128, dtype=torch.bfloat16, device="cuda")
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (128,), weight, 1e-6))
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"


def tensorrt() -> str:
    from dflash_trt.backends.tensorrt.module import load_tensorrt

    trt: Any = load_tensorrt("tensorrt")
    if trt.Builder(trt.Logger(trt.Logger.ERROR)) is None:
        raise NotHereError("TensorRT gives no builder: it needs a GPU")
    return f"TensorRT {trt.__version__}"


def tensorrt_rtx() -> str:
    from dflash_trt.backends.tensorrt.module import load_tensorrt

    trt: Any = load_tensorrt("tensorrt_rtx")
    trt.Logger(trt.Logger.ERROR)
    return f"TensorRT-RTX {trt.__version__}"


def quantization() -> str:
    """The import that calibration begins with. The rest of ModelOpt takes ten seconds: see `full`."""
    import modelopt

    missing = [name for name in ("requests", "huggingface_hub") if not _is_installed(name)]
    if missing:
        raise NotHereError(f"ModelOpt needs {' and '.join(missing)}, too")
    return f"ModelOpt {modelopt.__version__}; its import alone was tried"


def full_quantization() -> str:
    import modelopt
    import modelopt.torch.quantization

    return f"ModelOpt {modelopt.__version__}"


def triton_server() -> str:
    places = [name for name in _TRITON_SERVERS if Path(name).is_dir()]
    found = which("tritonserver") or which("tritonserver", path=":".join(places) or None)
    if found is None:
        raise NotHereError("no tritonserver on the PATH, nor in .triton_server")
    ran = subprocess.run([found, "--help"], capture_output=True, text=True, check=False)
    if "Usage: tritonserver" not in ran.stdout + ran.stderr:
        raise NotHereError(f"tritonserver does not start: {_last_line(ran.stderr)}")
    return "tritonserver starts"


PROBES: Final[dict[str, Callable[[], str]]] = {
    "torch": torch_on_cpu,
    "cuda": cuda_kernels,
    "tensorrt": tensorrt,
    "tensorrt_rtx": tensorrt_rtx,
    "quantization": quantization,
    "full_quantization": full_quantization,
    "triton_server": triton_server,
}


def run_probe(name: str) -> dict[str, Any]:
    """The result of a probe; `detail` is the reason where it does not work."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"name": name, "works": True, "detail": PROBES[name]()}
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the answer
        is_plain = isinstance(error, NotHereError | ImportError | DFlashError)
        detail = _last_line(str(error)) if is_plain else f"{type(error).__name__}: {_last_line(str(error))}"
        return {"name": name, "works": False, "detail": detail}


def _is_installed(package: str) -> bool:
    from importlib.metadata import PackageNotFoundError

    try:
        requires(package)
    except PackageNotFoundError:
        return False
    return True


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


if __name__ == "__main__":
    for word in sys.argv[1:]:
        print(json.dumps(run_probe(word)), flush=True)  # noqa: T201 - its protocol
