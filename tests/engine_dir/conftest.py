"""Tiny checkpoints, and one engine that every test of this room reads or damages a copy of."""

import shutil
from pathlib import Path

import pytest

from tests.engine_dir.building import build
from tests.factories import make_speculators_drafter, make_target, make_zlab_drafter


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("checkpoints")
    target = make_target(base / "target")
    make_zlab_drafter(base / "drafter", target_dir=target)
    make_speculators_drafter(base / "speculator", target_dir=target)
    make_target(base / "untokenized", tokenizer=False)
    return base


@pytest.fixture(scope="session")
def built(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("engines") / "engine"
    return build(checkpoints, output, drafter="drafter").path


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(built, tmp_path / "engine")
