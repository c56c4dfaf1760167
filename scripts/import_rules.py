"""Import rules: which package may import which, and where heavy dependencies may be imported.

Run it to check `dflash_trt`. The table of CONTRIBUTING.md is generated from this one (`--markdown`).
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
class Rule:
    """Imports allowed to the files of one package.

    `packages` of ours, third-party `libraries`, and further libraries in files whose path below the package matches a
    pattern. The files of a lazy package import at module level only what `lazy_packages` and `lazy_libraries` name;
    whatever else they may import is imported inside functions.
    """

    knows: str
    packages: frozenset[str] = frozenset()
    libraries: frozenset[str] = frozenset()
    file_libraries: dict[str, frozenset[str]] = field(default_factory=dict)
    is_lazy: bool = False
    lazy_packages: frozenset[str] = frozenset()
    lazy_libraries: frozenset[str] = frozenset()


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


# In the order in which data flows: a package imports only packages above it.
RULES: dict[str, Rule] = {
    "core": Rule(
        knows="vocabulary: errors, configs, model and step specs, requests, batches",
        libraries=_set("pydantic"),
        file_libraries={
            "host_resources.py": _set("psutil"),
            "tcp.py": _set("psutil"),
            "dtype.py": _set("torch"),
            "array.py": _set("numpy"),
            "step_plan.py": _set("numpy"),
            "batch.py": _set("numpy"),
            "logit_rules.py": _set("numpy"),
            "logprobs.py": _set("numpy"),
        },
    ),
    "formats": Rule(
        knows="weight formats: their tensors, packing, dequantization", packages=_set("core"), libraries=_set("torch")
    ),
    "engine_dir": Rule(
        knows="the artifact on disk",
        packages=_set("formats core"),
        libraries=_set("pydantic safetensors"),
        file_libraries={
            "stored_tokenizer.py": _set("tokenizers"),
            "template_worker.py": _set("jinja2"),
            "tokenizer_dir.py": _set("transformers"),
        },
    ),
    "checkpoint": Rule(
        knows="foreign configs and tensors; proves a pair before any work",
        packages=_set("formats core"),
        libraries=_set("torch safetensors transformers"),
        file_libraries={"hub.py": _set("huggingface_hub")},
    ),
    "quantize": Rule(
        knows="which linear gets which format; calibration through ModelOpt",
        packages=_set("checkpoint formats core"),
        libraries=_set("torch"),
        file_libraries={"calibrate*.py": _set("modelopt transformers")},
    ),
    "kernels": Rule(
        knows="GPU kernels in the Triton language, and their launches",
        packages=_set("core"),
        libraries=_set("torch triton"),
    ),
    "network": Rule(
        knows="the ops protocol, the step, decoder and drafters, for any backend", packages=_set("formats core")
    ),
    "backends": Rule(
        knows="how each backend builds, opens and runs an engine",
        packages=_set("network kernels engine_dir formats core"),
        libraries=_set("torch numpy"),
        file_libraries={"torch/*.py": _set("safetensors"), "tensorrt/*.py": _set("tensorrt tensorrt_rtx safetensors")},
    ),
    "compile": Rule(
        knows="checkpoints to engine directory; asks the backends to build",
        packages=_set("backends network quantize checkpoint engine_dir formats core"),
        libraries=_set("torch tensorrt tensorrt_rtx"),
    ),
    "plan": Rule(
        knows="whether an engine fits a GPU, the floor of its step and what a step costs: arithmetic over configs",
        packages=_set("compile backends kernels checkpoint engine_dir formats core"),
        libraries=_set("numpy pydantic"),
        file_libraries={"rank_memory.py": _set("torch"), "kernel_tables.py": _set("numpy aiconfigurator_core")},
    ),
    "executor": Rule(
        knows="opens an engine, runs its steps; the processes of several ranks",
        packages=_set("backends network engine_dir core"),
        libraries=_set("torch numpy"),
        file_libraries={"ranks/messages.py": _set("psutil")},
    ),
    "scheduler": Rule(knows="which requests, which pages, which K", packages=_set("core"), libraries=_set("numpy")),
    "serving": Rule(
        knows="the engine loop, streams, text, LLM; TensorRT-LLM in its own process or server",
        packages=_set("scheduler executor engine_dir core"),
        file_libraries={
            "text.py": _set("transformers"),
            "grammar.py": _set("llguidance numpy"),
            "grammar_trial.py": _set("llguidance numpy"),
            "grammar_worker.py": _set("llguidance"),
            "nixl_blocks.py": _set("nixl_cu13"),
        },
    ),
    "servers": Rule(
        knows="what serves an engine to clients: Triton's Python model and its repository, Dynamo's worker",
        packages=_set("serving engine_dir core"),
        file_libraries={
            "triton/*.py": _set("numpy triton_python_backend_utils"),
            "dynamo/contract.py": _set("dynamo"),
            "dynamo/event_broker.py": _set("zmq"),
            "dynamo/gateway.py": _set("aiohttp"),
            "dynamo/metrics.py": _set("prometheus_client"),
        },
    ),
    "bench": Rule(
        knows="measurements",
        packages=_set("serving scheduler executor plan backends network formats engine_dir core"),
        libraries=_set("numpy"),
        file_libraries={
            "openai_client.py": _set("aiohttp"),
            "figure_file.py": _set("matplotlib"),
            "machine*.py": _set("torch"),
        },
    ),
    "simulation": Rule(
        knows="loads on an engine that is not here: the scheduler over steps that cost what a plan says",
        packages=_set("bench serving scheduler plan checkpoint engine_dir core"),
        libraries=_set("numpy pydantic"),
    ),
    "doctor": Rule(
        knows="versions, devices and what works on a machine",
        packages=_set("backends kernels core"),
        file_libraries={"probes.py": _set("torch modelopt")},
    ),
    "demo": Rule(knows="the trained demo pair, as data"),
    "recipes": Rule(
        knows="build configurations of known pairs, as data", packages=_set("core"), libraries=_set("pydantic")
    ),
    "cli": Rule(
        knows="commands",
        packages=_set(
            "core formats engine_dir checkpoint quantize kernels network backends compile plan executor scheduler "
            "serving servers bench simulation doctor demo recipes"
        ),
        libraries=_set("click rich yaml pydantic"),
        file_libraries={"data_sets.py": _set("pyarrow")},
        is_lazy=True,
        lazy_packages=_set("core demo"),
        lazy_libraries=_set("click pydantic"),
    ),
}
# The package itself: `import dflash_trt` is lazy.
ROOT_RULE = Rule(knows="the public API", packages=_set("core serving"), is_lazy=True)


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
    rule = ROOT_RULE if parts == ("__init__",) else RULES.get(name)
    if rule is None:
        yield Violation(path=shown, line=1, message="stands in no package of the table")
        return
    for imported in _imports(ast.parse(path.read_text(), filename=str(path))):
        if message := _problem(imported, rule, name=name, path=path.relative_to(package / name).as_posix()):
            yield Violation(path=shown, line=imported.line, message=message)


def _problem(imported: _Import, rule: Rule, *, name: str, path: str) -> str | None:
    """Why this import is forbidden; None when it is not."""
    parts = imported.module.split(".")
    title = name if name else "dflash_trt"
    if parts[0] == PACKAGE:
        other = parts[1] if len(parts) > 1 else ""
        if other in ("", name):
            return None
        if other not in rule.packages:
            return f"{title} may import {_listed(rule.packages)}, not {PACKAGE}.{other}"
        if rule.is_lazy and imported.is_at_import_time and other not in rule.lazy_packages:
            return f"{title} imports {PACKAGE}.{other} at module level: import it inside the function that needs it"
        return None
    if parts[0] in sys.stdlib_module_names:
        return None
    libraries = rule.libraries.union(*(more for pattern, more in rule.file_libraries.items() if fnmatch(path, pattern)))
    if parts[0] not in libraries:
        return f"{title} may import {_listed(libraries)} from outside, not {parts[0]} (in a file of this name)"
    if rule.is_lazy and imported.is_at_import_time and parts[0] not in rule.lazy_libraries:
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
    """`from dflash_trt import x` may name a package; everything else names its module."""
    assert node.module is not None and node.level == 0, "ruff refuses relative imports"
    modules = [node.module]
    if node.module == PACKAGE:
        modules = [f"{PACKAGE}.{alias.name}" for alias in node.names if alias.name in RULES] or [PACKAGE]
    for module in modules:
        yield _Import(module=module, line=node.lineno, is_at_import_time=is_at_import_time)


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def markdown() -> str:
    """The rules as the table of CONTRIBUTING.md."""
    rows = ["| package | knows | imports of ours | third-party imports |", "|---|---|---|---|"]
    for name, rule in RULES.items():
        ours = "any" if rule.packages == frozenset(RULES) - {name} else " ".join(sorted(rule.packages)) or "-"
        libraries = [" ".join(sorted(rule.libraries))] if rule.libraries else []
        libraries += [f"`{pattern}`: {' '.join(sorted(names))}" for pattern, names in rule.file_libraries.items()]
        rows.append(f"| `{name}/` | {rule.knows} | {ours} | {'; '.join(libraries) or '-'} |")
    return "\n".join(rows)


def main() -> int:
    if sys.argv[1:] == ["--markdown"]:
        print(markdown())
        return 0
    found = violations(ROOT / PACKAGE)
    for violation in found:
        print(violation)
    print(f"import rules: {len(found)} forbidden imports" if found else "import rules: all imports allowed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
