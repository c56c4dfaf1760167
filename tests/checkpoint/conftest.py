"""Tiny checkpoints, made once; tests that change files take a copy."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.factories import make_speculators_drafter, make_target, make_zlab_drafter


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="package")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories `qwen3`, `llama`, `sharded`, `zlab` and `speculators`; not to be changed."""
    root = tmp_path_factory.mktemp("checkpoints")
    target = make_target(root / "qwen3")
    make_target(root / "llama", family="llama", attention_bias=True, mlp_bias=True)
    make_target(root / "sharded", max_shard_size="100KB")
    make_zlab_drafter(root / "zlab", target_dir=target)
    make_speculators_drafter(root / "speculators", target_dir=target)
    return root


@pytest.fixture
def copy_of(checkpoints: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of the checkpoints, free to be changed."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(checkpoints / name, tmp_path / name))

    return copy
