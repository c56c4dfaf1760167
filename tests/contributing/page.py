"""CONTRIBUTING.md as its tests use it: the recipes, and the code blocks that make them."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()

_COPIED = ("dflash_trt/", "plugins/", "software_gpu/", "tests/", "pyproject.toml")
_BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """A section of the page: `files` are whole new ones by path, `patch` the diffs of those that there are."""

    heading: str
    files: dict[str, str]
    patch: str

    @property
    def changed_files(self) -> list[str]:
        return re.findall(r"^\+\+\+ b/(\S+)$", self.patch, flags=re.MULTILINE)


def recipe(words: str) -> Recipe:
    """The one whose heading begins so."""
    sections = [section for section in PAGE.split("\n## ") if section.startswith(words)]
    assert len(sections) == 1, f"CONTRIBUTING.md: {len(sections)} recipes begin with '{words}'"
    blocks = _BLOCK.findall(sections[0])
    return Recipe(
        heading=sections[0].split("\n")[0],
        files={path: text for _, path, text in blocks if path},
        patch="".join(text for language, _, text in blocks if language == "diff"),
    )


def apply(recipe: Recipe, directory: Path) -> None:
    """To a copy of the tracked sources and tests in `directory`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if name.startswith(_COPIED) and (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)
    add(recipe, directory)


def add(recipe: Recipe, directory: Path) -> None:
    """To a tree, which may have other recipes."""
    for name, text in recipe.files.items():
        assert not (directory / name).exists(), f"{name} is there already"
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    if recipe.patch:
        command = ["git", "apply", "-C1", "-"]
        done = subprocess.run(command, cwd=directory, input=recipe.patch, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"'{recipe.heading}' of CONTRIBUTING.md does not apply:\n{done.stderr}"
