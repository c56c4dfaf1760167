"""Gemma 4 quantized by published tools: experts as a matrix each, beside parts that nobody quantizes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint.pair import open_pair
from tests.checkpoint.compressed_target import compress
from tests.checkpoint.refusals import edit_tensors
from tests.checkpoint.test_compressed_tensors import KV_SCHEME
from tests.engines import make_executor
from tests.factories import Tensors, edit_json, read_json
from tests.gemma_targets import EXPERTS, PER_LAYER, make_gemma

TOKENS = [(5 * i + 2) % 12 for i in range(20)]
UNQUANTIZED = ("lm_head", "re:.*router.*", "re:.*per_layer.*")
TARGETS: dict[str, dict[str, Any]] = {
    "dense": {},
    "with experts": EXPERTS,
    "with per-layer embeddings": PER_LAYER
    | {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
Write = Callable[[Path, Path], Tensors]


def exploded(source: Path, output: Path) -> Path:
    """The checkpoint with a matrix for each expert."""
    output.mkdir()
    (output / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if not module.endswith(".experts"):
            tensors[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            words = ("gate", "up") if kind == "gate_up_proj" else ("down",)
            for word, part in zip(words, matrix.chunk(len(words)), strict=True):
                tensors[f"{module}.{e}.{word}_proj.weight"] = part.contiguous()
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    return output


def fused(tensors: Tensors) -> Tensors:
    """The reverse, of what is there."""
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    found = {name: tensor for name, tensor in tensors.items() if name not in experts}
    for layer in sorted({name.split(".experts.")[0] for name in experts}):

        def stacked(word: str, layer: str = layer) -> torch.Tensor:
            count = sum(name.startswith(f"{layer}.experts.") for name in experts) // 3
            return torch.stack([experts[f"{layer}.experts.{e}.{word}_proj.weight"] for e in range(count)])

        found[f"{layer}.experts.gate_up_proj"] = torch.cat((stacked("gate"), stacked("up")), dim=1)
        found[f"{layer}.experts.down_proj"] = stacked("down")
    return found


def write_modelopt(source: Path, output: Path) -> Tensors:
    """NVFP4 weights as NVIDIA publishes Gemma 4: the numbers of compressed-tensors under ModelOpt's names."""
    decompressed = compress(source, output, "NVFP4A16", ignored=UNQUANTIZED)

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            module = name.removesuffix(".weight_packed")
            inner = module.replace(".experts.", ".moe.experts.")
            tensors[f"{inner}.weight"] = tensors.pop(name)
            tensors[f"{inner}.weight_scale_2"] = 1 / tensors.pop(f"{module}.weight_global_scale").reshape(())
            tensors[f"{inner}.weight_scale"] = tensors.pop(f"{module}.weight_scale")

    edit_tensors(output, rename)
    edit_json(output / "config.json", quantization_config=None)
    section = {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    section["exclude_modules"] = ["lm_head", "model.layers.*.router*", "*per_layer*", "model.layers.3.mlp*"]
    (output / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    return decompressed


LAYOUTS: dict[str, Write] = {
    "FP8_DYNAMIC": lambda source, output: compress(source, output, "FP8_DYNAMIC", ignored=(*UNQUANTIZED, LAST_MLP)),
    "NVFP4A16": lambda source, output: compress(source, output, "NVFP4A16", ignored=(*UNQUANTIZED, LAST_MLP)),
    "ModelOpt NVFP4": write_modelopt,
}
LAST_MLP = "re:.*layers\\.3\\.mlp.*"  # what `compress` leaves as it is


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TARGETS)
def test_it_computes_what_transformers_does_with_the_dequantized_weights(
    tmp_path: Path, name: str, layout: str
) -> None:
    target = make_gemma(tmp_path / "target", family="gemma4_text", **TARGETS[name])
    source = exploded(target, tmp_path / "exploded")
    dequantized = LAYOUTS[layout](source, tmp_path / "quantized")
    tensors = load_file(target / "model.safetensors")
    plain = exploded(target, tmp_path / "plain")
    save_file(tensors | fused(dequantized), plain / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
        exact = (
            AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()(torch.tensor([TOKENS])).logits[0]
        )
    linears = open_pair(tmp_path / "quantized", None).quantization.linears
    assert "target.layers.0.qkv" in linears and "target.layers.3.shared.down" not in linears
    assert ("target.layers.3.experts.down" in linears) == ("experts" in name)
    found = make_executor(tmp_path / "quantized").target_logits(TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (found - exact).abs().max() > 1e-3, "the negative control: it is quantized"


def test_layers_that_share_k_and_v_have_the_scales_of_their_owners_and_none_in_the_file(tmp_path: Path) -> None:
    """Layers 2 and 3 read the pages of layers 0 and 1; an export has scales of these alone."""
    target = make_gemma(tmp_path / "target", family="gemma4_text", **TARGETS["with per-layer embeddings"])
    LAYOUTS["FP8_DYNAMIC"](exploded(target, tmp_path / "exploded"), tmp_path / "quantized")
    section = read_json(tmp_path / "quantized" / "config.json")["quantization_config"]
    edit_json(tmp_path / "quantized" / "config.json", quantization_config=section | {"kv_cache_scheme": KV_SCHEME})
    scales = {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor([0.5 + i]) for i in range(2) for x in "kv"}
    edit_tensors(tmp_path / "quantized", lambda tensors: tensors.update(scales))
    found = open_pair(tmp_path / "quantized", None).quantization.target_kv
    assert found is not None and [scale.k for scale in found] == [scale.v for scale in found] == [0.5, 1.5, 0.5, 1.5]
