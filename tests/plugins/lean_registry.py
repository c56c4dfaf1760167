"""What the real TensorRT registry says of a plugin library; run as a process of its own.

    python -m tests.plugins.lean_registry LIBRARY

Prints one JSON object. The lean runtime needs no GPU for its registry, but its `Runtime` must not be touched without
a driver: it crashes the process.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from dflash_trt.backends.tensorrt.plugin_library import load_plugin_library
from dflash_trt.backends.tensorrt.plugins import make_plugin, missing_plugins
from dflash_trt.core.errors import DFlashError
from dflash_trt.kernels.programs import NAMESPACE, PROGRAMS, VERSION


class Logger:
    """Collects what TensorRT and the library say."""

    @staticmethod
    def of(trt: Any) -> Any:
        class Collecting(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self.lines: list[str] = []

            def log(self, severity: Any, message: str) -> None:
                self.lines.append(message)

        return Collecting()


def report(trt: Any, library: Path) -> dict[str, Any]:
    logger = Logger.of(trt)
    trt.init_libnvinfer_plugins(logger, "") if hasattr(trt, "init_libnvinfer_plugins") else None
    registry = trt.get_plugin_registry()
    before = list(missing_plugins(registry))
    try:
        load_plugin_library(trt, library)
    except DFlashError as error:
        return {"version": trt.__version__, "missing_before": before, "error": str(error)}
    creators = {name.name: registry.get_creator(name.name, VERSION, NAMESPACE) for name in PROGRAMS}
    return {
        "version": trt.__version__,
        "missing_before": before,
        "missing_after": list(missing_plugins(registry)),
        "found_elsewhere": [
            plugin.name for plugin in PROGRAMS if registry.get_creator(plugin.name, VERSION, "") is not None
        ],
        "fields": {
            name: [[field.name, field.type.name, field.size] for field in creator.field_names]
            for name, creator in creators.items()
        },
        "made": {plugin.name: _valid(trt, plugin) for plugin in PROGRAMS},
        "refused": {name: _refused(trt, creator, name) for name, creator in creators.items()},
        "log": logger.lines,
    }


def _valid(trt: Any, contract: Any) -> list[str]:
    """As the network makes it; what the registry's object says it is."""
    plugin = make_plugin(
        trt, contract, name="node", fields=dict.fromkeys((*contract.integer_fields, *contract.real_fields), 1)
    )
    capability = plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
    return [capability.plugin_name, capability.plugin_version, capability.plugin_namespace]


def _refused(trt: Any, creator: Any, name: str) -> dict[str, bool]:
    contract = next(plugin for plugin in PROGRAMS if plugin.name == name)
    int32, float32 = trt.PluginFieldType.INT32, trt.PluginFieldType.FLOAT32

    def is_refused(*fields: tuple[str, Any, Any]) -> bool:
        collection = trt.PluginFieldCollection([trt.PluginField(*field) for field in fields])
        try:
            return creator.create_plugin("node", collection, trt.TensorRTPhase.BUILD) is None
        except (RuntimeError, TypeError):  # pybind11's way of a null pointer
            return True

    def one(value: int) -> Any:
        return (ctypes.c_int32 * 1)(value)

    def real(value: float) -> Any:
        return (ctypes.c_float * 1)(value)

    valid = [(field, one(1), int32) for field in contract.integer_fields]
    valid += [(field, real(1.0), float32) for field in contract.real_fields]
    answers = {"unknown": is_refused(*valid, ("colour", one(1), int32))}
    if contract.integer_fields:
        first = contract.integer_fields[0]
        answers |= {
            "missing": is_refused(*valid[1:]),
            "twice": is_refused(*valid, valid[0]),
            "float32": is_refused((first, real(1.0), float32), *valid[1:]),
            "int64": is_refused((first, (ctypes.c_int64 * 1)(1), trt.PluginFieldType.INT64), *valid[1:]),
            "two values": is_refused((first, (ctypes.c_int32 * 2)(1, 1), int32), *valid[1:]),
            "out of range": is_refused((first, one(-1), int32), *valid[1:]),
        }
    if contract.real_fields:
        last = contract.real_fields[-1]
        answers |= {
            f"a scale of {value}": is_refused(*valid[:-1], (last, real(value), float32))
            for value in (0.0, -1.0, float("inf"), float("nan"))
        }
        answers["an int32 scale"] = is_refused(*valid[:-1], (last, one(1), int32))
    return answers


if __name__ == "__main__":
    import tensorrt_lean

    sys.stdout.write(json.dumps(report(tensorrt_lean, Path(sys.argv[1]).resolve())))
