"""Quantized experts of published checkpoints: a matrix for each expert, or all in one tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint.names import target_names
from dflash_trt.checkpoint.pair import CheckpointPair, open_pair
from dflash_trt.core.errors import CheckpointError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.weight_spec import rank_shard
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.formats.registry import dequantize, split_quantized
from tests.checkpoint.compressed_target import compress
from tests.checkpoint.refusals import edit_tensors, pair_refusal, weights_of
from tests.checkpoint.test_compressed_tensors import NVFP4_TOLERANCE
from tests.checkpoint.test_fp8_checkpoints import write_blocks
from tests.engines import decode, make_executor
from tests.factories import Tensors, edit_json, make_target, read_json

NUM_EXPERTS = 4
EXPERTS = "model.layers.1.mlp.experts"
GATE_UP, DOWN = "target.layers.1.experts.gate_up", "target.layers.1.experts.down"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE, a matrix for each expert, with whole blocks of 128 x 128 on each of two ranks."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    directory = tmp_path_factory.mktemp("source") / "target"
    options: dict[str, Any] = sizes | {"head_dim": 128, "num_hidden_layers": 2, "num_experts": NUM_EXPERTS}
    return make_target(directory, family="qwen3_moe", dtype=torch.bfloat16, **options)


def write_modelopt(source: Path, output: Path) -> Tensors:
    """NVFP4 as nvidia publishes it: the numbers of compressed-tensors under ModelOpt's names."""
    decompressed = compress(source, output, "NVFP4")

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            module = name.removesuffix(".weight_packed")
            tensors[f"{module}.weight"] = tensors.pop(name)
            tensors[f"{module}.weight_scale_2"] = 1 / tensors.pop(f"{module}.weight_global_scale").reshape(())
            tensors[f"{module}.input_scale"] = 1 / tensors.pop(f"{module}.input_global_scale").reshape(())

    edit_tensors(output, rename)
    edit_json(output / "config.json", quantization_config=None)
    section = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    section["exclude_modules"] = ["lm_head", "model.layers.*.mlp.gate"]
    (output / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    return decompressed


Write = Callable[[Path, Path], Tensors]
LAYOUTS: dict[str, tuple[str, Write]] = {
    "FP8 blocks": ("fp8_block", write_blocks),
    "INT4 g32": ("int4", lambda source, output: compress(source, output, "INT4 g32")),
    "FP8_DYNAMIC": ("fp8_w8a16", lambda source, output: compress(source, output, "FP8_DYNAMIC")),
    "W8A8": ("int8", lambda source, output: compress(source, output, "W8A8")),
    "NVFP4A16": ("nvfp4_w4a16", lambda source, output: compress(source, output, "NVFP4A16")),
    "ModelOpt NVFP4": ("nvfp4", write_modelopt),
}


def quantized_of(pair: CheckpointPair, mapping: Mapping | None = None) -> dict[str, QuantizedWeight[torch.Tensor]]:
    mapping = mapping or Mapping()
    table = engine_weights(pair.target, None, pair.quantization)
    shares = {name: rank_shard(spec, mapping) for name, spec in table.items()}
    tensors = dict(pair.iter_weights(dtype=torch.float32, mapping=mapping))
    return split_quantized(tensors, shares, pair.quantization.linears)[1]


def assert_is_read(pair: CheckpointPair, dequantized: Tensors, *, tolerance: float) -> None:
    names, weights = target_names(pair.target), quantized_of(pair)
    assert {part for name in weights for part in names[name].parts} == dequantized.keys()
    for name in (GATE_UP, DOWN, "target.layers.0.qkv"):
        expected = torch.cat([dequantized[part] for part in names[name].parts]).view(dequantize(weights[name]).shape)
        error = (dequantize(weights[name]) - expected).abs()
        assert bool((error <= expected.abs() * tolerance).all()), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_what_the_reference_dequantizes(source: Path, tmp_path: Path, layout: str) -> None:
    ours, write = LAYOUTS[layout]
    dequantized = write(source, tmp_path / "target")
    pair = open_pair(tmp_path / "target", None)
    assert {pair.quantization.linears[name] for name in (GATE_UP, DOWN, "target.layers.0.qkv")} == {ours}
    tolerance = NVFP4_TOLERANCE if "nvfp4" in ours else 0.0
    assert_is_read(pair, dequantized, tolerance=tolerance)

    def swap(tensors: Tensors) -> None:
        kind = "weight" if f"{EXPERTS}.1.down_proj.weight" in tensors else "weight_packed"
        first, second = (f"{EXPERTS}.{e}.down_proj.{kind}" for e in (1, 2))
        tensors[first], tensors[second] = tensors[second], tensors[first]

    edit_tensors(tmp_path / "target", swap)
    with pytest.raises(AssertionError, match=r"experts\.down"):
        assert_is_read(open_pair(tmp_path / "target", None), dequantized, tolerance=tolerance)


@pytest.mark.parametrize("layout", ["FP8 blocks", "INT4 g32", "NVFP4A16"])
def test_an_engine_gives_the_tokens_of_the_dequantized_experts(source: Path, tmp_path: Path, layout: str) -> None:
    dequantized = LAYOUTS[layout][1](source, tmp_path / "target")
    plain = shutil.copytree(source, tmp_path / "plain")
    save_file(load_file(source / "model.safetensors") | dequantized, plain / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    tokens = list(range(4, 40))
    generated = model.generate(torch.tensor([tokens]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    executor = make_executor(tmp_path / "target")
    torch.testing.assert_close(executor.target_logits(tokens), expected, rtol=0, atol=1e-4)
    assert decode(executor, tokens, 16, num_draft_tokens=0).tokens == generated[0, 36:].tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_divide_each_expert_or_the_experts(source: Path, tmp_path: Path, layout: str) -> None:
    LAYOUTS[layout][1](source, tmp_path / "target")
    pair = open_pair(tmp_path / "target", None)
    names = (GATE_UP, DOWN)
    whole = {name: dequantize(weight) for name, weight in quantized_of(pair).items() if name in names}

    def shares(ep_size: int) -> list[Tensors]:
        mappings = [Mapping(world_size=2, tp_size=2, ep_size=ep_size, rank=rank) for rank in range(2)]
        read = [quantized_of(pair, mapping) for mapping in mappings]
        return [{name: dequantize(weights[name]) for name in names} for weights in read]

    first, second = shares(ep_size=1)
    assert torch.equal(torch.cat((first[DOWN], second[DOWN]), dim=2), whole[DOWN])
    gates, ups = zip(*(half[GATE_UP].chunk(2, dim=1) for half in (first, second)), strict=True)
    assert torch.equal(torch.cat((*gates, *ups), dim=1), whole[GATE_UP])
    first, second = shares(ep_size=2)
    assert all(torch.equal(torch.cat((first[name], second[name])), whole[name]) for name in names)


def test_fp8_experts_in_one_tensor_are_those_of_a_matrix_each(source: Path, tmp_path: Path) -> None:
    write_blocks(source, tmp_path / "target")
    expected = weights_of(open_pair(tmp_path / "target", None))
    edit_tensors(tmp_path / "target", stack_experts)
    pair = open_pair(tmp_path / "target", None)
    found = weights_of(pair)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].float(), expected[name].float()) for name in expected)
    ranks = [Mapping(world_size=2, tp_size=2, rank=rank) for rank in range(2)]
    first, second = (dequantize(quantized_of(pair, mapping)[GATE_UP]) for mapping in ranks)
    gates, ups = zip(*(half.chunk(2, dim=1) for half in (first, second)), strict=True)
    assert torch.equal(torch.cat((*gates, *ups), dim=1), dequantize(quantized_of(pair)[GATE_UP]))


def stack_experts(tensors: Tensors) -> None:
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        for kind in ("weight", "weight_scale_inv"):
            parts = {
                word: [tensors.pop(f"{experts}.{e}.{word}_proj.{kind}") for e in range(NUM_EXPERTS)]
                for word in ("gate", "up", "down")
            }
            end = kind.removeprefix("weight")
            pairs = zip(parts["gate"], parts["up"], strict=True)
            raw = [torch.cat((gate.view(torch.uint8), up.view(torch.uint8))) for gate, up in pairs]
            dtype = parts["down"][0].dtype
            tensors[f"{experts}.gate_up_proj{end}"] = torch.stack(raw).view(dtype)
            tensors[f"{experts}.down_proj{end}"] = torch.stack([x.view(torch.uint8) for x in parts["down"]]).view(dtype)


def test_experts_of_one_layer_in_two_formats_are_refused(source: Path, tmp_path: Path) -> None:
    write_blocks(source, tmp_path / "target", modules_to_not_convert=["lm_head", f"{EXPERTS}.2"])
    plain = load_file(source / "model.safetensors")

    def unquantize(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.startswith(f"{EXPERTS}.2.") and key.endswith(".weight")]:
            tensors[key] = plain[key]
            del tensors[f"{key}_scale_inv"]

    edit_tensors(tmp_path / "target", unquantize)
    message = pair_refusal(tmp_path / "target", None)
    subject = f"'{EXPERTS}.0.down_proj.weight' to '{EXPERTS}.3.down_proj.weight'"
    assert f"{subject}: expected experts of one format, found fp8_block and unquantized" in message


def test_an_unlisted_router_is_unquantized(source: Path, tmp_path: Path) -> None:
    write_blocks(source, tmp_path / "target")
    assert "modules_to_not_convert" not in read_json(tmp_path / "target" / "config.json")["quantization_config"]
    assert "target.layers.1.router" not in open_pair(tmp_path / "target", None).quantization.linears


def test_an_expert_without_its_scale_is_named(source: Path, tmp_path: Path) -> None:
    write_blocks(source, tmp_path / "target")
    edit_tensors(tmp_path / "target", lambda tensors: tensors.pop(f"{EXPERTS}.3.up_proj.weight_scale_inv"))
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj\.weight': expected the scales of fp8_block"):
        open_pair(tmp_path / "target", None)
