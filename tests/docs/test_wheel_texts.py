"""Texts for users name nothing that only a checkout has: a wheel holds the package alone."""

import ast
import re
from collections.abc import Iterator

from tests.docs.pages import ROOT

PACKAGE = ROOT / "dflash_trt"
_OF_CHECKOUT = re.compile(r"(?<![\w./-])(docs|scripts|build_configs|tests|plugins)/")


def texts(source: str) -> Iterator[str]:
    """String constants but docstrings; those of commands, which --help prints, included."""
    tree = ast.parse(source)
    hidden = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_command = any("command" in ast.dump(each) or "group" in ast.dump(each) for each in _decorators(node))
            if node.body and isinstance(node.body[0], ast.Expr) and not is_command:
                hidden.add(node.body[0].value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in hidden:
            yield node.value


def _decorators(node: ast.AST) -> list[ast.expr]:
    return list(getattr(node, "decorator_list", []))


def problems(source: str) -> list[str]:
    return [text for text in texts(source) if _OF_CHECKOUT.search(text) and "source checkout" not in text]


def test_no_message_or_help_text_names_a_file_of_the_checkout() -> None:
    found = {str(path.relative_to(PACKAGE)): problems(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_a_text_that_names_one_is_noticed() -> None:
    assert problems('hint = "See docs/tensorrt.md."') == ["See docs/tensorrt.md."]
    assert problems('@click.command()\ndef run():\n    """See docs/x.md."""') == ["See docs/x.md."]
    assert problems('def f():\n    """See docs/x.md."""\n    return "scripts/x of a source checkout"') == []
