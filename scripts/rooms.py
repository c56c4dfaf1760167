"""The house rules about imports: which room may know which, and through which doors heavy dependencies come in.

Run it to check the package. The table is the one of docs/architecture.md.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

PACKAGE = "dflash_trt"
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Room:
    """`rooms` it may import, third-party `doors` of all its files, and more doors of files matching a pattern.

    The files of a lazy room import at module level only what `lazy_rooms` and `lazy_doors` name; the rest of what it
    may import is imported inside functions.
    """

    rooms: frozenset[str] = frozenset()
    doors: frozenset[str] = frozenset()
    file_doors: dict[str, frozenset[str]] = field(default_factory=dict)
    is_lazy: bool = False
    lazy_rooms: frozenset[str] = frozenset()
    lazy_doors: frozenset[str] = frozenset()


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


# In the order in which data flows: a room imports only rooms above it.
ROOMS: dict[str, Room] = {
    "core": Room(doors=_set("pydantic"), file_doors={"host_resources.py": _set("psutil")}),
    "checkpoint": Room(rooms=_set("core"), doors=_set("torch safetensors transformers")),
    "quantize": Room(
        rooms=_set("checkpoint core"),
        doors=_set("torch"),
        file_doors={"calibrate*.py": _set("modelopt transformers")},
    ),
    "kernels": Room(rooms=_set("core"), doors=_set("torch triton")),
    "network": Room(
        rooms=_set("kernels quantize core"),
        file_doors={"torch_*.py": _set("torch"), "philox.py": _set("torch"), "trt_*.py": _set("tensorrt")},
    ),
    "engine_dir": Room(
        rooms=_set("core"),
        doors=_set("pydantic safetensors"),
        file_doors={"tokenizer_dir.py": _set("transformers")},
    ),
    "compile": Room(
        rooms=_set("network quantize checkpoint engine_dir core"),
        doors=_set("torch tensorrt tensorrt_rtx"),
        file_doors={"trt_*.py": _set("safetensors")},
    ),
    "executor": Room(
        rooms=_set("network kernels engine_dir core"),
        doors=_set("torch safetensors"),
        file_doors={"trt*.py": _set("tensorrt"), "rank_process.py": _set("psutil")},
    ),
    "scheduler": Room(rooms=_set("core")),
    "serving": Room(
        rooms=_set("scheduler executor engine_dir core"),
        file_doors={
            "text.py": _set("transformers"),
            "template_worker.py": _set("transformers"),
            "trtllm*.py": _set("tensorrt_llm"),
        },
    ),
    "triton_server": Room(rooms=_set("serving engine_dir core"), doors=_set("numpy triton_python_backend_utils")),
    "bench": Room(rooms=_set("serving scheduler executor engine_dir core"), doors=_set("numpy matplotlib")),
    "demo": Room(
        rooms=_set("bench serving compile checkpoint engine_dir core"),
        doors=_set("torch transformers tokenizers safetensors numpy click"),
    ),
    "cli": Room(
        rooms=_set(
            "core checkpoint quantize network kernels engine_dir compile executor scheduler serving triton_server bench"
        ),
        doors=_set("click rich yaml pydantic"),
        is_lazy=True,
        lazy_rooms=_set("core"),
        lazy_doors=_set("click pydantic"),
    ),
}
# The package itself: what `import dflash_trt` gives, lazily.
PACKAGE_ROOM = Room(rooms=_set("core serving"), is_lazy=True)


@dataclass(frozen=True, kw_only=True, order=True)
class Violation:
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class _Import:
    module: str
    line: int
    is_at_import_time: bool


def violations(package: Path) -> list[Violation]:
    """Every import in the package directory that the table does not allow."""
    return [violation for path in sorted(package.rglob("*.py")) for violation in _of_file(path, package)]


def _of_file(path: Path, package: Path) -> Iterator[Violation]:
    parts = path.relative_to(package).with_suffix("").parts
    name = parts[0] if len(parts) > 1 else ""
    shown = f"{package.name}/{path.relative_to(package).as_posix()}"
    room = PACKAGE_ROOM if parts == ("__init__",) else ROOMS.get(name)
    if room is None:
        yield Violation(path=shown, line=1, message="stands in no room of the table")
        return
    for imported in _imports(ast.parse(path.read_text(), filename=str(path))):
        if message := _problem(imported, room, name=name, file_name=path.name):
            yield Violation(path=shown, line=imported.line, message=message)


def _problem(imported: _Import, room: Room, *, name: str, file_name: str) -> str | None:
    """Why this import is forbidden; None when it is not."""
    parts = imported.module.split(".")
    title = f"room {name}" if name else "the package"
    if parts[0] == PACKAGE:
        other = parts[1] if len(parts) > 1 else ""
        if other in ("", name):
            return None
        if other not in room.rooms:
            return f"{title} may import {_listed(room.rooms)}, not {PACKAGE}.{other}"
        if room.is_lazy and imported.is_at_import_time and other not in room.lazy_rooms:
            return f"{title} imports {PACKAGE}.{other} at module level: import it inside the function that needs it"
        return None
    if parts[0] in sys.stdlib_module_names:
        return None
    doors = room.doors.union(*(more for pattern, more in room.file_doors.items() if fnmatch(file_name, pattern)))
    if parts[0] not in doors:
        return f"{title} may import {_listed(doors)} from outside, not {parts[0]} (in a file of this name)"
    if room.is_lazy and imported.is_at_import_time and parts[0] not in room.lazy_doors:
        return f"{title} imports {parts[0]} at module level: import it inside the function that needs it"
    return None


def _imports(tree: ast.AST, *, is_at_import_time: bool = True) -> Iterator[_Import]:
    for node in ast.iter_child_nodes(tree):
        runs_now = is_at_import_time and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            runs_now = False
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Import(module=alias.name, line=node.lineno, is_at_import_time=runs_now)
        elif isinstance(node, ast.ImportFrom):
            yield from _imports_from(node, runs_now)
        else:
            yield from _imports(node, is_at_import_time=runs_now)


def _imports_from(node: ast.ImportFrom, is_at_import_time: bool) -> Iterator[_Import]:
    """`from dflash_trt import x` may name a room; everything else names its module."""
    assert node.module is not None and node.level == 0, "ruff refuses relative imports"
    modules = [node.module]
    if node.module == PACKAGE:
        modules = [f"{PACKAGE}.{alias.name}" for alias in node.names if alias.name in ROOMS] or [PACKAGE]
    for module in modules:
        yield _Import(module=module, line=node.lineno, is_at_import_time=is_at_import_time)


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def main() -> int:
    found = violations(ROOT / PACKAGE)
    for violation in found:
        print(violation)
    print(f"rooms: {len(found)} forbidden imports" if found else "rooms: all imports allowed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
