"""Latent attention beyond its tokens: both forms, pages, wrappers, and what has no kernel for it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt import LLM
from dflash_trt.backends.torch import latent_attention
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_states
from dflash_trt.core.quantization import LayerKvScales
from tests.engines import decode, make_executor
from tests.executor.rank_engines import build, opened, write_calibration_prompts
from tests.factories import make_target, make_zlab_drafter, read_json, write_json
from tests.parity.test_transformers import NUM_NEW, PROMPT, tiny_target, transformers_tokens
from tests.traces import PROMPTS

TOLERANCE = 1e-4  # measured 8e-6
FP8_TOLERANCE = 1.0  # of logits up to 7, measured 0.65
LONG = PROMPTS[1] * 5
LATENT_BYTES = (32 + 8) * 4  # of a token in a layer, in float32


def make_pair(root: Path, **options: Any) -> Path:
    target = make_target(root / "target", family="deepseek_v3", vocab_size=12, tokenizer=False, **options)
    make_zlab_drafter(root / "drafter", target_dir=target, attention_bias=True)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp("pair"))


def test_both_forms_give_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control is a direct form without the rotated key."""
    executor = make_executor(root / "target")
    found = {}
    for is_direct in (False, True):
        monkeypatch.setattr(latent_attention, "is_direct_cheaper", lambda mla, num_rows, way=is_direct: way)
        found[is_direct] = executor.target_logits(LONG)
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=TOLERANCE)
    directly = latent_attention._directly
    monkeypatch.setattr(
        latent_attention, "_directly", lambda q_nope, q_rope, *others: directly(q_nope, q_rope * 0, *others)
    )
    assert (executor.target_logits(LONG) - found[False]).abs().max() > 100 * TOLERANCE


def test_a_token_takes_one_latent_a_layer_on_every_rank(root: Path) -> None:
    pair = open_pair(root / "target", root / "drafter")
    states = engine_states(pair.target, pair.draft, dtype="float32")
    mapping = Mapping(world_size=2, tp_size=2)
    assert [state.bytes_per_token for state in states.target] == [LATENT_BYTES] * 4
    assert states.replicated_bytes_per_token == states.shard(mapping).replicated_bytes_per_token == 4 * LATENT_BYTES
    of_draft = sum(state.bytes_per_token for state in states.draft)
    assert states.shard(mapping).bytes_per_token == 4 * LATENT_BYTES + of_draft // 2


def test_fp8_pages_hold_a_quarter_and_stay_near(tmp_path: Path) -> None:
    """Without experts, of which a small error chooses others."""
    root = make_pair(tmp_path, first_k_dense_replace=4)
    write_calibration_prompts(root)
    section = {"kv_cache": "fp8", "draft_kv_cache": "none", "calibration": {"prompts": "prompts.jsonl"}}
    exact = make_executor(root / "target").target_logits(LONG)
    with opened(build(root, tp_size=1, quantization=section, overwrite=True)) as executor:
        found = executor.target_logits(LONG)
        assert executor.page_plan.target_bytes_per_token == LATENT_BYTES  # of 4 layers
        assert 0.01 < (found - exact).abs().max() < FP8_TOLERANCE
        cache = executor._state.target_kv[1]
        assert cache.spec.scales is not None
        doubled = replace(cache, spec=replace(cache.spec, scales=LayerKvScales(k=cache.spec.scales.k / 100)))
        executor._state.target_kv[1] = doubled  # the negative control: a scale under which most numbers saturate
        assert (executor.target_logits(LONG) - exact).abs().max() > 2 * FP8_TOLERANCE
    with opened(build(root, tp_size=2, quantization=section, overwrite=True)) as two:
        torch.testing.assert_close(two.target_logits(LONG), found, rtol=0, atol=0.2)


def test_prefix_hits_change_no_token(root: Path) -> None:
    """Pages of latents are shared by token position, as those of K and V."""
    engine = build(root, tp_size=1, overwrite=True)
    with LLM(engine.path, kv_cache_bytes=1 << 20, num_threads=1) as llm:
        assert llm.config.enable_prefix_caching is True
        first, second = (llm.generate([{"prompt_token_ids": LONG[:40]}])[0].token_ids for _ in range(2))
    assert first == second


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_contexts_that_an_indexer_would_thin_out_are_refused(tmp_path: Path, family: str) -> None:
    make_zlab_drafter(tmp_path / "drafter", target_dir=tiny_target(tmp_path / "target", family=family, index_topk=32))
    assert open_pair(tmp_path / "target", None).target.max_position_embeddings == 32
    with pytest.raises(ConfigError, match=r"max_seq_len: expected .*32"):
        build(tmp_path, tp_size=1, max_seq_len=33)
    build(tmp_path, tp_size=1, max_seq_len=32)


@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_kimi_is_read_as_published(tmp_path: Path, prefix: str) -> None:
    """With a vision tower, as Kimi-K2.5, and without, as Kimi-K2; behind the last layer is one that drafts."""
    plain = tiny_target(tmp_path / "plain", family="deepseek_v3", n_group=1, topk_group=1)
    expected = transformers_tokens(plain)
    fields = read_json(plain / "config.json") | {"model_type": "kimi_k2", "num_beams": 1, "typical_p": 1.0}
    outer: dict[str, Any] = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    kimi = tmp_path / "kimi"
    kimi.mkdir()
    write_json(kimi / "config.json", outer | {"text_config": fields, "vision_config": {}} if prefix else fields)
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(plain / "model.safetensors").items()}
    tensors[f"{prefix}model.layers.4.eh_proj.weight"] = torch.zeros(3)
    if prefix:
        tensors |= {name: torch.zeros(3) for name in ("vision_tower.blocks.0.norm.weight", "mm_projector.proj.bias")}
    save_file(tensors, kimi / "model.safetensors", {"format": "pt"})
    assert open_pair(kimi, None).target.family == "kimi_k2"
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=plain)
    assert decode(make_executor(kimi, drafter), PROMPT, NUM_NEW, num_draft_tokens=3).tokens[:NUM_NEW] == expected
