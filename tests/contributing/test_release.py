"""scripts/release in a repository of its own, whose checks are played: all of them run first, then version and tag."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = ("check", "test", "check_wheel")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "dflash_trt").mkdir()
    shutil.copy2(ROOT / "scripts/release", tmp_path / "scripts/release")
    for name in CHECKS:
        script = tmp_path / "scripts" / name
        script.write_text(f"#!/bin/sh\necho {name} >> .git/ran\n")
        script.chmod(0o755)
    (tmp_path / "dflash_trt/__init__.py").write_text('"""A package."""\n\n__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(repository: Path, *words: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    return subprocess.run(
        ["git", *author, *words], cwd=repository, capture_output=True, text=True, check=True
    ).stdout.strip()


def commit(repository: Path) -> None:
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "one")


def release(repository: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    author = {f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return subprocess.run(
        ["scripts/release", *words],
        cwd=repository,
        env={"PATH": "/usr/bin:/bin"} | author | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_release_is_checked_dated_and_tagged(repository: Path) -> None:
    done = release(repository, "0.2.0")
    assert done.returncode == 0, done.stderr
    assert (repository / ".git/ran").read_text().split() == list(CHECKS)
    assert '__version__ = "0.2.0"' in (repository / "dflash_trt/__init__.py").read_text()
    day = git(repository, "log", "-1", "--date=format:%F", "--format=%cd")
    assert f"## Unreleased\n\n## 0.2.0 - {day}\n\n### Added" in (repository / "CHANGELOG.md").read_text()
    assert git(repository, "rev-parse", "v0.2.0^{commit}") == git(repository, "rev-parse", "HEAD")
    again = release(repository, "0.2.0")
    assert (again.returncode, again.stderr) == (1, "error: v0.2.0 is tagged already.\n")


@pytest.mark.parametrize("version", ["", "0.2", "v0.2.0"])
def test_another_form_of_version_is_refused(repository: Path, version: str) -> None:
    refused = release(repository, version)
    assert refused.returncode == 2 and "expected a version such as 0.2.0" in refused.stderr


def test_a_change_that_is_not_committed_or_a_check_that_fails_stops_it(repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text("## Unreleased\n")
    assert "has changes" in release(repository, "0.2.0").stderr
    (repository / "scripts/test").write_text("#!/bin/sh\nexit 3\n")
    commit(repository)
    before = git(repository, "rev-parse", "HEAD")
    assert release(repository, "0.2.0").returncode == 3
    assert (git(repository, "rev-parse", "HEAD"), git(repository, "tag")) == (before, "")
