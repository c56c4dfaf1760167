"""Chat template options in a drafter's model card (README.md), from its Python examples.

Prose is not read, and nothing is run: code blocks are parsed, and literals of two forms are used,
`apply_chat_template(..., enable_thinking=False)` and `{"chat_template_kwargs": {"enable_thinking": False}}`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_trt.core.chat_template_options import RESERVED_NAMES

CARD_NAME = "README.md"
_MAX_BYTES = 256 * 2**10
_BLOCK = re.compile(r"^```(?:python|py)\s*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL | re.IGNORECASE)
_INPUTS = RESERVED_NAMES | {"tools", "documents"}


def card_options(directory: Path) -> dict[str, Any]:
    """Options on which all examples of the card agree; empty without a card that can be read."""
    try:
        with (directory / CARD_NAME).open("rb") as stream:
            text = stream.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return {}
    found: dict[str, list[Any]] = {}
    for block in _BLOCK.findall(text):
        for name, value in _options(block):
            found.setdefault(name, []).append(value)
    return {name: values[0] for name, values in found.items() if all(value == values[0] for value in values)}


def _options(code: str) -> Iterator[tuple[str, Any]]:
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # an excerpt, or no Python
        return
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "apply_chat_template":
                yield from _literals((keyword.arg, keyword.value) for keyword in node.keywords)
        elif isinstance(node, ast.Dict):
            for key, value in _literal_keys(node):
                if key == "chat_template_kwargs" and isinstance(value, ast.Dict):
                    yield from _literals(_literal_keys(value))


def _literal_keys(node: ast.Dict) -> Iterator[tuple[str | None, ast.expr]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, value


def _literals(pairs: Iterator[tuple[str | None, ast.expr]]) -> Iterator[tuple[str, Any]]:
    for name, value in pairs:
        literal = value.value if isinstance(value, ast.Constant) else None
        if name is not None and name not in _INPUTS and isinstance(literal, bool | str):
            yield name, literal
