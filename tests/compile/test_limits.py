from typing import Any

import pytest

from dflash_trt.compile.description import resolve_limits
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.core.model.rope import RopeSpec
from tests.specs import layered

DECODER: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope": RopeSpec(theta=1e4),
    "has_qk_norm": True,
}


def _target(max_position_embeddings: int) -> TargetSpec:
    fields = layered((AttentionMask(),), **DECODER, max_position_embeddings=max_position_embeddings)
    return TargetSpec(family="qwen3", vocab_size=32, is_embedding_tied=True, **fields)


def _draft(max_position_embeddings: int, draft_block_size: int = 8) -> DraftSpec:
    fields = layered((AttentionMask(),), **DECODER, max_position_embeddings=max_position_embeddings)
    return DraftSpec(
        source_format="z-lab",
        target_layer_ids=(0,),
        target_hidden_size=8,
        target_vocab_size=32,
        draft_block_size=draft_block_size,
        mask_token_id=1,
        **fields,
    )


def _config(**fields: Any) -> BuildConfig:
    return BuildConfig(target="t", drafter="d", **fields)


def test_limits_left_open_are_what_both_checkpoints_allow() -> None:
    limits, notes = resolve_limits(_config(), _target(4096), _draft(8192))
    assert (limits.max_seq_len, limits.max_draft_len) == (4096, 7)
    assert notes == []


def test_a_drafter_that_shortens_the_sequences_is_noted() -> None:
    limits, notes = resolve_limits(_config(), _target(8192), _draft(4096))
    assert limits.max_seq_len == 4096
    assert "the drafter's max_position_embeddings; the target alone allows 8192" in notes[0]


def test_a_step_too_small_for_a_full_batch_is_noted() -> None:
    _, notes = resolve_limits(_config(max_batch_size=64, max_num_tokens=511), _target(64), _draft(64))
    assert "max_num_tokens 511 is less than max_batch_size 64 * (max_draft_len 7 + 1)" in notes[0]
    assert resolve_limits(_config(max_batch_size=64, max_num_tokens=512), _target(64), _draft(64))[1] == []


def test_limits_asked_for_are_kept() -> None:
    limits, _ = resolve_limits(_config(max_seq_len=100, max_draft_len=0, page_size=16), _target(4096), _draft(4096))
    assert (limits.max_seq_len, limits.max_draft_len, limits.page_size) == (100, 0, 16)


def test_limits_beyond_the_checkpoints_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_limits(_config(max_seq_len=5000, max_draft_len=8), _target(8192), _draft(4096))
    assert "max_seq_len: expected at most 4096 (the drafter's max_position_embeddings), found 5000" in str(caught.value)
    assert "max_draft_len: expected at most 7 (the drafter's block size - 1), found 8" in str(caught.value)


def test_an_engine_without_a_drafter_drafts_nothing() -> None:
    config = BuildConfig(target="t")
    assert resolve_limits(config, _target(64), None)[0].max_draft_len == 0
    with pytest.raises(ConfigError, match=r"expected at most 0 \(there is no drafter\)"):
        resolve_limits(BuildConfig(target="t", max_draft_len=1), _target(64), None)
