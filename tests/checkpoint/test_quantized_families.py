"""Published formats beside what a family alone has: GLM's biases, Llama 4's rows in pairs, Gemma's norms of 1 + w."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.mapping import Mapping
from tests.checkpoint.compressed_target import PUBLISHED, compress
from tests.checkpoint.refusals import edit_tensors
from tests.engines import make_executor
from tests.factories import Tensors, make_target
from tests.gemma_targets import make_gemma

TOKENS = [(5 * i + 2) % 12 for i in range(20)]
COMMON: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "dtype": torch.bfloat16}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"intermediate_size": 256, "moe_intermediate_size": 64, "head_dim": 32},
    "llama4_text": {"intermediate_size": 64, "intermediate_size_mlp": 128},
    "gemma3_text": {"intermediate_size": 256, "head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]},
}
UNQUANTIZED = ("lm_head", "re:.*gate$", "re:.*router$")


def one_by_one(tensors: Tensors) -> None:
    """A matrix for each of Llama 4's experts, as llm-compressor stores them."""
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        experts = name.removesuffix(".gate_up_proj")
        for i, (gate_up, down) in enumerate(zip(tensors.pop(name), tensors.pop(f"{experts}.down_proj"), strict=True)):
            words = zip(("gate", "up", "down"), (*gate_up.t().chunk(2), down.t()), strict=True)
            tensors |= {f"{experts}.{i}.{word}_proj.weight": part.contiguous() for word, part in words}


def in_bfloat16(tensors: Tensors) -> None:
    tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "NVFP4A16", "INT4 g32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_the_dequantized_weights_do(tmp_path: Path, family: Any, name: str) -> None:
    source, options = tmp_path / "source", COMMON | FAMILIES[family] | {"vocab_size": 12}
    if family == "gemma3_text":
        make_gemma(source, family=family, **options)
        edit_tensors(source, in_bfloat16)
    else:
        make_target(source, family=family, tokenizer=False, **options)
    edit_tensors(source, one_by_one)
    dequantized = compress(source, tmp_path / "packed", name, ignored=UNQUANTIZED)
    plain = shutil.copytree(source, tmp_path / "plain")
    save_file(load_file(source / "model.safetensors") | dequantized, plain / "model.safetensors", {"format": "pt"})
    if family == "llama4_text":  # tests/parity/test_llama4.py: as transformers computes it
        expected = make_executor(plain).target_logits(TOKENS)
    else:
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
        with torch.no_grad():
            expected = model(torch.tensor([TOKENS])).logits[0]
    pair = open_pair(tmp_path / "packed", None)
    linears = pair.quantization.linears
    parts = {"down"} if family == "gemma3_text" else {"experts.gate_up", "shared.down"}
    assert linears.keys() >= {"target.layers.0.qkv", *(f"target.layers.1.{part}" for part in parts)}
    assert set(linears.values()) == {PUBLISHED[name][0]}
    found = make_executor(tmp_path / "packed").target_logits(TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # measured 1e-5
    assert (found - make_executor(source).target_logits(TOKENS)).abs().max() > 0.01, "the negative control"
    for rank in range(2):
        assert dict(pair.iter_weights(dtype=torch.float32, mapping=Mapping(world_size=2, tp_size=2, rank=rank)))
