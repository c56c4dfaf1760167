"""Counts of the package: files, lines, and the lengths of functions."""

import ast
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]


def function_lengths(package: Path) -> dict[str, int]:
    """Lines of each function, decorators not counted, by file and name; GPU kernels are left out."""
    lengths = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node):
                assert node.end_lineno is not None
                name = f"{path.relative_to(package).as_posix()}:{node.lineno} {node.name}"
                lengths[name] = node.end_lineno - node.lineno + 1
    return lengths


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def main() -> int:
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dflash_trt"
    files = {path: len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    lengths = function_lengths(package)
    longest, longest_file = max(lengths, key=lengths.__getitem__), max(files, key=files.__getitem__)
    print(f"files {len(files)}, lines {sum(files.values())}, longest {files[longest_file]} ({longest_file.name})")
    print(f"functions {len(lengths)}, median {median(lengths.values()):g}, longest {lengths[longest]} ({longest})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
