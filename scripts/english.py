"""Counts phrases that the house style avoids, in docstrings, comments and messages, per package; -v lists each."""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parents[1] / "dflash_trt"
MAX_FIRST_LINE: Final = 100
PATTERNS: Final = {
    "opens with Of": r"(?:^[Oo]f|[.:;] Of) (?!course)",
    "opens with What": r"^(?i:What|Whether|Whoever|Who|Where)\b",
    "behind": r"\bbehind\b",
    "so many": r"\bso many\b",
    "those of": r"\b(?:those|that) of\b",
    "None: ...": r"\bNone`?(?: \([^)]*\))?: ",
    "nobody": r"\b(?:nobody|whoever|somebody)\b",
    "beside": r"\bbeside\b",
    "once more": r"\bwhich see\b|\bonce more\b",
}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Each block of comment lines, and each comment after code."""
    first, last, words = 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text, is_own_line = token.start[0], token.string.lstrip("# "), not token.line[: token.start[1]].strip()
        if line == last + 1 and is_own_line:
            words, last = f"{words} {text}", line
            continue
        yield first, words
        first, last, words = line, line if is_own_line else 0, text
    yield first, words


def messages(tree: ast.AST, docstring_lines: set[int]) -> Iterator[tuple[int, str]]:
    """String constants of several words: help, errors and logs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.lineno not in docstring_lines:
            yield from [(node.lineno, node.value)] * (" " in node.value)


def findings(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, name of the pattern and text of each phrase."""
    tree = ast.parse(source)
    docs = list(docstrings(tree))
    for line, text in docs + list(comments(source)) + list(messages(tree, {line for line, _ in docs})):
        words = " ".join(text.split())
        yield from ((line, name, words) for name, pattern in PATTERNS.items() if re.search(pattern, words))
    yield from ((line, "long first line", text) for line, text in docs if len(text.splitlines()[0]) > MAX_FIRST_LINE)


def main() -> None:
    counts: dict[str, Counter[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, name, text in sorted(findings(path.read_text())):
            counts.setdefault(path.relative_to(PACKAGE).parts[0], Counter())[name] += 1
            if "-v" in sys.argv[1:]:
                print(f"{path.relative_to(PACKAGE.parent)}:{line} {name}: {text[:100]}")
    for area, found in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        print(f"{area:12} {found.total():4}  " + ", ".join(f"{name} {found[name]}" for name in sorted(found)))


if __name__ == "__main__":
    main()
