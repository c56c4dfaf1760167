import sys
from collections.abc import Callable, Iterator
from functools import _lru_cache_wrapper
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.contributing.page import Recipe

AddModule = Callable[[Recipe, ModuleType, "_lru_cache_wrapper[Any]"], None]


@pytest.fixture
def add_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AddModule]:
    """Put the one file of a recipe into a package that finds its modules, whose `found` is their cache."""
    undo: list[Callable[[], None]] = []

    def add(recipe: Recipe, package: ModuleType, found: "_lru_cache_wrapper[Any]") -> None:
        ((path, text),) = recipe.files.items()
        name = Path(path).stem
        assert f"{package.__name__.replace('.', '/')}/{name}.py" == path
        directory = tmp_path / "added"
        directory.mkdir()
        (directory / f"{name}.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(directory)])
        found.cache_clear()
        undo.append(found.cache_clear)
        undo.append(lambda: sys.modules.pop(f"{package.__name__}.{name}", None) and delattr(package, name))

    yield add
    monkeypatch.undo()
    for step in undo:
        step()
