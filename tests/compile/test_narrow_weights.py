"""A float32 engine of a 16-bit checkpoint stores its matrices in 16 bits, and computes what it computed before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.backends.torch.loading import load_network
from dflash_trt.backends.torch.native.library import NoKernels
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.compile import build
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir, PretrainedConfig
from dflash_trt.engine_dir.manifest import rank_weight_bytes
from tests.factories import make_target, make_zlab_drafter


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    dtype = getattr(torch, getattr(request, "param", "bfloat16"))
    target = make_target(tmp_path / "target", dtype=dtype, tokenizer=False)
    make_zlab_drafter(tmp_path / "drafter", target_dir=target, dtype=dtype)
    return tmp_path


def built(pair: Path, name: str = "engine", **fields: Any) -> EngineDir:
    config = BuildConfig(**({"target": "target", "drafter": "drafter", "dtype": "float32"} | fields))
    return build_engine(
        config, pair / name, base_dir=pair, overwrite=False, command=("build",), progress=lambda progress: None
    )


def dtypes(engine: EngineDir) -> dict[str, set[torch.dtype]]:
    config, stored = engine.manifest.pretrained_config, load_file(engine.weights_path(0))
    table = engine_weights(config.target, config.draft, config.quantization)
    is_vector = {name: tensor.dim() == 1 for name, tensor in stored.items() if name in table}
    return {
        "vectors": {stored[name].dtype for name, vector in is_vector.items() if vector},
        "matrices": {stored[name].dtype for name, vector in is_vector.items() if not vector},
    }


@pytest.mark.parametrize("pair", ["bfloat16", "float16"], indirect=True)
def test_the_matrices_of_a_16_bit_pair_stay_as_they_are(pair: Path) -> None:
    engine = built(pair)
    narrow = engine.manifest.pretrained_config.weights_dtype
    assert narrow is not None
    assert dtypes(engine) == {"vectors": {torch.float32}, "matrices": {getattr(torch, narrow)}}
    stored = load_file(engine.weights_path(0))
    for name, tensor in open_pair(pair / "target", pair / "drafter").iter_weights(
        dtype=torch.float32, mapping=Mapping()
    ):
        assert torch.equal(stored[name].float(), tensor), name
    by_dtype = rank_weight_bytes(engine.manifest.pretrained_config)
    for model in ("target", "draft"):
        assert by_dtype[model].keys() == {narrow, "float32"}
        assert by_dtype[model][narrow] > 10 * by_dtype[model]["float32"]


@pytest.mark.parametrize("pair", ["float32"], indirect=True)
def test_a_float32_pair_stays_float32(pair: Path) -> None:
    engine = built(pair)
    assert engine.manifest.pretrained_config.weights_dtype is None
    assert dtypes(engine)["matrices"] == {torch.float32}


def test_one_weight_of_more_bits_keeps_all_in_float32(pair: Path) -> None:
    path = pair / "target" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.3.mlp.down_proj.weight"
    tensors[name] = tensors[name].float()
    tensors[name][-1, -1] = 1 + 2.0**-20
    save_file(tensors, path, {"format": "pt"})
    assert built(pair).manifest.pretrained_config.weights_dtype is None


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"dtype": "float32", "compile_for": ("sm_90a",)}], ids=str)
def test_other_engines_have_their_own_dtype(pair: Path, fields: dict[str, Any]) -> None:
    assert not build._stores_narrow_weights(BuildConfig(target="target", **fields))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_the_logits_are_those_of_an_engine_that_stores_float32(
    pair: Path, monkeypatch: pytest.MonkeyPatch, has_kernels: bool
) -> None:
    if not has_kernels:
        monkeypatch.setattr("dflash_trt.backends.torch.executor.cpu_kernels", lambda: NoKernels("left out"))
    narrow = built(pair)
    monkeypatch.setattr(build, "exact_weights_dtype", lambda pair: None)
    wide = built(pair, "wide")
    assert narrow.weights_path(0).stat().st_size < 0.6 * wide.weights_path(0).stat().st_size
    logits = [
        TorchExecutor.open(engine, RuntimeConfig(device="cpu", kv_cache_bytes=1 << 24)).target_logits(range(3, 40))
        for engine in (narrow, wide)
    ]
    assert torch.equal(*logits)
    assert logits[0].dtype == torch.float32


def test_every_weight_is_widened_where_the_reader_wants_it(pair: Path) -> None:
    network = load_network(built(pair))
    layer = network.target_weights.layers[0]
    assert network.target_weights.embedding.dtype == torch.float32
    assert {linear.weight.dtype for linear in (*layer.mixer.projections, layer.mixer.o)} == {torch.float32}


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16", "weights_dtype": "float16"}, {"weights_dtype": "float32"}])
def test_a_manifest_with_another_weights_dtype_is_refused(pair: Path, fields: dict[str, Any]) -> None:
    target = built(pair).manifest.target
    with pytest.raises(ValidationError, match="a weights_dtype of 16 bits in an engine of float32"):
        PretrainedConfig(**({"target": target, "dtype": "float32"} | fields))
