"""Phi in published formats: q, k and v are one matrix, gate and up another, and each has the scales of its rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.mapping import Mapping
from dflash_trt.formats.registry import dequantize
from tests.checkpoint.compressed_target import compress
from tests.checkpoint.refusals import edit_tensors, pair_refusal, weights_of
from tests.checkpoint.test_compressed_tensors import NVFP4_TOLERANCE
from tests.checkpoint.test_quantized_hybrids import assert_is_read, quantized_of, write_plain
from tests.engines import make_executor
from tests.factories import Tensors, edit_json, make_target

SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 128, "num_hidden_layers": 2}
TWO_HEADS = SIZES | {"intermediate_size": 256, "num_key_value_heads": 2}
ONE_HEAD = SIZES | {"intermediate_size": 128, "num_key_value_heads": 1}  # k, v, gate and up: a block each
TOKENS = [(7 * i) % 64 for i in range(20)]
FUSED = {f"target.layers.{i}.{name}" for i in range(2) for name in ("qkv", "gate_up")}
PUBLISHED = {  # by format of compressed-tensors: sizes, and ours
    "FP8_DYNAMIC": (TWO_HEADS, "fp8_w8a16"),
    "FP8 tensor, dynamic": (TWO_HEADS, "fp8_w8a16"),
    "FP8_BLOCK": (ONE_HEAD, "fp8_block"),
    "W4A16": (TWO_HEADS, "int4"),
    "NVFP4A16": (TWO_HEADS, "nvfp4_w4a16"),
}


def make_phi(path: Path, **sizes: Any) -> Path:
    return make_target(path, family="phi3", dtype=torch.bfloat16, tokenizer=False, vocab_size=64, **sizes)


def quantized(root: Path, name: str) -> tuple[Path, Path]:
    """A checkpoint, and the dequantized one that transformers would read."""
    source = make_phi(root / "source", **PUBLISHED[name][0])
    return root / "packed", write_plain(source, root / "plain", compress(source, root / "packed", name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_fused_matrices_are_what_their_rows_dequantize_to(tmp_path: Path, name: str) -> None:
    packed, plain = quantized(tmp_path, name)
    linears = open_pair(packed, None).quantization.linears
    assert linears.keys() >= FUSED and set(linears.values()) == {PUBLISHED[name][1]}
    ranks = [Mapping()]
    if name != "FP8_BLOCK":
        ranks += [Mapping(world_size=2, tp_size=2, rank=rank) for rank in range(2)]
    for mapping in ranks:
        if name != "NVFP4A16":
            assert_is_read(packed, plain, mapping)
            continue
        expected = dict(open_pair(plain, None).iter_weights(dtype=torch.float32, mapping=mapping))
        for linear, weight in quantized_of(packed, mapping).items():
            torch.testing.assert_close(dequantize(weight), expected[linear], rtol=NVFP4_TOLERANCE, atol=0)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(make_executor(packed).target_logits(TOKENS), logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "FP8_BLOCK", "W4A16"])
def test_scales_of_other_rows_are_noticed(tmp_path: Path, name: str) -> None:
    """The negative control: those of k and v change places."""
    packed, plain = quantized(tmp_path, name)

    def swap(tensors: Tensors) -> None:
        scales = tensors["model.layers.1.self_attn.qkv_proj.weight_scale"]
        q, k, v = scales.split([len(scales) * part // 8 for part in (4, 2, 2)] if name != "FP8_BLOCK" else [4, 1, 1])
        tensors["model.layers.1.self_attn.qkv_proj.weight_scale"] = torch.cat((q, v, k))

    edit_tensors(packed, swap)
    with pytest.raises(AssertionError, match=r"layers\.1\.qkv"):
        assert_is_read(packed, plain)


def test_a_static_scale_of_a_fused_matrix_is_that_of_each_of_its_parts(tmp_path: Path) -> None:
    """As ModelOpt and llm-compressor store FP8 with scales of activations."""
    packed, _ = quantized(tmp_path, "FP8 tensor, dynamic")

    def add_inputs(tensors: Tensors) -> None:
        scales = [name for name in tensors if name.endswith(".weight_scale")]
        tensors |= {name.replace(".weight_scale", ".input_scale"): torch.tensor(0.25) for name in scales}
        tensors |= {name: tensors[name].reshape(()).float() for name in scales}
        tensors |= {f"model.layers.{i}.self_attn.{x}_proj.{x}_scale": torch.tensor(0.5) for i in range(2) for x in "kv"}

    edit_tensors(packed, add_inputs)
    section = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "ignore": ["lm_head"]}
    edit_json(packed / "config.json", quantization_config=section)
    pair = open_pair(packed, None)
    assert set(pair.quantization.linears.values()) == {"fp8"} and pair.quantization.target_kv is not None
    tensors = weights_of(pair)
    for name, num_parts in (("qkv", 3), ("gate_up", 2), ("down", 1)):
        scales = {field: tensors[f"target.layers.0.{name}.{field}"] for field in ("weight_scale", "input_scale")}
        assert scales["input_scale"].tolist() == [0.25] * num_parts
        assert scales["weight_scale"].unique().numel() == 1 and scales["weight_scale"].shape == (num_parts,)


def test_parts_that_share_a_block_are_refused_by_their_rows(tmp_path: Path) -> None:
    source = make_phi(tmp_path / "source", **TWO_HEADS | {"head_dim": 32})
    compress(source, tmp_path / "packed", "FP8_BLOCK")
    expected = (
        "qkv_proj.weight': expected heads of a multiple of 128 rows, for fp8_block has blocks of 128, found 64 rows"
    )
    refusal = pair_refusal(tmp_path / "packed", None)
    assert expected in refusal and len(set(refusal.splitlines())) == len(refusal.splitlines())
