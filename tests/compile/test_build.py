import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.compile.build import BuildProgress, build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.quantization import QuantizationConfig
from dflash_trt.core.weight_spec import segments_of
from dflash_trt.engine_dir import EngineDir
from tests.checkpoint.joining import join, ranks
from tests.factories import make_target, make_zlab_drafter


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("checkpoints")
    make_zlab_drafter(base / "drafter", target_dir=make_target(base / "target", max_shard_size="100KB"))
    return base


def _build(base_dir: Path, output: Path, reports: list[BuildProgress] | None = None, **fields: Any) -> EngineDir:
    progress = [].append if reports is None else reports.append
    config = BuildConfig(**({"target": "target", "drafter": "drafter", "dtype": "float32"} | fields))
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


def test_an_engine_of_two_ranks_holds_each_ranks_share(base_dir: Path, tmp_path: Path) -> None:
    engine = _build(base_dir, tmp_path / "engine", tp_size=2)
    assert engine.manifest.pretrained_config.mapping == Mapping(world_size=2, tp_size=2)
    pair = open_pair(base_dir / "target", base_dir / "drafter")
    for mapping in ranks(2):
        stored = load_file(engine.weights_path(mapping.rank))
        expected = dict(pair.iter_weights(dtype=torch.float32, mapping=mapping))
        assert list(stored) and stored.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(stored[name], tensor), name


@pytest.mark.parametrize("tp_size", [2, 4])
def test_the_quantized_shares_of_ranks_are_those_of_the_quantized_whole(tp_size: int, tmp_path: Path) -> None:
    """The same codes and scales: what a format rounds does not depend on the number of ranks, nor on copied heads."""
    target = make_target(tmp_path / "target", intermediate_size=128)
    make_zlab_drafter(tmp_path / "drafter", target_dir=target)
    quantization = QuantizationConfig(
        target="nvfp4_w4a16", drafter="none", lm_head="nvfp4_w4a16", draft_lm_head="nvfp4_w4a16"
    )
    whole = _build(tmp_path, tmp_path / "whole", quantization=quantization)
    cut = _build(tmp_path, tmp_path / "cut", quantization=quantization, tp_size=tp_size)
    config = whole.manifest.pretrained_config
    table = engine_weights(config.target, config.draft, config.quantization)
    expected = load_file(whole.weights_path(0))
    shares = [load_file(cut.weights_path(rank)) for rank in range(tp_size)]
    assert all(share.keys() == expected.keys() for share in shares)
    for name, tensor in expected.items():
        spec = table[name.removesuffix(".block_scale").removesuffix(".weight_scale")]
        sharding = spec.sharding if tensor.dim() == len(spec.shape) else "replicated"
        spec = replace(spec, shape=tuple(tensor.shape), sharding=sharding, segments=segments_of(spec))
        pieces = [share[name].view(torch.uint8) if tensor.itemsize == 1 else share[name] for share in shares]
        assert torch.equal(join(pieces, spec), tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor), name


def test_a_number_of_ranks_that_does_not_divide_is_refused_before_any_work(base_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a divisor of target num_heads 4, found 8"):
        _build(base_dir, tmp_path / "engine", tp_size=8)
    assert not (tmp_path / "engine").exists()


def test_blocks_that_ranks_would_share_are_refused_by_name(base_dir: Path, tmp_path: Path) -> None:
    """40 of the drafter's 80 columns are two and a half blocks."""
    with pytest.raises(ConfigError, match=r"draft.layers.0.down: expected input features per rank in blocks of 16"):
        _build(base_dir, tmp_path / "engine", tp_size=2, quantization=QuantizationConfig(drafter="nvfp4_w4a16"))


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


def test_a_missing_compiler_and_a_missing_checkpoint_come_in_one_error(base_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        _build(base_dir, tmp_path / "engine", backend="tensorrt", target="nowhere")
    message = str(error.value)
    assert message.startswith("build: 2 checks failed\n  - tensorrt: expected an importable Python package")
    assert "nowhere: expected a checkpoint directory" in message


def test_everything_that_is_wrong_with_a_proven_pair_comes_in_one_error(base_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        _build(base_dir, tmp_path / "engine", tp_size=3, max_seq_len=10**6, quantization={"target": "fp5"})
    message = str(error.value)
    assert message.startswith("build: 3 checks failed\n  - tensor parallelism: ")
    assert "\n  - build limits: max_seq_len: expected at most" in message
    assert "\n  - quantization: " in message and "fp5" in message
    assert not (tmp_path / "engine").exists()


def test_one_wrong_thing_is_an_error_as_it_is(base_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^build limits: max_draft_len: expected at most"):
        _build(base_dir, tmp_path / "engine", max_draft_len=99)
