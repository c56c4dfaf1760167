"""The recipe of a weight format, done: its file, an engine of the public build, and what each back end says."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt import formats
from dflash_trt.backends.base import backend_of
from dflash_trt.core.errors import BuildError, ConfigError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.quantization import QuantizationConfig, QuantizationSpec
from dflash_trt.formats.registry import weight_formats
from tests.checkpoint.refusals import read_target_spec
from tests.contributing.conftest import AddModule
from tests.contributing.engines import build, generate
from tests.contributing.page import recipe
from tests.factories import make_target

RECIPE = recipe("A weight format")
PROMPT = list(range(5, 25))
NUM_NEW = 16
# The scales multiply the products here, the weights there: measured 2.9e-6, and 0.010 with one row 10 % smaller.
TOLERANCE = 2e-5

LINEARS = QuantizationSpec(linears={"target.layers.0.qkv": "int8_w8a16", "target.layers.1.qkv": "int8_w8a16"})


@pytest.fixture
def int8_w8a16(add_module: AddModule) -> None:
    add_module(RECIPE, formats, weight_formats)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("checkpoint") / "target", num_hidden_layers=2)


def write_dequantized(target: Path, output: Path, *, factor: float = 1.0) -> Path:
    """The checkpoint with its linears rounded as the format says, written down once more; `factor` is of one row."""
    output.mkdir()
    for file in target.iterdir():
        (output / file.name).write_bytes(file.read_bytes())
    tensors = load_file(target / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            tensors[name] = torch.round(weight / scale) * scale
    tensors["model.layers.1.mlp.up_proj.weight"][3] *= factor
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    return output


def test_the_recipe_is_one_file() -> None:
    assert list(RECIPE.files) == ["dflash_trt/formats/int8_w8a16.py"]
    assert "1 file" in RECIPE.heading and not RECIPE.patch


def test_without_the_file_the_format_is_refused_by_name(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"format of target: expected none, fp8, .*, found int8_w8a16"):
        build(target, tmp_path / "engine", quantization=QuantizationConfig(target="int8_w8a16"))


@pytest.mark.usefixtures("int8_w8a16")
def test_an_engine_in_the_format_gives_the_logits_of_its_dequantized_weights(target: Path, tmp_path: Path) -> None:
    engine = build(target, tmp_path / "engine", quantization=QuantizationConfig(target="int8_w8a16"))
    stored = load_file(engine.weights_path(0))
    assert stored["target.layers.0.qkv"].dtype == torch.int8
    tokens, logprobs = generate(engine, PROMPT, NUM_NEW)
    expected_tokens, expected = generate(
        build(write_dequantized(target, tmp_path / "same"), tmp_path / "plain"), PROMPT, NUM_NEW
    )
    assert tokens == expected_tokens
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
    _, other = generate(
        build(write_dequantized(target, tmp_path / "other", factor=0.9), tmp_path / "control"), PROMPT, NUM_NEW
    )
    assert float((logprobs - other).abs().max()) > 100 * TOLERANCE


@pytest.mark.usefixtures("int8_w8a16")
def test_two_ranks_hold_the_two_halves_of_a_weight_and_of_its_scales(target: Path, tmp_path: Path) -> None:
    quantization = QuantizationConfig(target="int8_w8a16")
    whole = load_file(build(target, tmp_path / "one", quantization=quantization).weights_path(0))
    engine = build(target, tmp_path / "two", quantization=quantization, tp_size=2)
    ranks = [load_file(engine.weights_path(rank)) for rank in range(2)]
    down, gate_up = "target.layers.0.down", "target.layers.0.gate_up"
    assert torch.equal(torch.cat([rank[down] for rank in ranks], dim=1), whole[down])
    assert all(torch.equal(rank[f"{down}.weight_scale"], whole[f"{down}.weight_scale"]) for rank in ranks)
    half = whole[gate_up].shape[0] // 4
    pieces = [rank[f"{gate_up}.weight_scale"].split(half)[i] for i in range(2) for rank in ranks]
    assert torch.equal(torch.cat(pieces), whole[f"{gate_up}.weight_scale"])


@pytest.mark.usefixtures("int8_w8a16")
def test_back_ends_without_a_kernel_refuse_it_by_name(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    message = "expected fp8,.*nvfp4.*found int8_w8a16.* in target.layers.0.qkv and 1 more"
    spec, overrides = read_target_spec(target), {"*qkv": "int8_w8a16"}
    [refusal] = backend_of("cuda").unsupported(spec, None, LINEARS, Mapping())
    assert re.search(message, refusal)
    assert backend_of("torch").unsupported(spec, None, LINEARS, Mapping()) == []
    monkeypatch.setattr(backend_of("tensorrt"), "compiler", lambda config, base_dir: None)  # no TensorRT needed
    with pytest.raises(BuildError, match=message):
        build(target, tmp_path / "trt", backend="tensorrt", quantization=QuantizationConfig(overrides=overrides))
