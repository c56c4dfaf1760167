"""The site builds without a warning, and holds every page and the references; Containerfile passes hadolint."""

import html
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dflash_trt.cli.main import cli
from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("material", "mkdocs_click", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: scripts/test installs it")
    directory = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return directory


def text_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_every_page_is_in_the_navigation(site: Path) -> None:
    pages = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")} - {"index"}
    assert {str(path.parent.relative_to(site)) for path in site.rglob("index.html")} == pages | {"."}
    listed = re.findall(r"([\w/]+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(pages | {"index"})


def test_the_reference_has_every_command_with_its_options(site: Path) -> None:
    text = text_of(site / "cli" / "index.html")
    missing = [
        option
        for command in cli.commands.values()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and option not in text
    ]
    assert missing == [] and all(f"dflash-trt {name}" in text or f"{name}¶" in text for name in cli.commands)


def test_no_page_shows_what_only_a_machine_reads(site: Path) -> None:
    """Defaults that are not there, objects without a text, paths of this checkout."""
    words = re.compile(rf"Sentinel|UNSET|<function|<object|object at 0x|{re.escape(str(ROOT))}")
    found = {str(page.relative_to(site)): words.findall(text_of(page)) for page in site.rglob("index.html")}
    assert "cli/index.html" in found and {page: texts for page, texts in found.items() if texts} == {}


def test_the_reference_of_python_has_what_users_call(site: Path) -> None:
    text = text_of(site / "python" / "index.html")
    for name in ("generate", "stream", "submit", "statistics"):
        assert re.search(rf"\b{name}\b", text), name


def test_no_link_of_the_site_leaves_it_for_a_file_of_the_repository(site: Path) -> None:
    found = [
        link
        for page in site.rglob("index.html")
        for link in re.findall(r'href="(?!https://)([^"]*\.md[^"]*)"', page.read_text())
    ]
    assert found == []


def test_the_containerfile_passes_its_linter() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed: scripts/test installs it")
    done = subprocess.run([linter, "Containerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_containerfile_copies_what_is_there_and_installs_the_locked_pytorch() -> None:
    lines = (ROOT / "Containerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    (torch,) = re.findall(r"^TORCH=(\S+)$", (ROOT / "scripts" / "torch_build").read_text(), re.MULTILINE)
    assert any(f" {torch} " in f"{line} " for line in lines)


def test_a_design_page_begins_with_a_figure_that_is_in_the_site(site: Path) -> None:
    pages = sorted((ROOT / "docs" / "design").glob("*.md"))
    assert len(pages) == 9
    for page in pages:
        _, figure = page.read_text().split("\n\n")[:2]
        (name,) = re.findall(r"^!\[[^\]]+\]\(\.\./(figures/design/\w+\.svg)\)$", figure)
        assert (site / name).is_file(), name
        ElementTree.parse(site / name)
