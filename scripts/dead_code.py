"""Fails for functions, classes and methods that nothing in the project calls: `scripts/check` runs it.

Tests do not count as callers. What others call by name is in ALLOWED, with the reason; an entry that is called after
all must go.
"""

import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from vulture import Vulture

ROOT: Final = Path(__file__).parents[1]
PATHS: Final = ("dflash_trt", "plugins/aot", "scripts", "examples")
KINDS: Final = ("function", "class", "method", "property", "import", "unreachable_code")
DECORATORS: Final = ["@field_validator*", "@model_validator*", "@*.command*"]  # pydantic and click call these
ALLOWED: Final = {
    "*_kernel": "launched by name, from the tables of grids",
    "__getattr__": "Python, for names that are imported when they are asked for",
    "num_snapshots_in_use": "observed by tests",
    "num_window_pages_in_use": "observed by tests",
    "worker_process_ids": "observed by tests",
    "as_dict": "for users",
    "phase_start": "TensorRT's IProgressMonitor",
    "step_complete": "TensorRT's IProgressMonitor",
    "phase_finish": "TensorRT's IProgressMonitor",
    "connection_made": "asyncio's protocol",
    "_should_skip_dynamo": "PyTorch's TorchDispatchMode",
    "get_current_*": "Triton's driver",
    "from_args": "Dynamo's engine",
    "kv_event_sources": "Dynamo's engine",
    "is_quiescent": "Dynamo's engine",
    "register_prometheus": "Dynamo's engine",
    "component_metrics_dp_ranks": "Dynamo's engine",
    "attach_snapshot_publisher": "Dynamo's engine",
    "TritonPythonModel": "Triton's Python backend",
    "initialize": "Triton's Python backend",
    "execute": "Triton's Python backend",
    "DFlashTrtModel": "specdec_bench",
    "get_serving_config": "specdec_bench",
    "pytest_*": "pytest's plugins",
    "on_*": "mkdocs' hooks",
}


def unused_names(paths: list[str]) -> dict[str, str]:
    """Names that nothing uses, with their place."""
    vulture = Vulture(ignore_decorators=DECORATORS)
    vulture.scavenge(paths)
    found = vulture.get_unused_code(min_confidence=60)
    return {item.name: f"{item.filename}:{item.first_lineno}: {item.typ}" for item in found if item.typ in KINDS}


def problems_of(unused: dict[str, str]) -> list[str]:
    """A line for each name that must go, and for each entry of ALLOWED."""
    problems = [
        f"{place} {name}: nothing calls it. Remove it, or say in scripts/dead_code.py who does."
        for name, place in unused.items()
        if not any(fnmatch(name, pattern) for pattern in ALLOWED)
    ]
    left_over = [pattern for pattern in ALLOWED if not any(fnmatch(name, pattern) for name in unused)]
    return problems + [f"scripts/dead_code.py: {name}: something calls it. Remove the entry." for name in left_over]


def main() -> int:
    problems = problems_of(unused_names([str(ROOT / path) for path in PATHS]))
    print("\n".join(sorted(problems)) or "dead code: none")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
