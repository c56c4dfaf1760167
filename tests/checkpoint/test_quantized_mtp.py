"""MTP heads in FP8 blocks, as Qwen and Z.ai publish them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.checkpoint.specs import read_specs
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.weight_spec import rank_shard
from dflash_trt.formats.registry import dequantize, split_quantized
from tests.checkpoint.test_fp8_checkpoints import write_blocks
from tests.checkpoint.test_quantized_hybrids import ENDINGS, EXPERTS, SIZES, UNCONVERTED, write_plain
from tests.factories import Family
from tests.mtp_files import make_mtp_target


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "glm4_moe"])
def test_a_head_in_fp8_blocks_is_what_transformers_dequantizes(tmp_path: Path, family: Family) -> None:
    """Its projection of embeddings and features is unquantized in published files, with a word or without."""
    sizes: dict[str, Any] = SIZES | EXPERTS if family == "qwen3_5_moe_text" else SIZES
    if family == "glm4_moe":
        sizes = {name: size for name, size in SIZES.items() if not name.startswith(("linear", "layer"))}
        sizes |= {"moe_intermediate_size": 128}
    options = {"dtype": torch.bfloat16, "tokenizer": False, "vocab_size": 64}
    source = make_mtp_target(tmp_path / "source", family=family, **options, **sizes)
    excluded = [*UNCONVERTED] if family == "glm4_moe" else [*UNCONVERTED, "mtp.fc"]
    endings = tuple(ending for ending in ENDINGS if ending != "_proj.weight")
    endings += tuple(f"{word}_proj.weight" for word in ("q", "k", "v", "o", "gate", "up", "down", "out"))
    dequantized = write_blocks(source, tmp_path / "fp8", endings=endings, modules_to_not_convert=excluded)
    plain = write_plain(source, tmp_path / "plain", dequantized)
    pair = open_pair(tmp_path / "fp8", tmp_path / "fp8")
    ours = {name for name in pair.quantization.linears if name.startswith("draft.")}
    assert {"draft.kv", "draft.layers.0.q", "draft.layers.0.o"} <= ours and "draft.fc" not in ours
    assert ("draft.layers.0.experts.down" if "moe" in family else "draft.layers.0.down") in ours
    described = read_specs(tmp_path / "fp8", tmp_path / "fp8").quantization.linears
    assert described == pair.quantization.linears
    for mapping in (Mapping(), Mapping(world_size=2, tp_size=2, rank=1)):
        expected = dict(open_pair(plain, plain).iter_weights(dtype=torch.float32, mapping=mapping))
        table = engine_weights(pair.target, pair.draft, pair.quantization)
        tensors = dict(pair.iter_weights(dtype=torch.float32, mapping=mapping))
        shares = {name: rank_shard(spec, mapping) for name, spec in table.items()}
        _, quantized = split_quantized(tensors, shares, pair.quantization.linears)
        for name in ours:
            assert torch.equal(dequantize(quantized[name]), expected[name]), name
