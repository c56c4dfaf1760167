"""A Speculators config: taps numbered one higher, a vocabulary of its own, and its own rule of causality."""

from pathlib import Path
from typing import Any

import pytest

from dflash_trt.core.model.gqa import AttentionMask
from tests.checkpoint.refusals import Copy, draft_refusal, read_draft_spec, remove_keys
from tests.factories import edit_json, make_speculators_drafter, read_json
from tests.specs import Flat

FULL = AttentionMask(is_causal=False)
SLIDING = AttentionMask(window=8, is_causal=False, is_window_anchored=True)
SLIDING_CAUSAL = AttentionMask(window=8, is_causal=True, is_window_anchored=True)
T = ("sliding_attention", "full_attention")


def test_a_speculators_drafter_is_read(checkpoints: Path) -> None:
    spec = read_draft_spec(checkpoints / "speculators", target=None)
    assert spec.source_format == "speculators"
    assert read_json(checkpoints / "speculators" / "config.json")["aux_hidden_state_layer_ids"] == [1, 3]
    assert spec.target_layer_ids == (0, 2)  # one lower than in the file
    assert (spec.draft_vocab_size, spec.target_vocab_size, spec.has_own_embedding) == (64, 272, False)
    assert Flat(spec).masks == (FULL, FULL)


@pytest.mark.parametrize(
    ("non_causal", "expected"),
    [(None, (SLIDING_CAUSAL, FULL)), (False, (SLIDING_CAUSAL, FULL)), (True, (SLIDING, FULL))],
)
def test_speculators_sliding_layers_are_causal_unless_told_otherwise_and_full_ones_never(
    checkpoints: Path, tmp_path: Path, non_causal: bool | None, expected: tuple[AttentionMask, ...]
) -> None:
    drafter = make_speculators_drafter(
        tmp_path / "d",
        target_dir=checkpoints / "qwen3",
        layer_types=T,
        sliding_window=8,
        sliding_window_non_causal=non_causal,
    )
    assert Flat(read_draft_spec(drafter, target=None)).masks == expected


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("has_embedding", [False, True])
def test_a_full_vocabulary_uses_the_target_s_head_unless_the_drafter_ships_one(
    checkpoints: Path, tmp_path: Path, has_head: bool, has_embedding: bool
) -> None:
    drafter = make_speculators_drafter(
        tmp_path / "d",
        target_dir=checkpoints / "qwen3",
        draft_vocab_size=272 if has_head else None,
        has_own_embedding=has_embedding,
    )
    spec = read_draft_spec(drafter, target=None)
    assert spec.draft_vocab_size == (272 if has_head else None)
    assert spec.has_own_embedding == has_embedding


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sample_from_anchor", True),
        ("speculators_model_type", "xpress"),
        ("speculators_model_type", None),
        ("quantization_config", {}),
        ("aux_hidden_state_layer_ids", [0, 2]),
        ("aux_hidden_state_layer_ids", None),
        ("aux_hidden_state_layer_ids", []),
        ("mask_token_id", None),
        ("draft_vocab_size", 273),
        ("block_size", 1),
        ("transformer_layer_config", None),
        ("transformer_layer_config", []),
        ("speculators_config", {"algorithm": "eagle3"}),
        ("norm_before_fc", True),
    ],
)
def test_what_speculators_can_do_and_we_cannot_is_refused(copy_of: Copy, key: str, value: Any) -> None:
    drafter = copy_of("speculators")
    edit_json(drafter / "config.json", **{key: value})
    assert f"drafter config.json key '{key}" in draft_refusal(drafter)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("model_type", "gpt_oss"), ("mlp_bias", True), ("new_feature", 1), ("num_experts", 4)],
)
def test_what_a_speculators_layer_cannot_do_is_refused(copy_of: Copy, key: str, value: Any) -> None:
    drafter = copy_of("speculators")
    path = drafter / "config.json"
    edit_json(path, transformer_layer_config=read_json(path)["transformer_layer_config"] | {key: value})
    assert f"key 'transformer_layer_config.{key}': expected " in draft_refusal(drafter)


@pytest.mark.parametrize("architecture", ["DFlashDraftModel", "DFlashSpeculator"])
def test_speculators_files_are_known_by_their_model_type_not_by_their_architecture(
    copy_of: Copy, architecture: str
) -> None:
    drafter = copy_of("speculators")
    edit_json(drafter / "config.json", architectures=[architecture])
    assert read_draft_spec(drafter, target=None).source_format == "speculators"


def test_absent_speculators_fields_have_the_format_s_defaults(copy_of: Copy) -> None:
    drafter = copy_of("speculators")
    path = drafter / "config.json"
    remove_keys(path, "block_size", "draft_vocab_size", "speculators_config")
    edit_json(path, transformer_layer_config=read_json(path)["transformer_layer_config"] | {"vocab_size": 151936})
    spec = read_draft_spec(drafter, target=None)
    assert (spec.draft_block_size, spec.draft_vocab_size) == (8, 32000)
