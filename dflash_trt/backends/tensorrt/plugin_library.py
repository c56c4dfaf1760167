"""Loading the plugin library into a TensorRT registry, with every way it can fail named."""

from pathlib import Path
from typing import Any

from dflash_trt.backends.tensorrt.plugins import PLUGIN_NAMESPACE, missing_plugins
from dflash_trt.core.errors import BuildError, DFlashError, problem

_MEND = "Build it with scripts/build_plugin and pass --plugin-library, or build with --plugins layers (slow)."


def load_plugin_library(trt: Any, path: Path | None, *, error: type[DFlashError] = BuildError) -> None:
    """Load `path` unless its plugins are registered already, and check that all of the contract are there.

    TensorRT answers None, without any message, for a library that lacks an export.

    Raises:
        `error`: no such file, not loadable, or plugins missing from it.
    """
    registry = trt.get_plugin_registry()
    if path is not None and missing_plugins(registry):
        if not path.is_file():
            raise error(problem(f"plugin library {path}", expected="a file", found="none", hint=_MEND))
        if registry.load_library(str(path)) is None:
            found = "TensorRT loads nothing from it (it must export getCreators and setLoggerFinder)"
            raise error(
                problem(f"plugin library {path}", expected="a TensorRT plugin library", found=found, hint=_MEND)
            )
    if missing := missing_plugins(registry):
        raise error(
            problem(
                f"plugin library {path or '(none given)'}",
                expected=f"the plugins of namespace {PLUGIN_NAMESPACE}",
                found=f"none named {', '.join(missing)}",
                hint=_MEND,
            )
        )
