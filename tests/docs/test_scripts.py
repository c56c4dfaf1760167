"""Scripts that are run as files find what they import: a file has its own folder on the path, and not the checkout."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

OF_THE_CHECKOUT = {"scripts", "plugins", "tests"}
_RUN_AS_FILE = re.compile(r"\bscripts/[a-z_/]+\.py\b")


def run_as_files() -> Iterator[Path]:
    """Those that may be executed, that a shell script names, and that the documentation runs."""
    files = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and os.access(path, os.X_OK)]
    yield from (path for path in files if path.suffix == ".py")
    texts = [path.read_text() for path in files if not path.suffix]
    texts += [command.text for page in PAGES for command in page.commands]
    yield from (ROOT / name for text in texts for line in text.splitlines() for name in _named(line))


def _named(line: str) -> list[str]:
    return [] if line.lstrip().startswith("#") else _RUN_AS_FILE.findall(line)


def imported(source: str) -> set[str]:
    """Names of the packages that it imports, anywhere; those of a source that makes its own path do not count."""
    if "sys.path[" in source:
        return set()
    nodes = list(ast.walk(ast.parse(source)))
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize("path", sorted(set(run_as_files())), ids=lambda path: path.name)
def test_a_script_that_is_run_as_a_file_imports_nothing_of_the_checkout(path: Path) -> None:
    assert imported(path.read_text()) & OF_THE_CHECKOUT == set()


def test_an_import_is_seen_wherever_it_stands() -> None:
    assert imported("def f():\n    from scripts.train_demo import prompts\n") == {"scripts"}
    assert {path.name for path in run_as_files()} >= {"sampled_acceptance.py", "gpu_visit.py"}
