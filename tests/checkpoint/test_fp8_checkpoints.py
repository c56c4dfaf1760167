"""Targets of FP8 tools, in blocks, per tensor and per row: read as they are, and compared with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from dflash_trt.checkpoint.names import target_names
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.checkpoint.specs import read_specs
from dflash_trt.core.errors import CheckpointError, ConfigError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.formats.registry import dequantize, split_quantized
from tests.checkpoint.refusals import edit_tensors, pair_refusal, weights_of
from tests.engines import decode, make_executor
from tests.factories import Tensors, edit_json, make_target

DOWN = "model.layers.1.mlp.down_proj"
LINEARS = ("_proj.weight", "_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole blocks, as transformers wants them."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    directory = tmp_path_factory.mktemp("source") / "target"
    return make_target(directory, head_dim=64, dtype=torch.bfloat16, num_hidden_layers=2, **sizes)


def write_blocks(
    source: Path,
    output: Path,
    *,
    scale_dtype: torch.dtype = torch.float32,
    endings: tuple[str, ...] = LINEARS,
    **section: Any,
) -> Tensors:
    """Write `source` as Qwen publishes FP8; its weights as transformers dequantizes them."""
    tensors, dequantized = load_file(source / "model.safetensors"), {}
    plain = "indexer.weights_proj.weight"  # which nobody quantizes
    for name in [name for name in tensors if name.endswith(endings) and not name.endswith(plain)]:
        weight = tensors[name].float()
        rows, columns = (size // 128 for size in weight.shape)
        blocks = weight.view(rows, 128, columns, 128)
        scale = (blocks.abs().amax(dim=(1, 3)) / 448).to(scale_dtype)
        tensors[name] = (blocks / scale.float()[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        dequantized[name] = Fp8Dequantize(None)._dequantize_one(tensors[name], scale, output_dtype=torch.float32)
    return write(source, output, tensors, BLOCKS | section) or dequantized


def write_per_tensor(source: Path, output: Path, **section: Any) -> Tensors:
    """Write `source` as AutoFP8 does, with scales of the activations; its weights, dequantized."""
    tensors, dequantized = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].float().abs().max() / 448
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        if section["activation_scheme"] == "static":
            tensors[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.01)
        dequantized[name] = tensors[name].float() * scale
    return (
        write(source, output, tensors, {"quant_method": "fp8", "ignored_layers": ["lm_head"]} | section) or dequantized
    )


def write_rows(source: Path, output: Path, **section: Any) -> Tensors:
    """Write `source` as Meta publishes Llama 3.1 in FP8: attention and the first layer unquantized."""
    tensors, dequantized = load_file(source / "model.safetensors"), {}
    names = [name for name in tensors if name.endswith("_proj.weight")]
    plain = [name for name in names if "self_attn" in name or ".layers.0." in name]
    for name in set(names) - set(plain):
        scale = tensors[name].float().abs().amax(dim=1, keepdim=True) / 448
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"], tensors[f"{name.removesuffix('weight')}input_scale_ub"] = (
            scale,
            torch.tensor([1200.0]),
        )
        dequantized[name] = tensors[name].float() * scale
    kept = [name.removesuffix(".weight") for name in plain] + ["lm_head"]
    fields = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": kept}
    return write(source, output, tensors, fields | section) or dequantized


def write(source: Path, output: Path, tensors: Tensors, section: dict[str, Any]) -> None:
    output.mkdir()
    for file in source.iterdir():
        (output / file.name).write_bytes(file.read_bytes())
    save_file(tensors, output / "model.safetensors")
    edit_json(output / "config.json", quantization_config=section)


def assert_is_read(directory: Path, dequantized: Tensors) -> None:
    pair = open_pair(directory, None)
    table, names = engine_weights(pair.target, None, pair.quantization), target_names(pair.target)
    tensors = dict(pair.iter_weights(dtype=torch.float32, mapping=Mapping()))
    _, weights = split_quantized(tensors, table, pair.quantization.linears)
    assert {part for name in weights for part in names[name].parts} == dequantized.keys()
    for name, weight in weights.items():
        assert torch.equal(dequantize(weight), torch.cat([dequantized[part] for part in names[name].parts])), name


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_what_transformers_dequantizes(source: Path, tmp_path: Path, scale_dtype: torch.dtype) -> None:
    dequantized = write_blocks(source, tmp_path / "target", scale_dtype=scale_dtype)
    assert_is_read(tmp_path / "target", dequantized)
    assert set(open_pair(tmp_path / "target", None).quantization.linears.values()) == {"fp8_block"}

    def one_scale(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale_inv"][1, 2] *= 1.01

    edit_tensors(tmp_path / "target", one_scale)
    with pytest.raises(AssertionError, match=r"layers\.1\.down"):
        assert_is_read(tmp_path / "target", dequantized)


@pytest.mark.parametrize(("scheme", "ours"), [("static", "fp8"), ("dynamic", "fp8_w8a16")])
def test_weights_per_tensor_are_read(source: Path, tmp_path: Path, scheme: str, ours: str) -> None:
    dequantized = write_per_tensor(source, tmp_path / "target", activation_scheme=scheme)
    assert_is_read(tmp_path / "target", dequantized)
    assert set(open_pair(tmp_path / "target", None).quantization.linears.values()) == {ours}


def test_weights_per_row_are_read(source: Path, tmp_path: Path) -> None:
    dequantized = write_rows(source, tmp_path / "target")
    assert_is_read(tmp_path / "target", dequantized)
    formats = open_pair(tmp_path / "target", None).quantization.linears
    assert formats == {f"target.layers.1.{name}": "fp8_w8a16" for name in ("gate_up", "down")}

    def one_row(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale"][3] *= 1.01

    edit_tensors(tmp_path / "target", one_row)
    with pytest.raises(AssertionError, match=r"layers\.1\.down"):
        assert_is_read(tmp_path / "target", dequantized)


def test_an_engine_gives_the_tokens_of_the_dequantized_checkpoint(source: Path, tmp_path: Path) -> None:
    dequantized = write_blocks(source, tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.load_state_dict(dequantized, strict=False)
    tokens = list(range(4, 40))
    generated = model.generate(torch.tensor([tokens]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    executor = make_executor(tmp_path / "target")
    torch.testing.assert_close(executor.target_logits(tokens), expected, rtol=0, atol=1e-4)
    assert decode(executor, tokens, 16, num_draft_tokens=0).tokens == generated[0, 36:].tolist()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_block_size": [64, 128]}, "key 'quantization_config.weight_block_size': expected [128, 128]"),
        ({"fmt": "e5m2"}, "key 'quantization_config.fmt'"),
        ({"activation_scheme": "tokenwise"}, "key 'quantization_config.activation_scheme'"),
        ({"new_key": 1}, "key 'quantization_config.new_key'"),
    ],
)
def test_another_way_to_quantize_is_refused(source: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_blocks(source, tmp_path / "target", **changes)
    assert words in pair_refusal(tmp_path / "target", None, ConfigError)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj",
        "language_model.model.layers.1.mlp.down_proj",
        "model.language_model.layers.1.mlp.down_proj",
        "model.layers.1.mlp",
        "down_proj",
        r"re:.*\.1\.mlp\.down.*",
    ],
)
def test_a_listed_module_is_unquantized(source: Path, tmp_path: Path, name: str) -> None:
    write_blocks(source, tmp_path / "target", modules_to_not_convert=["lm_head", name])
    plain = load_file(source / "model.safetensors")

    def unquantize(tensors: Tensors) -> None:
        for key in [key for key in tensors if is_listed(key, name)]:
            tensors[key] = plain[key]
            del tensors[f"{key}_scale_inv"]

    edit_tensors(tmp_path / "target", unquantize)
    pair = open_pair(tmp_path / "target", None)
    assert "target.layers.1.down" not in pair.quantization.linears
    assert torch.equal(weights_of(pair)["target.layers.1.down"], plain[f"{DOWN}.weight"].float())
    assert read_specs(tmp_path / "target", None).quantization.linears == pair.quantization.linears


def is_listed(key: str, name: str) -> bool:
    words = {"model.layers.1.mlp": "layers.1.mlp", "down_proj": "down_proj"}.get(name, "layers.1.mlp.down_proj")
    return words in key and key.endswith("_proj.weight")


def test_a_name_that_only_begins_like_a_listed_one_is_quantized(source: Path, tmp_path: Path) -> None:
    write_blocks(source, tmp_path / "target", modules_to_not_convert=["lm_head", "model.layers.1.mlp.down"])
    assert "target.layers.1.down" in open_pair(tmp_path / "target", None).quantization.linears


@pytest.mark.parametrize("missing", [f"{DOWN}.weight_scale_inv"])
def test_a_missing_scale_is_named(source: Path, tmp_path: Path, missing: str) -> None:
    write_blocks(source, tmp_path / "target")
    edit_tensors(tmp_path / "target", lambda tensors: tensors.pop(missing))
    message = pair_refusal(tmp_path / "target", None)
    assert f"'{DOWN}.weight': expected the scales of fp8_block, found no '{missing}'" in message


def test_an_unlisted_linear_without_scales_is_refused_but_not_the_head(source: Path, tmp_path: Path) -> None:
    write_blocks(source, tmp_path / "target")  # no list at all, as in DeepSeek's checkpoints: the head is unquantized

    def unquantize(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].to(torch.bfloat16)
        del tensors[f"{DOWN}.weight_scale_inv"]

    assert "target.lm_head" not in open_pair(tmp_path / "target", None).quantization.linears
    edit_tensors(tmp_path / "target", unquantize)
    message = pair_refusal(tmp_path / "target", None)
    assert f"'{DOWN}.weight': expected a weight in fp8_block with its scales" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_block_scale_that_is_no_scale_is_refused(source: Path, tmp_path: Path, value: float) -> None:
    write_blocks(source, tmp_path / "target")

    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale_inv"][0, 1] = value

    edit_tensors(tmp_path / "target", change)
    with pytest.raises(CheckpointError, match=f"'{DOWN}.weight_scale_inv': expected finite scales, found 1"):
        weights_of(open_pair(tmp_path / "target", None))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_is_refused(source: Path, tmp_path: Path, code: int) -> None:
    write_blocks(source, tmp_path / "target")

    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight"].view(torch.uint8)[3, 5] = code

    edit_tensors(tmp_path / "target", change)
    with pytest.raises(CheckpointError, match=f"'{DOWN}.weight': expected finite E4M3 values, found 1 codes"):
        weights_of(open_pair(tmp_path / "target", None))
