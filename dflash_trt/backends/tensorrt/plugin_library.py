"""Loading the plugin library into a TensorRT registry, with every way it can fail named."""

import hashlib
from pathlib import Path
from typing import Any, Final

from dflash_trt.backends.tensorrt.plugins import missing_plugins
from dflash_trt.core.errors import BuildError, DFlashError, problem
from dflash_trt.kernels.programs import NAMESPACE

LIBRARY_HINT: Final = "Build it with dflash-trt build-plugin and pass --plugin-library, or build with --backend torch."
_loaded: dict[str, str] = {}  # by TensorRT module, whose registry is the process's own: SHA-256 of the library


def load_plugin_library(trt: Any, path: Path | None, *, error: type[DFlashError] = BuildError) -> None:
    """Load `path` unless its plugins are registered already, and check that all of the contract are there.

    TensorRT answers None, without any message, for a library that lacks an export.

    Raises:
        `error`: no such file, not loadable, plugins missing from it, or another library loaded before.
    """
    registry = trt.get_plugin_registry()
    if path is not None:
        if not path.is_file():
            raise error(problem(f"plugin library {path}", expected="a file", found="none", hint=LIBRARY_HINT))
        _load(trt, registry, path, error)
    if missing := missing_plugins(registry):
        raise error(
            problem(
                f"plugin library {path or '(none given)'}",
                expected=f"the plugins of namespace {NAMESPACE}",
                found=f"none named {', '.join(missing)}",
                hint=LIBRARY_HINT,
            )
        )


def _load(trt: Any, registry: Any, path: Path, error: type[DFlashError]) -> None:
    """A registry keeps the first plugin of a name, so a second library would be ignored without a word."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    module = str(getattr(trt, "__name__", ""))
    if missing_plugins(registry):
        if registry.load_library(str(path)) is None:
            found = "TensorRT loads nothing from it (it must export getCreators and setLoggerFinder)"
            raise error(
                problem(f"plugin library {path}", expected="a TensorRT plugin library", found=found, hint=LIBRARY_HINT)
            )
        _loaded[module] = sha256
    elif _loaded.get(module, sha256) != sha256:
        hint = "Open the engines in processes of their own, or pass --plugin-library with one library for both."
        expected = f"the library that this process has loaded, with sha256 {_loaded[module]}"
        raise error(problem(f"plugin library {path}", expected=expected, found=sha256, hint=hint))
