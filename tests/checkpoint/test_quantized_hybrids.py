"""Gated delta nets in FP8 blocks, as Qwen publishes them: rows of a matrix go to several segments in whole blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.weight_spec import rank_shard
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.formats.registry import dequantize, split_quantized
from dflash_trt.quantize.stream import joined
from tests.checkpoint.refusals import edit_tensors, pair_refusal, weights_of
from tests.checkpoint.test_fp8_checkpoints import write, write_blocks
from tests.engines import decode, make_executor
from tests.factories import Tensors, make_target, read_json, write_json

ENDINGS = ("_proj.weight", "in_proj_qkvz.weight", "in_proj_qkv.weight", "in_proj_z.weight")
UNCONVERTED = ["lm_head", "in_proj_a", "in_proj_b", "in_proj_ba", "conv1d", "mlp.gate", "mlp.shared_expert_gate"]
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128}
EXPERTS |= {"shared_expert_intermediate_size": 128}
FAMILIES = ["qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"]


def make_source(path: Path, family: Any, **changes: Any) -> Path:
    sizes = SIZES | (EXPERTS if family != "qwen3_5_text" else {}) | changes
    return make_target(path, family=family, dtype=torch.bfloat16, tokenizer=False, vocab_size=64, **sizes)


def write_plain(source: Path, output: Path, dequantized: Tensors) -> Path:
    """The checkpoint that transformers would read."""
    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    output.mkdir()
    (output / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors | dequantized, output / "model.safetensors", {"format": "pt"})
    return output


def quantized_of(directory: Path, mapping: Mapping) -> dict[str, QuantizedWeight[torch.Tensor]]:
    pair = open_pair(directory, None)
    table = engine_weights(pair.target, None, pair.quantization)
    tensors = dict(pair.iter_weights(dtype=torch.float32, mapping=mapping))
    shares = {name: rank_shard(spec, mapping) for name, spec in table.items()}
    return split_quantized(tensors, shares, pair.quantization.linears)[1]


def assert_is_read(directory: Path, plain: Path, mapping: Mapping | None = None) -> set[str]:
    """All quantized layers are those of the dequantized checkpoint, bit for bit; their names."""
    mapping = mapping or Mapping()
    expected = dict(open_pair(plain, None).iter_weights(dtype=torch.float32, mapping=mapping))
    weights = quantized_of(directory, mapping)
    for name, weight in weights.items():
        assert torch.equal(dequantize(weight), expected[name]), name
    return set(weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_blocks_are_what_transformers_dequantizes(tmp_path: Path, family: str) -> None:
    source = make_source(tmp_path / "source", family)
    dequantized = write_blocks(source, tmp_path / "fp8", endings=ENDINGS, modules_to_not_convert=UNCONVERTED)
    plain = write_plain(source, tmp_path / "plain", dequantized)
    names = assert_is_read(tmp_path / "fp8", plain)
    assert {"target.layers.0.qkvz", "target.layers.0.o", "target.layers.1.qkv"} <= names
    assert not names & {"target.layers.0.ba", "target.layers.0.conv", "target.layers.0.shared_gate"}
    for rank in range(2):
        assert assert_is_read(tmp_path / "fp8", plain, Mapping(world_size=2, tp_size=2, rank=rank)) == names

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    tokens = [(7 * i) % 64 for i in range(20)]
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    executor = make_executor(tmp_path / "fp8")
    torch.testing.assert_close(executor.target_logits(tokens), expected, rtol=0, atol=2e-4)
    generated = model.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert decode(executor, tokens, 8, num_draft_tokens=0).tokens == generated[0, len(tokens) :].tolist()


@pytest.mark.parametrize(("family", "module"), [("qwen3_next", "in_proj_qkvz"), ("qwen3_5_text", "in_proj_qkv")])
def test_one_changed_scale_is_noticed(tmp_path: Path, family: str, module: str) -> None:
    """The negative control."""
    source = make_source(tmp_path / "source", family)
    dequantized = write_blocks(source, tmp_path / "fp8", endings=ENDINGS, modules_to_not_convert=UNCONVERTED)
    plain = write_plain(source, tmp_path / "plain", dequantized)

    def swap(tensors: Tensors) -> None:
        scale = tensors[f"model.layers.0.linear_attn.{module}.weight_scale_inv"]
        scale[[1, 2]] = scale[[2, 1]]

    edit_tensors(tmp_path / "fp8", swap)
    with pytest.raises(AssertionError, match=r"layers\.0\.qkvz"):
        assert_is_read(tmp_path / "fp8", plain)


def test_a_part_that_is_not_quantized_stands_beside_those_that_are(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "qwen3_5_text")
    endings = tuple(ending for ending in ENDINGS if "in_proj_z" not in ending)
    excluded = [*UNCONVERTED, "in_proj_z"]
    dequantized = write_blocks(source, tmp_path / "fp8", endings=endings, modules_to_not_convert=excluded)
    plain = weights_of(open_pair(write_plain(source, tmp_path / "plain", dequantized), None))
    tensors = weights_of(open_pair(tmp_path / "fp8", None))
    rows = torch.split(plain["target.layers.0.qkvz"], [256, 256, 256, 256])
    assert torch.equal(tensors["target.layers.0.qkvz/3"], rows[3])
    blocks = tensors["target.layers.0.qkvz/1.block_scale"].repeat_interleave(128, 0)
    assert torch.equal(tensors["target.layers.0.qkvz/1"].float() * blocks, rows[1])
    pair = open_pair(tmp_path / "fp8", None)  # in an engine the layer is unquantized
    whole = dict(joined(pair.iter_weights(dtype=torch.float32, mapping=Mapping()), dtype=torch.float32))
    assert torch.equal(whole["target.layers.0.qkvz"], plain["target.layers.0.qkvz"])


def test_the_language_model_of_a_quantized_model_that_also_sees_is_read(tmp_path: Path) -> None:
    """As Qwen3.5-FP8: the quantization stands outside of `text_config`, and its list names modules of the wrapper."""
    source = make_source(tmp_path / "source", "qwen3_5_text")
    ignored = [f"model.language_model.layers.0.linear_attn.in_proj_{name}" for name in "ab"]
    ignored += ["lm_head", "model.visual.blocks.0.attn.qkv", "mtp.fc"]
    dequantized = write_blocks(source, tmp_path / "fp8", endings=ENDINGS, modules_to_not_convert=ignored)
    text = read_json(tmp_path / "fp8" / "config.json")
    section = text.pop("quantization_config")
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    write_json(tmp_path / "fp8" / "config.json", outer | {"text_config": text, "quantization_config": section})

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.merger.weight"] = torch.zeros(3)

    edit_tensors(tmp_path / "fp8", rename)
    names = assert_is_read(tmp_path / "fp8", write_plain(source, tmp_path / "plain", dequantized))
    assert "target.layers.0.qkvz" in names and "target.layers.0.ba" not in names


def test_scales_of_rows_go_with_their_rows_and_one_scale_with_all(tmp_path: Path) -> None:
    """AutoFP8's layouts, in which a fused matrix of four segments has a scale per row, or one."""
    source = make_source(tmp_path / "source", "qwen3_next", linear_key_head_dim=24, linear_value_head_dim=8)
    for name, axis in (("rows", 1), ("all", None)):
        tensors, dequantized = load_file(source / "model.safetensors"), {}
        for key in [key for key in tensors if key.endswith(ENDINGS)]:
            weight = tensors[key].float()
            amax = weight.abs().amax() if axis is None else weight.abs().amax(dim=axis, keepdim=True)
            tensors[f"{key}_scale"] = amax / 448
            tensors[key] = (weight / tensors[f"{key}_scale"]).to(torch.float8_e4m3fn)
            dequantized[key] = tensors[key].float() * tensors[f"{key}_scale"]
        section = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": UNCONVERTED}
        write(source, tmp_path / name, tensors, section)
        plain = write_plain(source, tmp_path / f"plain {name}", dequantized)
        assert "target.layers.0.qkvz" in assert_is_read(tmp_path / name, plain)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3_5_text", {"linear_key_head_dim": 64, "linear_num_key_heads": 1}, "found 64 rows from row 0 on"),
        ("qwen3_next", {"linear_key_head_dim": 64}, "found 64 rows from row 0 on"),
    ],
)
def test_a_block_that_two_segments_would_share_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    source = make_source(tmp_path / "source", family, **changes)
    write_blocks(source, tmp_path / "fp8", endings=ENDINGS, modules_to_not_convert=UNCONVERTED)
    message = pair_refusal(tmp_path / "fp8", None)
    assert "expected heads of a multiple of 128 rows, for fp8_block has blocks of 128" in message and words in message


def test_scales_of_k_and_v_are_those_of_the_layers_that_have_some(tmp_path: Path) -> None:
    """In ModelOpt's names; without those of a delta net the checkpoint is complete."""
    source = make_source(tmp_path / "source", "qwen3_5_text")
    section = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    write_json(source / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": section})
    scales = {f"model.layers.1.self_attn.{x}_proj.{x}_scale": torch.tensor(0.25) for x in "kv"}
    edit_tensors(source, lambda tensors: tensors.update(scales))
    found = open_pair(source, None).quantization
    assert found is not None and found.target_kv is not None
    assert [(scale.k, scale.v) for scale in found.target_kv] == [(1.0, 1.0), (0.25, 0.25)]
