"""A tiny pair and ModelOpt's own exports of it, made once."""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.factories import make_target, make_zlab_drafter

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Exports:
    """`directory` holds target-fp8, drafter-nvfp4, ...: what `modelopt_export` made of the three checkpoints."""

    target: Path
    drafter: Path
    experts: Path
    directory: Path


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """float32 target and drafter."""
    directory = tmp_path_factory.mktemp("pair")
    target = make_target(directory / "target")
    return target, make_zlab_drafter(directory / "drafter", target_dir=target)


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def dtype_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def exports(dtype_name: str, tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """In both dtypes: ModelOpt divides in the dtype of the weights."""
    import torch

    for package in ("modelopt", "dflash"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: scripts/test installs it")
    directory = tmp_path_factory.mktemp(f"exports-{dtype_name}")
    dtype = getattr(torch, dtype_name)
    target = make_target(directory / "target", dtype=dtype)
    drafter = make_zlab_drafter(directory / "drafter", target_dir=target, dtype=dtype)
    experts = make_target(directory / "experts", family="qwen3_moe", dtype=dtype)
    words = [sys.executable, "-m", "tests.quantize.modelopt_export", target, drafter, experts, directory]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return Exports(target=target, drafter=drafter, experts=experts, directory=directory)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds a calibration of another one, or of the person who runs it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
