"""The only module that imports TensorRT: `tensorrt` to run engines, `tensorrt_rtx` to check on a CPU.

Both have the same network API, so all other modules take the module as an argument.
"""

import importlib
import re
from types import ModuleType
from typing import Any, Final, Literal

from dflash_trt.core.errors import BuildError, DFlashError, problem

Flavor = Literal["tensorrt", "tensorrt_rtx"]
MIN_TENSORRT: Final = (11, 0)

_INSTALL: dict[Flavor, str] = {
    "tensorrt": "Install it: pip install tensorrt (11.0 or newer), or build with --backend torch.",
    "tensorrt_rtx": "Install it: pip install 'dflash-trt[check]' (needs no GPU).",
}


def load_tensorrt(flavor: Flavor, *, error: type[DFlashError] = BuildError) -> ModuleType:
    """The imported module.

    Raises:
        `error`: not installed, not importable, or too old; the message says how to get it.
    """
    try:
        module = importlib.import_module(flavor)
    except ImportError as cause:
        raise error(
            problem(flavor, expected="an importable Python package", found=str(cause), hint=_INSTALL[flavor])
        ) from cause
    version = module_version(module)
    if flavor == "tensorrt" and version_numbers(version) < MIN_TENSORRT:
        expected = f"{'.'.join(map(str, MIN_TENSORRT))} or newer"
        raise error(problem(flavor, expected=expected, found=version, hint=_INSTALL[flavor]))
    return module


def module_version(module: ModuleType) -> str:
    return str(module.__version__)


def version_numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version, for comparing: "11.4.0.106" -> (11, 4, 0, 106)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def make_logger(trt: Any) -> Any:
    """A TensorRT logger that keeps warnings and errors, because `add_*` only says None when it fails.

    Its `errors` and `warnings` are lists of messages, oldest first.
    """

    class MessageLogger(trt.ILogger):  # type: ignore[misc]  # the base comes from a module chosen at run time
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)
            elif severity == trt.ILogger.WARNING:
                self.warnings.append(message)

    return MessageLogger()
