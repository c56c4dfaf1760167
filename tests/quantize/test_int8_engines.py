"""Engines of int8: every part in it, none calibrated, the same text with drafts and without."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from dflash_trt import LLM, SamplingParams
from dflash_trt.core.quantization import QuantizationConfig
from dflash_trt.formats.int8 import token_codes
from tests.contributing.engines import build
from tests.factories import make_target

PROMPT = list(range(5, 25))


def test_parts_and_heads_are_quantized_without_a_calibration_and_drafts_change_no_text(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = pair
    overrides = {"target.layers.0.*": "none", "draft.fc": "fp8_w8a16"}
    quantization = QuantizationConfig(target="int8", lm_head="int8", draft_lm_head="int8", overrides=overrides)
    engine = build(target, tmp_path / "engine", drafter=str(drafter), quantization=quantization, max_seq_len=128)
    stored = load_file(engine.weights_path(0))
    in_int8 = {name for name, tensor in stored.items() if tensor.dtype == torch.int8}
    assert in_int8 >= {"target.layers.1.qkv", "target.lm_head", "draft.lm_head", "draft.layers.0.down"}
    assert not any(name.startswith("target.layers.0.") or name == "draft.fc" for name in in_int8)
    assert stored["draft.lm_head.weight_scale"].shape == stored["draft.lm_head"].shape[:1]
    texts = []
    for draft_length in ("0", "3"):
        params = SamplingParams(max_new_tokens=32, ignore_eos=True)
        with LLM(engine.path, num_threads=1, draft_length=draft_length) as llm:
            (result,) = llm.generate([PROMPT], params)
        texts.append(result.token_ids)
    assert texts[0] == texts[1] and len(texts[0]) == 32


def test_experts_and_ranks_hold_what_the_whole_weight_is_rounded_to(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", family="qwen3_moe", num_hidden_layers=1)
    quantization = QuantizationConfig(target="int8")
    whole = load_file(build(target, tmp_path / "one", quantization=quantization).weights_path(0))
    engine = build(target, tmp_path / "two", quantization=quantization, tp_size=2)
    halves = [load_file(engine.weights_path(rank)) for rank in range(2)]
    down = "target.layers.0.experts.down"
    assert whole[down].dtype == torch.int8 and whole[down].dim() == 3
    assert torch.equal(torch.cat([half[down] for half in halves], dim=2), whole[down])
    plain = load_file(target / "model.safetensors")["model.layers.0.mlp.experts.1.down_proj.weight"]
    codes, scale = token_codes(plain)
    assert torch.equal(whole[down][1], codes) and torch.equal(whole[f"{down}.weight_scale"][1], scale[:, 0])
    with LLM(engine.path, num_threads=1) as llm:
        (result,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert len(result.token_ids) == 8
