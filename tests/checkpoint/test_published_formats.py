"""Families in weight formats in which they are published: FP8 blocks everywhere, INT4 or NVFP4 for routed experts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint.names import target_names
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.mapping import Mapping
from dflash_trt.formats.registry import dequantize
from tests.checkpoint.compressed_target import compress
from tests.checkpoint.refusals import edit_tensors
from tests.checkpoint.test_compressed_tensors import NVFP4_TOLERANCE
from tests.checkpoint.test_fp8_checkpoints import LINEARS, write_blocks
from tests.checkpoint.test_quantized_experts import quantized_of
from tests.engines import decode, make_executor
from tests.factories import Tensors, edit_json, make_target

TOKENS = list(range(4, 40))
COMMON: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2, "dtype": torch.bfloat16}
_LATENT: dict[str, Any] = (
    COMMON
    | {"num_key_value_heads": 2, "intermediate_size": 256, "moe_intermediate_size": 256, "n_routed_experts": 4}
    | {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 128, "v_head_dim": 128}
    | {"head_dim": 128, "n_group": 1, "topk_group": 1}
)
FAMILIES: dict[str, dict[str, Any]] = {
    "minimax_m2": COMMON
    | {"head_dim": 128, "num_key_value_heads": 1, "intermediate_size": 256, "num_local_experts": 4},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT | {"index_head_dim": 128},
    "glm_moe_dsa": _LATENT | {"index_head_dim": 128},
}
LINEARS_OF_INDEXERS = (".wq_b.weight", ".wk.weight")
EXPERTS_ONLY = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*layers\\.0\\.mlp.*")  # Kimi's list
ROUTED = {"target.layers.1.experts.gate_up", "target.layers.1.experts.down"}


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("source") / "target", family=request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "target"
    return make_target(directory, family="deepseek_v3", **FAMILIES["deepseek_v3"])


def assert_computes(found: Path, source: Path, dequantized: Tensors) -> None:
    """The tokens and logits of transformers with the dequantized weights, and not with one of them changed."""
    plain = shutil.copytree(source, found.parent / "plain")
    save_file(load_file(source / "model.safetensors") | dequantized, plain / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    generated = model.generate(torch.tensor([TOKENS]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    executor = make_executor(found)
    torch.testing.assert_close(executor.target_logits(TOKENS), expected, rtol=0, atol=1e-4)
    assert decode(executor, TOKENS, 16, num_draft_tokens=0).tokens == generated[0, len(TOKENS) :].tolist()


def test_fp8_blocks_compute_what_is_dequantized(source: Path, tmp_path: Path) -> None:
    """The factors of latents are dequantized: attention absorbs them. An indexer has blocks, too, and one matrix
    that nobody quantizes; DeepSeek's sections have `scale_fmt`.
    """
    excluded = {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head", "weights_proj"]}
    endings = (*LINEARS, *LINEARS_OF_INDEXERS)
    dequantized = write_blocks(source, tmp_path / "target", endings=endings, scale_fmt="ue8m0", **excluded)
    linears = open_pair(tmp_path / "target", None).quantization.linears
    assert set(linears.values()) == {"fp8_block"} and linears.keys() >= ROUTED
    assert not any(name.endswith("kv_b") for name in linears)
    assert_computes(tmp_path / "target", source, dequantized)
    name = next(
        name
        for name in dequantized
        if "layers.1" in name and name.endswith(("kv_b_proj.weight", "layers.1.self_attn.v_proj.weight"))
    )

    def one_scale(tensors: Tensors) -> None:
        tensors[f"{name}_scale_inv"] *= 1.5

    before = make_executor(tmp_path / "target").target_logits(TOKENS)
    edit_tensors(tmp_path / "target", one_scale)
    assert (make_executor(tmp_path / "target").target_logits(TOKENS) - before).abs().max() > 0.01


def test_int4_experts_compute_what_is_dequantized(deepseek: Path, tmp_path: Path) -> None:
    dequantized = compress(deepseek, tmp_path / "target", "INT4 g32", part=".mlp.experts.", ignored=EXPERTS_ONLY)
    assert open_pair(tmp_path / "target", None).quantization.linears == dict.fromkeys(ROUTED, "int4")
    assert_computes(tmp_path / "target", deepseek, dequantized)


def test_nvfp4_experts_of_modelopt_are_read_on_every_rank(deepseek: Path, tmp_path: Path) -> None:
    """With names in the list that transformers' wrapper of Kimi has."""
    dequantized = compress(deepseek, tmp_path / "target", "NVFP4", part=".mlp.experts.", ignored=EXPERTS_ONLY)

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            module = name.removesuffix(".weight_packed")
            tensors[f"{module}.weight"] = tensors.pop(name)
            tensors[f"{module}.weight_scale_2"] = 1 / tensors.pop(f"{module}.weight_global_scale").reshape(())
            tensors[f"{module}.input_scale"] = 1 / tensors.pop(f"{module}.input_global_scale").reshape(())

    edit_tensors(tmp_path / "target", rename)
    edit_json(tmp_path / "target" / "config.json", quantization_config=None)
    patterns = [f"language_model.model.layers.*.{x}*" for x in ("self_attn", "mlp.shared_experts", "mlp.gate")]
    section = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    section["exclude_modules"] = ["lm_head", "language_model.model.layers.0.mlp*", *patterns]
    (tmp_path / "target" / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    pair = open_pair(tmp_path / "target", None)
    assert pair.quantization.linears == dict.fromkeys(ROUTED, "nvfp4")
    names, whole = target_names(pair.target), quantized_of(pair)
    for name in ROUTED:
        found = dequantize(whole[name])
        expected = torch.cat([dequantized[part] for part in names[name].parts]).view(found.shape)
        assert bool(((found - expected).abs() <= expected.abs() * NVFP4_TOLERANCE).all()), name
        ranks = [Mapping(world_size=2, tp_size=2, ep_size=2, rank=rank) for rank in range(2)]
        parts = [dequantize(quantized_of(pair, mapping)[name]) for mapping in ranks]
        assert torch.equal(torch.cat(parts), found)
