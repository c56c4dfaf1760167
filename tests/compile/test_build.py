import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.compile.build import BuildProgress, build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.mapping import Mapping
from dflash_trt.engine_dir import EngineDir
from tests.factories import make_target, make_zlab_drafter


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("checkpoints")
    make_zlab_drafter(base / "drafter", target_dir=make_target(base / "target", max_shard_size="100KB"))
    return base


def _build(base_dir: Path, output: Path, reports: list[BuildProgress] | None = None, **fields: Any) -> EngineDir:
    progress = [].append if reports is None else reports.append
    config = BuildConfig(target="target", drafter="drafter", **({"dtype": "float32"} | fields))
    return build_engine(config, output, base_dir=base_dir, overwrite=False, command=("build",), progress=progress)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_holds_exactly_the_pairs_canonical_tensors(base_dir: Path, tmp_path: Path, dtype: str) -> None:
    engine = _build(base_dir, tmp_path / "engine", dtype=dtype)
    pair = open_pair(base_dir / "target", base_dir / "drafter")
    stored = load_file(engine.weights_path(0))
    expected = dict(pair.iter_weights(dtype=getattr(torch, dtype), mapping=Mapping()))
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor), name


def test_provenance_holds_the_hash_of_every_input_file(base_dir: Path, tmp_path: Path) -> None:
    inputs = _build(base_dir, tmp_path / "engine").provenance()["inputs"]
    checkpoint_files = {path for path in base_dir.rglob("*") if path.is_file()}
    assert set(inputs) == {str(path) for path in checkpoint_files}
    for path in checkpoint_files:
        assert inputs[str(path)]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert inputs[str(path)]["size_bytes"] == path.stat().st_size


def test_provenance_says_versions_and_time(base_dir: Path, tmp_path: Path) -> None:
    provenance = _build(base_dir, tmp_path / "engine").provenance()
    assert provenance["versions"]["torch"] == torch.__version__
    assert provenance["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert 0 < provenance["build_time_s"] < 60
    assert provenance["config"]["max_seq_len"] is None


def test_progress_goes_through_the_stages_and_ends_complete(base_dir: Path, tmp_path: Path) -> None:
    reports: list[BuildProgress] = []
    engine = _build(base_dir, tmp_path / "engine", reports)
    assert list(dict.fromkeys(report.stage for report in reports)) == [
        "checking",
        "hashing inputs",
        "writing weights",
        "verifying",
    ]
    for stage in ("hashing inputs", "writing weights"):
        done = [report.done_bytes for report in reports if report.stage == stage]
        assert done == sorted(done)
        assert done[-1] == next(report.total_bytes for report in reports if report.stage == stage) > 0
    assert sum(tensor.nbytes for tensor in load_file(engine.weights_path(0)).values()) == done[-1]


def test_two_builds_of_one_pair_have_the_same_weights(base_dir: Path, tmp_path: Path) -> None:
    files = [_build(base_dir, tmp_path / name).manifest.files["rank0.safetensors"] for name in ("a", "b")]
    assert files[0] == files[1]
