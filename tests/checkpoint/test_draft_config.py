"""A drafter's config, in every format of the field: understood exactly, or refused by the name of the key."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Qwen3Config

from dflash_trt.checkpoint.draft_config import parse_draft
from dflash_trt.checkpoint.drafters.zlab import default_target_layer_ids
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.model.dflash2 import BlockConv, CandidateSelector
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.core.model.rope import RopeSpec
from tests.checkpoint.refusals import Copy, draft_refusal, edit_dflash, read_draft_spec, read_target_spec, remove_keys
from tests.factories import edit_json, make_zlab_drafter, read_json, write_json
from tests.specs import Flat

PUBLISHED = Path(__file__).parent.parent / "data" / "drafter_configs"

FULL = AttentionMask(is_causal=False)
FULL_CAUSAL = AttentionMask(is_causal=True)
SLIDING = AttentionMask(window=8, is_causal=False)
SLIDING_CAUSAL = AttentionMask(window=8, is_causal=True)
GPT_OSS_ROPE = RopeSpec(  # of transformers' GptOssConfig
    theta=150000.0, scaling="yarn", factor=32.0, original_max_position_embeddings=4096, truncates_correction_range=False
)


# Published files

LOADED: dict[str, dict[str, Any]] = {
    "SpecForge__lfm2.5-1.2b-instruct-dflash": {"num_layers": 8, "target_layer_ids": (1, 4, 7, 10, 13), "head_dim": 64},
    "SpecForge__longcat-flash-dflash": {"num_layers": 5, "mask_token_id": 2, "target_vocab_size": 131072},
    "SpecForge__qwen2.5-0.5b-dflash": {"num_layers": 5, "hidden_size": 896, "num_heads": 14, "num_kv_heads": 2},
    "SpecForge__qwen3-4b-dflash": {"num_layers": 5, "target_layer_ids": (1, 9, 17, 25, 33), "mask_token_id": 151669},
    "SpecForge__qwen3-8b-dflash": {"num_layers": 5, "hidden_size": 4096, "draft_block_size": 16},
    "SpecForge__qwen3.5-35b-a3b-dflash": {"num_layers": 8, "num_kv_heads": 4, "num_target_layers": 40},
    "SpecForge__qwen3.5-4b-dflash": {"num_layers": 5, "mask_token_id": 248070, "num_target_layers": 32},
    "SpecForge__qwen3.6-27b-dflash": {
        "num_layers": 5,
        "masks": (AttentionMask(window=2048, is_causal=True),) * 4 + (FULL,),
        "target_layer_ids": (1, 16, 31, 46, 61),
    },
    "z-lab__gpt-oss-20b-DFlash": {
        "num_layers": 8,
        "masks": (FULL,) * 8,
        "rope": GPT_OSS_ROPE,
        "has_qkv_bias": True,
        "has_o_bias": True,
        "mask_token_id": 200000,
    },
    "z-lab__Qwen3-4B-DFlash-b16": {"num_layers": 5, "max_draft_len": 15, "masks": (FULL,) * 5},
    "z-lab__gemma-4-31B-it-DFlash": {
        "num_layers": 5,
        "masks": (AttentionMask(window=2048, is_causal=True),) * 4 + (FULL,),
        "target_layer_ids": (1, 12, 23, 35, 46, 57),
    },
    "z-lab__Qwen3.8-27B-DFlash2": {
        "algorithm": "dflash2",
        "max_draft_len": 7,
        "masks": (AttentionMask(window=2048, is_causal=False),) * 5,
        "conv": BlockConv(kernel_size=2, group_size=16),
        "selector": CandidateSelector(rank=256, top_k=16),
    },
    "z-lab__Muse-Glimmer-30B-DFlash2": {
        "algorithm": "dflash2",
        "max_draft_len": 15,
        "masks": (AttentionMask(window=2048, is_causal=False),) * 5,
        "selector": CandidateSelector(rank=256, top_k=16, output_multiplier=0.19611613513818404),
        "logit_softcap": 20.0,
    },
}

REFUSED: dict[str, tuple[str, ...]] = {
    "XiaomiMiMo__MiMo-V2.5-Pro-FP4-DFlash.dflash": (
        "attention_sink_bias",
        "attention_value_scale",
        "backbone_rotary_base",
        "partial_rotary_factor",
    )
}


def published(name: str, tmp_path: Path) -> Path:
    matches = [
        path for path in PUBLISHED.glob("*.json") if path.name.removesuffix(".json").removesuffix(".config") == name
    ]
    assert len(matches) == 1
    shutil.copyfile(matches[0], tmp_path / "config.json")
    return tmp_path


def test_every_published_config_has_an_expectation() -> None:
    names = {path.name.removesuffix(".json").removesuffix(".config") for path in PUBLISHED.glob("*.json")}
    assert names == set(LOADED) | set(REFUSED)


@pytest.mark.parametrize("name", LOADED)
def test_a_published_config_is_read(name: str, tmp_path: Path) -> None:
    spec = read_draft_spec(published(name, tmp_path), target=None)
    assert {field: getattr(Flat(spec), field) for field in LOADED[name]} == LOADED[name]
    assert spec.source_format == "z-lab"
    assert Flat(spec).has_qk_norm
    assert not spec.has_own_embedding
    assert spec.draft_vocab_size is None


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_with_an_unknown_feature_is_refused_by_its_keys(name: str, tmp_path: Path) -> None:
    message = draft_refusal(published(name, tmp_path))
    keys = {line.split("key '")[1].split("'")[0] for line in message.splitlines() if "key '" in line}
    assert keys == set(REFUSED[name])


def spec_and_notes(drafter: Path, **overrides: Any) -> tuple[DraftSpec, list[str]]:
    """The drafter as read with these overrides, and the notes about it."""
    problems: list[str] = []
    notes: list[str] = []
    spec = parse_draft(drafter, (), problems, notes=notes, overrides=overrides)
    assert problems == [] and spec is not None
    return spec, notes


def test_rope_of_the_published_gpt_oss_drafter_is_what_transformers_assumes(tmp_path: Path) -> None:
    drafter = published("z-lab__gpt-oss-20b-DFlash", tmp_path)
    theirs = AutoConfig.from_pretrained(drafter).rope_parameters
    spec, notes = spec_and_notes(drafter)
    stated = {name: value for name, value in theirs.items() if name != "rope_theta"}
    assert Flat(spec).rope == Flat(spec_and_notes(drafter, rope_scaling=stated)[0]).rope
    assert [note.split(":")[0] for note in notes] == [
        "the drafter's config.json has model_type gpt_oss and no rope_scaling",
        "the drafter's config.json has model_type gpt_oss and no layer_types",
    ]


def test_what_a_gpt_oss_drafter_leaves_open_may_be_overridden(tmp_path: Path) -> None:
    drafter = published("z-lab__gpt-oss-20b-DFlash", tmp_path)
    spec, notes = spec_and_notes(drafter, rope_scaling={"rope_type": "default"}, use_sliding_window=True)
    assert Flat(spec).rope == RopeSpec(theta=150000.0)
    assert Flat(spec).masks == (AttentionMask(window=128, is_causal=True), FULL) * 4
    kinds = ["full_attention" if layer.window is None else "sliding_attention" for layer in Flat(spec).masks]
    assert kinds == AutoConfig.from_pretrained(drafter).layer_types[:8]
    assert notes == [
        """drafter config.json key 'rope_scaling' is {"rope_type": "default"} instead of nothing, """
        "as drafter_overrides says",
        "drafter config.json key 'use_sliding_window' is true instead of nothing, as drafter_overrides says",
    ]
    edit_json(drafter / "config.json", use_sliding_window=False, rope_scaling={"rope_type": "default"})
    spec, notes = spec_and_notes(drafter)
    flat = Flat(spec)
    assert (flat.rope.scaling, flat.masks, notes) == ("none", (FULL,) * 8, [])


@pytest.mark.parametrize(
    ("overrides", "field", "expected"),
    [
        ({"rope_theta": 7000.0}, "rope", RopeSpec(theta=7000.0)),
        ({"mask_token_id": 5}, "mask_token_id", 5),  # where it stands: in dflash_config
        ({"dflash_config.mask_token_id": 5}, "mask_token_id", 5),
        ({"is_causal": True}, "masks", (FULL_CAUSAL,) * 2),
        ({"dflash_config.is_causal": True}, "masks", (FULL_CAUSAL,) * 2),
        ({"dflash_config.target_layer_ids": None}, "target_layer_ids", (1, 1)),
    ],
)
def test_an_override_replaces_a_key_where_it_stands(
    checkpoints: Path, overrides: dict[str, Any], field: str, expected: Any
) -> None:
    spec, notes = spec_and_notes(checkpoints / "zlab", **overrides)
    assert getattr(Flat(spec), field) == expected
    assert len(notes) == 1
    assert getattr(Flat(read_draft_spec(checkpoints / "zlab", target=None)), field) != expected


def test_an_override_reaches_the_layer_config_of_speculators(checkpoints: Path) -> None:
    spec, _ = spec_and_notes(checkpoints / "speculators", rms_norm_eps=1e-5)
    assert spec.rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"is_causl": True}, "key 'is_causl': expected no such key"),
        ({"hidden_size": "x"}, "key 'hidden_size': expected an integer"),
        ({"transformer_layer_config.hidden_size": 1}, "key 'transformer_layer_config': expected no such key"),
    ],
)
def test_a_wrong_override_is_refused_like_the_key_itself(
    checkpoints: Path, overrides: dict[str, Any], said: str
) -> None:
    problems: list[str] = []
    assert parse_draft(checkpoints / "zlab", (), problems, notes=[], overrides=overrides) is None
    assert said in problems[0]


# z-lab's two schemas


def test_both_schemas_of_z_lab_give_the_same_spec(checkpoints: Path, tmp_path: Path) -> None:
    old = make_zlab_drafter(tmp_path / "old", target_dir=checkpoints / "qwen3", schema="old")
    new = make_zlab_drafter(tmp_path / "new", target_dir=checkpoints / "qwen3", schema="new")
    assert "block_size" in read_json(old / "config.json")
    assert "block_size" not in read_json(new / "config.json")
    assert read_draft_spec(old, target=None) == read_draft_spec(new, target=None)


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "is_causal"])
def test_a_key_is_found_at_the_top_level_and_in_dflash_config(copy_of: Copy, key: str) -> None:
    drafter = copy_of("zlab")
    edit_json(drafter / "config.json", is_causal=True)
    expected = read_draft_spec(drafter, target=None)
    fields = read_json(drafter / "config.json")
    top, nested = fields, fields["dflash_config"]
    source, destination = (top, nested) if key in top else (nested, top)
    destination[key] = source.pop(key)
    write_json(drafter / "config.json", fields)
    assert read_draft_spec(drafter, target=None) == expected


def test_a_key_that_differs_in_its_two_places_is_refused(copy_of: Copy) -> None:
    drafter = copy_of("zlab")
    edit_dflash(drafter, block_size=4)
    assert read_draft_spec(drafter, target=None).draft_block_size == 4
    edit_dflash(drafter, block_size=8)
    found = "key 'block_size': expected one value, found 4 at the top level and 8 in dflash_config"
    assert found in draft_refusal(drafter)


def test_the_order_of_target_layer_ids_is_kept(copy_of: Copy) -> None:
    drafter = copy_of("zlab")
    edit_dflash(drafter, target_layer_ids=[2, 0])
    assert read_draft_spec(drafter, target=None).target_layer_ids == (2, 0)


@pytest.mark.parametrize(
    ("num_target_layers", "num_taps", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (64, 5, (1, 16, 31, 46, 61)),
        (60, 6, (1, 12, 23, 35, 46, 57)),
        (48, 8, (1, 7, 14, 20, 26, 32, 39, 45)),
        (61, 6, (1, 12, 24, 35, 47, 58)),
        (36, 1, (18,)),
    ],
)
def test_default_taps_are_those_of_the_released_drafters(
    num_target_layers: int, num_taps: int, expected: tuple[int, ...]
) -> None:
    assert default_target_layer_ids(num_target_layers, num_taps) == expected


def test_absent_target_layer_ids_are_derived_from_num_target_layers(checkpoints: Path, tmp_path: Path) -> None:
    target = checkpoints / "qwen3"
    drafter = make_zlab_drafter(tmp_path / "d", target_dir=target, target_layer_ids=None, num_target_layers=36)
    assert read_draft_spec(drafter, target=None).target_layer_ids == (1, 33)
    edit_json(drafter / "config.json", num_target_layers=None)
    assert "key 'target_layer_ids': expected a list, or num_target_layers" in draft_refusal(drafter)


# What each query sees

T = ("sliding_attention", "full_attention")
CAUSALITY: list[tuple[dict[str, Any], tuple[AttentionMask, ...]]] = [
    # per-layer default
    ({}, (FULL, FULL)),
    ({"layer_types": None}, (FULL, FULL)),
    ({"layer_types": T, "sliding_window": 8}, (SLIDING_CAUSAL, FULL)),
    # explicit keys hold for every layer, is_causal before causal
    ({"is_causal": True}, (FULL_CAUSAL, FULL_CAUSAL)),
    ({"causal": True}, (FULL_CAUSAL, FULL_CAUSAL)),
    ({"causal": True, "is_causal": False}, (FULL, FULL)),
    ({"layer_types": T, "sliding_window": 8, "is_causal": False}, (SLIDING, FULL)),
    ({"layer_types": T, "sliding_window": 8, "is_causal": True}, (SLIDING_CAUSAL, FULL_CAUSAL)),
    ({"layer_types": T, "sliding_window": 8, "causal": False}, (SLIDING, FULL)),
    ({"layer_types": T, "sliding_window": 8, "causal": False, "is_causal": True}, (SLIDING_CAUSAL, FULL_CAUSAL)),
    # use_swa without layer_types
    ({"layer_types": None, "use_swa": True, "swa_window_size": 8}, (SLIDING, SLIDING)),
    ({"layer_types": None, "use_swa": True, "sliding_window": 8}, (SLIDING, SLIDING)),
    ({"layer_types": None, "use_swa": True, "sliding_window": 9, "swa_window_size": 8}, (SLIDING, SLIDING)),
    ({"layer_types": None, "use_swa": True, "swa_window_size": 8, "is_causal": True}, (SLIDING_CAUSAL,) * 2),
    ({"layer_types": None, "use_swa": True, "swa_window_size": 8, "causal": True}, (SLIDING_CAUSAL,) * 2),
    # use_swa beside layer_types says nothing new
    ({"layer_types": T, "use_swa": True, "sliding_window": 8, "swa_window_size": 8}, (SLIDING_CAUSAL, FULL)),
]


@pytest.mark.parametrize(("fields", "expected"), CAUSALITY)
def test_window_and_causality_are_resolved_per_layer(
    copy_of: Copy, fields: dict[str, Any], expected: tuple[AttentionMask, ...]
) -> None:
    drafter = copy_of("zlab")
    edit_json(drafter / "config.json", use_sliding_window="layer_types" in fields and bool(fields["layer_types"]))
    edit_json(drafter / "config.json", **{name: value for name, value in fields.items() if name != "causal"})
    if "causal" in fields:
        edit_dflash(drafter, causal=fields["causal"])
    assert Flat(read_draft_spec(drafter, target=None)).masks == expected


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"layer_types": T, "use_sliding_window": True}, "sliding_window"),
        ({"layer_types": T, "sliding_window": 8, "swa_window_size": 9, "use_sliding_window": True}, "swa_window_size"),
        ({"layer_types": T[1:] * 2, "use_swa": True, "swa_window_size": 8}, "use_swa"),
        ({"layer_types": None, "use_swa": True}, "swa_window_size"),
    ],
)
def test_windows_without_a_size_or_with_two_answers_are_refused(
    copy_of: Copy, fields: dict[str, Any], key: str
) -> None:
    drafter = copy_of("zlab")
    edit_json(drafter / "config.json", **fields)
    message = draft_refusal(drafter)
    assert f"key '{key}'" in message
    assert "problems" not in message


IMPLIED = {"layer_types": None, "use_sliding_window": True, "sliding_window": 8}
OPEN: list[tuple[dict[str, Any], tuple[AttentionMask, ...], str]] = [
    (
        {"layer_types": T, "sliding_window": 8, "use_sliding_window": None},
        (SLIDING_CAUSAL, FULL),
        "key 'use_sliding_window' is null: sliding layers have their window of 8 tokens",
    ),
    (
        {"layer_types": T, "sliding_window": 8, "use_sliding_window": False},
        (FULL_CAUSAL, FULL),
        "key 'use_sliding_window' is false: layers that layer_types calls sliding have no window",
    ),
    (IMPLIED | {"max_window_layers": 1}, (FULL, SLIDING_CAUSAL), "the last 1 of 2 layers slide"),
    (IMPLIED | {"max_window_layers": 0}, (SLIDING_CAUSAL,) * 2, "the last 2 of 2 layers slide"),
    (IMPLIED, (FULL, FULL), "the last 0 of 2 layers slide"),
    (IMPLIED | {"sliding_window": None}, (FULL, FULL), ""),
]


@pytest.mark.parametrize(("fields", "expected", "note"), OPEN)
def test_windows_that_a_file_leaves_open_are_chosen_with_a_note(
    copy_of: Copy, fields: dict[str, Any], expected: tuple[AttentionMask, ...], note: str
) -> None:
    drafter = copy_of("zlab")
    edit_json(drafter / "config.json", **fields)
    spec, notes = spec_and_notes(drafter)
    assert Flat(spec).masks == expected
    assert [note in found for found in notes] == ([True] if note else [])


@pytest.mark.parametrize("fields", [fields for fields, *_ in OPEN if fields["use_sliding_window"] is not None])
def test_windows_that_a_file_leaves_open_are_those_of_transformers(copy_of: Copy, fields: dict[str, Any]) -> None:
    drafter = copy_of("zlab")
    remove_keys(drafter / "config.json", "max_window_layers")
    edit_json(drafter / "config.json", **fields)
    theirs = Qwen3Config.from_pretrained(drafter)
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert [mask.window for mask in Flat(spec_and_notes(drafter)[0]).masks] == windows


def test_a_gpt_oss_drafter_that_transformers_has_saved_keeps_its_windows(tmp_path: Path) -> None:
    """GptOssConfig writes layer_types and a window, and knows no use_sliding_window."""
    drafter = published("z-lab__gpt-oss-20b-DFlash", tmp_path)
    theirs = AutoConfig.from_pretrained(drafter)
    saved = {name: getattr(theirs, name) for name in ("layer_types", "sliding_window", "rope_parameters")}
    edit_json(drafter / "config.json", **saved)
    spec, notes = spec_and_notes(drafter)
    assert Flat(spec).masks == (AttentionMask(window=128, is_causal=True), FULL) * 4
    assert Flat(spec).rope == GPT_OSS_ROPE
    assert len(notes) == 1 and "key 'use_sliding_window' is absent: sliding layers have their window of 128" in notes[0]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("conv_kernel_size", 5, "an integer in 1..4"),
        ("conv_group_size", 7, "a divisor of hidden_size 5120"),
        ("selector_top_k", 248321, "an integer in 1..248320"),
        ("selector_rank", None, "a value"),
    ],
)
def test_a_dflash2_key_out_of_range_is_refused_by_name(tmp_path: Path, key: str, value: Any, expected: str) -> None:
    drafter = published("z-lab__Qwen3.8-27B-DFlash2", tmp_path)
    edit_dflash(drafter, **{key: value})
    assert f"drafter config.json key '{key}': expected {expected}" in draft_refusal(drafter)


# What changes the algorithm

UNSUPPORTED: list[tuple[str, Any]] = [
    ("architectures", ["Gemma4DSparkModel"]),
    ("model_type", "deepseek_v3"),
    ("attention_sink_bias", True),
    ("attention_value_scale", 0.612),
    ("backbone_rotary_base", 5000000),
    ("conv_kernel_size", 2),
    ("eagle_aux_hidden_state_layer_ids", [0, 2]),
    ("final_logit_softcapping", -30.0),
    ("has_embed_tokens", True),
    ("has_lm_head", True),
    ("hidden_act", "gelu"),
    ("input_embedding_scale", 0.0),
    ("is_neox_style", False),
    ("is_neox_style", 1),
    ("markov_rank", 64),
    ("mask_token", "<|mask|>"),
    ("mlp_bias", True),
    ("output_multiplier", -1.0),
    ("output_multiplier", 0.0),
    ("partial_rotary_factor", 0.5),
    ("projector_type", "domino"),
    ("pure_draft_prefix_len", 1),
    ("quantization_config", {"quant_algo": "FP8"}),
    ("sample_from_anchor", True),
    ("selector_rank", 256),
    ("shift_label", True),
    ("some_new_feature", True),
    ("use_gemma_norm", True),
    ("use_qk_norm", False),
    ("v_head_dim", 16),
    ("num_local_experts", 8),
    ("block_size", 1),
    ("block_size", None),
]


@pytest.mark.parametrize("place", ["top level", "dflash_config"])
@pytest.mark.parametrize(("key", "value"), UNSUPPORTED)
def test_a_key_that_changes_the_algorithm_is_refused_by_name(copy_of: Copy, place: str, key: str, value: Any) -> None:
    drafter = copy_of("zlab")
    read_draft_spec(drafter, target=None)
    if place == "dflash_config" and key not in read_json(drafter / "config.json"):
        edit_dflash(drafter, **{key: value})
    else:
        edit_json(drafter / "config.json", **{key: value})
    message = draft_refusal(drafter)
    assert f"drafter config.json key '{key}': expected " in message
    assert "problems" not in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_sink_bias", False),
        ("attention_value_scale", 1.0),
        ("eagle_aux_hidden_state_layer_ids", [1, 3]),
        ("has_lm_head", False),
        ("is_neox_style", True),
        ("loss_decay_gamma", 7.0),
        ("num_anchors", 512),
        ("output_multiplier", 0.196),
        ("partial_rotary_factor", 1.0),
        ("sample_from_anchor", False),
        ("tie_word_embeddings", True),
        ("use_qk_norm", True),
        ("v_head_dim", 8),
    ],
)
def test_a_key_at_its_neutral_value_changes_nothing(copy_of: Copy, key: str, value: Any) -> None:
    drafter = copy_of("zlab")
    before = read_draft_spec(drafter, target=None)
    edit_json(drafter / "config.json", **{key: value})
    assert read_draft_spec(drafter, target=None) == before


def test_the_input_embedding_scale_is_read(copy_of: Copy) -> None:
    drafter = copy_of("zlab")
    assert read_draft_spec(drafter, target=None).input_embedding_scale == 1.0
    edit_dflash(drafter, input_embedding_scale=2.5)
    assert read_draft_spec(drafter, target=None).input_embedding_scale == 2.5


def test_attention_bias_covers_q_k_v_and_o(checkpoints: Path, tmp_path: Path) -> None:
    drafter = make_zlab_drafter(tmp_path / "d", target_dir=checkpoints / "qwen3", attention_bias=True)
    spec = read_draft_spec(drafter, target=None)
    flat = Flat(spec)
    assert (flat.has_qkv_bias, flat.has_o_bias, flat.has_mlp_bias) == (True, True, False)


def test_a_file_that_changes_the_drafter_is_refused(copy_of: Copy) -> None:
    drafter = copy_of("zlab")
    (drafter / "mask_embedding.pt").write_bytes(b"{}")
    assert "drafter file 'mask_embedding.pt': expected no such file" in draft_refusal(drafter)


@pytest.mark.parametrize("dflash_config", [None, [1], "x"])
def test_a_config_without_dflash_config_is_refused(copy_of: Copy, dflash_config: Any) -> None:
    drafter = copy_of("zlab")
    edit_json(drafter / "config.json", dflash_config=dflash_config)
    assert "key 'mask_token_id': expected a value" in draft_refusal(drafter)


# Against a target


def test_a_drafter_of_another_target_is_refused_when_the_target_is_given(checkpoints: Path, copy_of: Copy) -> None:
    drafter = copy_of("zlab")
    target = read_target_spec(checkpoints / "qwen3")
    read_draft_spec(drafter, target=target)
    edit_json(drafter / "config.json", num_target_layers=5)
    read_draft_spec(drafter, target=None)
    with pytest.raises(ConfigError, match=r"num_target_layers: expected 4 \(the target's\), found 5"):
        read_draft_spec(drafter, target=target)


def test_all_problems_of_a_drafter_come_in_one_error(copy_of: Copy) -> None:
    drafter = copy_of("zlab")
    edit_json(drafter / "config.json", is_neox_style=False, hidden_size=None, mask_tokens=3)
    message = draft_refusal(drafter)
    assert "3 problems" in message
    assert all(f"'{key}'" in message for key in ("is_neox_style", "hidden_size", "mask_tokens"))
    assert json.dumps("Did you mean 'mask_token'?")[1:-1] in message
