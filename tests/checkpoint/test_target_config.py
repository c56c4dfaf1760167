"""A target's config: read as transformers reads it, or refused by the name of the key."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, Qwen3Config

from dflash_trt.checkpoint.foreign_keys import MTP_KEYS, ON_BY_DEFAULT
from dflash_trt.checkpoint.target_config import parse_target
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.core.model.rope import RopeSpec
from tests.checkpoint.refusals import Copy, read_target_spec, remove_keys, target_refusal
from tests.factories import Family, edit_json, make_target, read_json, write_json
from tests.gemma_targets import make_gemma
from tests.specs import Flat

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_SCALING = {"factor": 4.0, "original_max_position_embeddings": 128}


def test_a_qwen3_target_is_read_with_qk_norms_and_without_biases(checkpoints: Path) -> None:
    spec = read_target_spec(checkpoints / "qwen3")
    flat = Flat(spec)
    assert (spec.family, spec.num_layers, flat.num_heads, flat.num_kv_heads, flat.head_dim) == ("qwen3", 4, 4, 2, 16)
    flat = Flat(spec)
    assert (flat.has_qk_norm, flat.has_qkv_bias, flat.has_o_bias, flat.has_mlp_bias) == (True, False, False, False)
    assert Flat(spec).masks == (AttentionMask(),) * 4
    assert Flat(spec).rope == RopeSpec(theta=10000.0)


def test_a_llama_target_is_read_with_its_biases_and_without_qk_norms(checkpoints: Path) -> None:
    spec = read_target_spec(checkpoints / "llama")
    assert spec.family == "llama"
    flat = Flat(spec)
    assert (flat.has_qk_norm, flat.has_qkv_bias, flat.has_o_bias, flat.has_mlp_bias) == (False, True, True, True)


def test_qwen3_attention_bias_covers_q_k_v_and_o(copy_of: Copy) -> None:
    target = copy_of("qwen3")
    edit_json(target / "config.json", attention_bias=True)
    spec = read_target_spec(target)
    flat = Flat(spec)
    assert (flat.has_qkv_bias, flat.has_o_bias, flat.has_mlp_bias) == (True, True, False)


def test_head_dim_and_kv_heads_have_hugging_face_defaults(copy_of: Copy) -> None:
    target = copy_of("llama")
    edit_json(target / "config.json", head_dim=None, num_key_value_heads=None)
    spec = read_target_spec(target)
    flat = Flat(spec)
    assert (flat.head_dim, flat.num_kv_heads) == (16, 4)


def test_tied_embeddings_are_read(copy_of: Copy) -> None:
    target = copy_of("llama")
    assert not read_target_spec(target).is_embedding_tied
    edit_json(target / "config.json", tie_word_embeddings=True)
    assert read_target_spec(target).is_embedding_tied


ROPES: list[tuple[dict[str, Any], RopeSpec]] = [
    ({"rope_type": "default"}, RopeSpec(theta=7e5)),
    ({"rope_type": "linear", "factor": 2.0}, RopeSpec(theta=7e5, scaling="linear", factor=2.0)),
    (
        {"rope_type": "llama3", **LLAMA3_SCALING},
        RopeSpec(
            theta=7e5,
            scaling="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
    ),
    (
        {"rope_type": "yarn", **YARN_SCALING},
        RopeSpec(theta=7e5, scaling="yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    (
        {
            "rope_type": "yarn",
            **YARN_SCALING,
            "beta_fast": 16,
            "beta_slow": 2,
            "attention_factor": 1.5,
            "mscale": 0.5,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
        RopeSpec(
            theta=7e5,
            scaling="yarn",
            factor=4.0,
            original_max_position_embeddings=128,
            beta_fast=16.0,
            beta_slow=2.0,
            attention_factor=1.5,
            mscale=0.5,
            mscale_all_dim=0.7,
            truncates_correction_range=False,
        ),
    ),
]


@pytest.mark.parametrize(("scaling", "expected"), ROPES)
@pytest.mark.parametrize("schema", ["rope_parameters", "rope_scaling", "legacy type"])
def test_rope_is_the_same_in_every_schema(
    copy_of: Copy, schema: str, scaling: dict[str, Any], expected: RopeSpec
) -> None:
    target = copy_of("llama")
    if schema == "rope_parameters":
        edit_json(target / "config.json", rope_parameters={"rope_theta": 7e5, **scaling})
    else:
        old = dict(scaling)
        if schema == "legacy type":
            old["type"] = old.pop("rope_type")
        edit_json(target / "config.json", rope_parameters=None, rope_theta=7e5, rope_scaling=old)
    assert Flat(read_target_spec(target)).rope == expected


def test_a_llama_file_older_than_rope_theta_has_hugging_face_s_default(copy_of: Copy) -> None:
    target = copy_of("llama")
    remove_keys(target / "config.json", "rope_parameters")
    assert Flat(read_target_spec(target)).rope.theta == LlamaConfig().default_theta == 10000.0


def test_a_qwen3_file_without_rope_theta_is_refused(copy_of: Copy) -> None:
    target = copy_of("qwen3")
    remove_keys(target / "config.json", "rope_parameters")
    assert "'rope_theta': expected a value, found nothing" in target_refusal(target)


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_parameters.rope_type"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "rope_parameters.rope_type"),
        ({"type": "mrope", "mrope_section": [1]}, "rope_parameters.type"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "rope_parameters.mrope_section"),
        ({"rope_type": "linear"}, "rope_parameters.factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "rope_parameters.type"),
        ({"full_attention": {"rope_type": "default"}}, "rope_parameters.full_attention"),
    ],
)
def test_a_rope_that_is_not_implemented_is_refused(copy_of: Copy, rope: dict[str, Any], key: str) -> None:
    target = copy_of("llama")
    edit_json(target / "config.json", rope_parameters={"rope_theta": 1e4, **rope})
    assert f"key '{key}'" in target_refusal(target)


def test_original_positions_that_a_config_leaves_out_are_those_of_transformers(copy_of: Copy) -> None:
    target = copy_of("llama")
    edit_json(target / "config.json", rope_parameters={"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0})
    theirs = LlamaConfig.from_pretrained(target).rope_parameters["original_max_position_embeddings"]
    notes: list[str] = []
    spec = parse_target(target, [], notes=notes)
    assert spec is not None and Flat(spec).rope.original_max_position_embeddings == theirs
    assert notes == [
        "target config.json key 'rope_parameters.original_max_position_embeddings' is absent: "
        f"max_position_embeddings, {theirs}, as in transformers"
    ]


def test_two_different_thetas_are_refused(copy_of: Copy) -> None:
    target = copy_of("qwen3")
    edit_json(target / "config.json", rope_theta=5e5)
    assert "key 'rope_theta': expected 10000.0" in target_refusal(target)
    edit_json(target / "config.json", rope_theta=10000)
    assert Flat(read_target_spec(target)).rope.theta == 10000.0


def test_two_different_rope_schemas_are_refused(copy_of: Copy) -> None:
    target = copy_of("qwen3")
    edit_json(target / "config.json", rope_scaling={"type": "linear", "factor": 2.0})
    assert "key 'rope_scaling': expected no such key besides rope_parameters" in target_refusal(target)


WINDOWS: list[dict[str, Any]] = [
    {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2, "layer_types": None},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "layer_types": None},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4, "layer_types": None},
    {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 4},
]


@pytest.mark.parametrize("fields", WINDOWS)
def test_qwen3_windows_are_those_of_transformers(copy_of: Copy, fields: dict[str, Any]) -> None:
    target = copy_of("qwen3")
    edit_json(target / "config.json", **fields)
    reference = Qwen3Config.from_pretrained(target)
    assert reference.layer_types is not None
    expected = [reference.sliding_window if kind == "sliding_attention" else None for kind in reference.layer_types]
    spec = read_target_spec(target)
    assert [layer.window for layer in Flat(spec).masks] == expected
    assert all(layer.is_causal for layer in Flat(spec).masks)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        (
            {"use_sliding_window": False, "sliding_window": 8, "layer_types": ["sliding_attention"] * 4},
            "use_sliding_window",
        ),
        (
            {"use_sliding_window": True, "sliding_window": None, "layer_types": ["sliding_attention"] * 4},
            "sliding_window",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": None},
            "max_window_layers",
        ),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
    ],
)
def test_windows_that_contradict_each_other_are_refused(copy_of: Copy, fields: dict[str, Any], key: str) -> None:
    target = copy_of("qwen3")
    edit_json(target / "config.json", **fields)
    assert f"key '{key}'" in target_refusal(target)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [("deepseek_v4", "hyper-connections"), ("muse_glimmer", "a kind of its own"), ("kimi_k3", "delta attention")],
)
def test_a_known_family_is_refused_with_what_it_would_need(copy_of: Copy, model_type: str, words: str) -> None:
    target = copy_of("qwen3")
    fields = read_json(target / "config.json") | {"model_type": model_type, "architectures": ["OtherForCausalLM"]}
    write_json(target / "config.json", fields)
    assert words in target_refusal(target)
    write_json(target / "config.json", {"architectures": ["Seeing"], "model_type": "x", "text_config": fields})
    assert words in target_refusal(target)


REFUSED: list[tuple[str, str, Any]] = [
    ("llama", "architectures", ["GPTNeoXForCausalLM"]),
    ("llama", "architectures", ["MixtralForCausalLM"]),
    ("llama", "architectures", None),
    ("llama", "architectures", ["LlamaForCausalLM", "Other"]),
    ("llama", "model_type", "qwen3"),
    ("llama", "quantization_config", {"quant_method": "gptq"}),
    ("llama", "hidden_act", "gelu"),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "pretraining_tp", 2),
    ("llama", "pretraining_tp", True),
    ("llama", "sliding_window", 4096),
    ("llama", "rope_interleaved", True),
    ("llama", "final_logit_softcapping", 30.0),
    ("llama", "attn_logit_softcapping", 50.0),
    ("llama", "embedding_multiplier", 12.0),
    ("llama", "num_local_experts", 8),
    ("llama", "per_layer_config", {"0": {"head_dim": 32}}),
    ("llama", "no_rope_layers", [1, 0]),
    ("qwen3", "num_experts", 64),
    ("qwen3", "mlp_bias", True),
    ("qwen3", "is_encoder_decoder", True),
    ("qwen3", "num_hidden_layers", 0),
    ("qwen3", "num_hidden_layers", True),
    ("qwen3", "num_hidden_layers", 10**12),
    ("qwen3", "vocab_size", 2**31),
    ("qwen3", "hidden_size", "64"),
    ("qwen3", "hidden_size", None),
    ("qwen3", "num_key_value_heads", 3),
    ("qwen3", "head_dim", 15),
    ("qwen3", "rms_norm_eps", -1e-6),
    ("qwen3", "rms_norm_eps", 10**400),
    ("qwen3", "rms_norm_eps", float("nan")),
    ("qwen3", "attention_bias", "yes"),
    ("qwen3", "eos_token_id", [0, "1"]),
    ("qwen3", "rope_parameters", [1.0]),
]


@pytest.mark.parametrize(("family", "key", "value"), REFUSED)
def test_what_is_not_implemented_is_refused_by_name(copy_of: Copy, family: str, key: str, value: Any) -> None:
    target = copy_of(family)
    read_target_spec(target)
    edit_json(target / "config.json", **{key: value})
    message = target_refusal(target)
    assert f"target config.json key '{key}': expected " in message
    assert ", found " in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partial_rotary_factor", 1.0),
        ("rope_interleaved", False),
        ("torch_dtype", "bfloat16"),
        ("pad_token_id", 3),
        ("attention_dropout", 0.1),
        ("quantization_config", None),
        ("brand_new_feature", None),
        ("brand_new_feature", False),
        ("brand_new_feature", []),
        ("brand_new_feature", {}),
        *((key, 2) for key in MTP_KEYS),
    ],
)
def test_what_changes_nothing_is_accepted(copy_of: Copy, key: str, value: Any) -> None:
    target = copy_of("llama")
    before = read_target_spec(target)
    edit_json(target / "config.json", **{key: value})
    assert read_target_spec(target) == before


@pytest.mark.parametrize("value", [0, "", True, [0], {"factor": 1.0}])
def test_an_unknown_key_that_asks_for_something_is_refused(copy_of: Copy, value: Any) -> None:
    target = copy_of("llama")
    edit_json(target / "config.json", brand_new_feature=value)
    assert "key 'brand_new_feature': expected no such key" in target_refusal(target)


@pytest.mark.parametrize("key", ON_BY_DEFAULT)
def test_false_takes_away_a_part_that_a_family_has_without_it(copy_of: Copy, key: str) -> None:
    target = copy_of("llama")
    edit_json(target / "config.json", **{key: False})
    assert f"key '{key}': expected no such key, found false" in target_refusal(target)


CONTRADICTIONS: list[tuple[Family, dict[str, Any], str]] = [
    ("deepseek_v3", {"qk_head_dim": 32}, "qk_head_dim"),
    ("deepseek_v3", {"moe_router_dtype": "bfloat16"}, "moe_router_dtype"),
    ("llama4_text", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ("llama4_text", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    (
        "llama4_text",
        {"layer_types": ["chunked_attention"] * 3 + ["full_attention"], "no_rope_layers": [1, 0, 1, 0]},
        "layer_types",
    ),
]


@pytest.mark.parametrize(("family", "fields", "named"), CONTRADICTIONS)
def test_a_contradiction_is_refused_by_name(tmp_path: Path, family: Family, fields: dict[str, Any], named: str) -> None:
    target = make_target(tmp_path, family=family, tokenizer=False)
    read_target_spec(target)
    edit_json(target / "config.json", **fields)
    assert f"key '{named}': expected " in target_refusal(target)


def test_layers_without_keys_and_values_read_the_last_of_their_kind_that_has_them(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    fields: dict[str, Any] = {"num_hidden_layers": 6, "layer_types": kinds, "num_kv_shared_layers": 2}
    spec = read_target_spec(make_gemma(tmp_path, family="gemma4_text", **fields))
    assert [gqa.shares_kv_with for gqa in spec.attentions] == [None, None, None, None, 2, 3]


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
def test_an_interval_of_full_layers_is_read_as_in_transformers(tmp_path: Path, interval: int) -> None:
    target = make_target(tmp_path, family="qwen3_next", tokenizer=False)
    edit_json(target / "config.json", full_attention_interval=interval)
    remove_keys(target / "config.json", "layer_types")
    kinds = AutoConfig.from_pretrained(target).layer_types
    found = [isinstance(layer.mixer, GatedDelta) for layer in read_target_spec(target).layers]
    assert found == [kind == "linear_attention" for kind in kinds]


def test_an_unknown_key_is_refused_with_the_nearest_known_one(copy_of: Copy) -> None:
    target = copy_of("qwen3")
    edit_json(target / "config.json", use_sliding_windows=True)
    message = target_refusal(target)
    assert "key 'use_sliding_windows': expected no such key" in message
    assert "Did you mean 'use_sliding_window'?" in message


def test_all_problems_of_a_config_come_in_one_error(copy_of: Copy) -> None:
    target = copy_of("qwen3")
    edit_json(target / "config.json", hidden_act="gelu", hidden_size=None, brand_new_feature=1)
    message = target_refusal(target)
    assert "3 problems" in message
    assert all(f"'{key}'" in message for key in ("hidden_act", "hidden_size", "brand_new_feature"))


def test_eos_ids_of_generation_config_come_before_those_of_config(copy_of: Copy) -> None:
    target = copy_of("qwen3")
    edit_json(target / "config.json", eos_token_id=5)
    edit_json(target / "generation_config.json", eos_token_id=[6, 7])
    assert read_target_spec(target).eos_token_ids == (6, 7)
    edit_json(target / "generation_config.json", eos_token_id=8)
    assert read_target_spec(target).eos_token_ids == (8,)
    remove_keys(target / "generation_config.json", "eos_token_id")
    assert read_target_spec(target).eos_token_ids == (5,)
    (target / "generation_config.json").unlink()
    assert read_target_spec(target).eos_token_ids == (5,)


def test_special_tokens_outside_the_vocabulary_are_refused(copy_of: Copy) -> None:
    target = copy_of("qwen3")
    edit_json(target / "generation_config.json", eos_token_id=[0, 272])
    assert "expected ids below vocab_size 272, found (0, 272)" in target_refusal(target)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "Expecting"),
        ("[1]", "a JSON list"),
        ('{"a": 1, "a": 2}', "key 'a' 2 times in one object"),
        ("[" * 100_000, "nested too deeply"),
        ("\x00", "Expecting"),
    ],
)
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert found in target_refusal(tmp_path)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff\xfe"}')
    assert "expected a JSON object" in target_refusal(tmp_path)


def test_a_config_that_cannot_be_read_is_refused(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(_: Path) -> bytes:
        raise PermissionError("Permission denied")

    monkeypatch.setattr(Path, "read_bytes", deny)
    assert "target config.json: expected a JSON object, found Permission denied" in target_refusal(
        checkpoints / "qwen3"
    )


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    assert "target config.json: expected a file, found none" in target_refusal(tmp_path)


def test_a_real_llama_3_1_config_is_read(tmp_path: Path) -> None:
    """The key set that meta-llama/Llama-3.1-8B-Instruct was published with."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    spec = read_target_spec(tmp_path)
    flat = Flat(spec)
    assert (flat.head_dim, flat.rope.scaling, flat.rope.theta) == (128, "llama3", 500000.0)
    assert spec.eos_token_ids == (128001, 128008, 128009)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rms_norm_eps": 1e30}, "rms_norm_eps: expected less than or equal to 0.1, found 1e+30"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps: expected greater than or equal to"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps': expected a positive number, found NaN"),
        ({"rms_norm_eps": float("inf")}, "'rms_norm_eps': expected a positive number, found Infinity"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope.theta: expected greater than or equal to 2"),
        ({"rope_parameters": {"rope_theta": 1e300}}, "rope.theta: expected less than or equal to"),
        (
            {"rope_parameters": {"rope_theta": float("-inf")}},
            "rope_theta': expected a positive number, found -Infinity",
        ),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5}}, "rope.factor: expected"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3_SCALING, "low_freq_factor": 5.0}},
            "rope.high_freq_factor: expected at least low_freq_factor 5.0, found 4.0",
        ),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1.0}},
            "rope.theta: expected greater than or equal to 2, found 1.0",
        ),
        (
            {"rope_parameters": {**YARN, "beta_slow": 64.0}},
            "expected beta_fast of at least beta_slow (not 32.0 and 64.0)",
        ),
        ({"rope_parameters": {**YARN, "attention_factor": 1e30}}, "rope.attention_factor: expected less than"),
        ({"head_dim": 15}, "'head_dim': expected an even number, found 15"),
        ({"hidden_size": 0}, "'hidden_size': expected an integer in 1..2147483647, found 0"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers': expected an integer in 1..1000"),
        ({"vocab_size": 2**31}, "'vocab_size': expected an integer in 1..2147483647"),
        ({"sliding_window": -1}, "'sliding_window': expected an integer in 1..2147483647, found -1"),
    ],
)
def test_numbers_that_would_compute_something_else_are_refused(
    copy_of: Copy, changes: dict[str, Any], said: str
) -> None:
    target = copy_of("qwen3")
    edit_json(target / "config.json", **changes)
    assert said in target_refusal(target)


def test_very_many_unknown_keys_are_counted_not_looked_up(copy_of: Copy) -> None:
    target = copy_of("qwen3")
    edit_json(target / "config.json", **{f"key_{i}": i for i in range(20_000)})
    started_s = time.monotonic()
    message = target_refusal(target)
    assert time.monotonic() - started_s < 5
    assert "19984 more unknown keys" in message
    assert len(message.splitlines()) < 20


@pytest.mark.parametrize(
    ("is_nested", "fields", "said"),
    [
        (False, {}, None),
        (False, {"num_nextn_predict_layers": 0, "use_mtp": False, "mtp_layers_block_type": []}, None),
        (False, {"num_nextn_predict_layers": 1}, "its own drafting layers (num_nextn_predict_layers 1)"),
        (True, {}, "images, video and audio"),
        (
            True,
            {"mtp_num_hidden_layers": 1, "use_mtp": True},
            "images, video and audio and its own drafting layers (mtp_num_hidden_layers 1, use_mtp true)",
        ),
    ],
)
def test_parts_that_do_not_run_are_said_once(
    copy_of: Copy, is_nested: bool, fields: dict[str, Any], said: str | None
) -> None:
    target = copy_of("qwen3")
    config = read_json(target / "config.json") | fields
    if is_nested:
        config = {"architectures": config["architectures"], "text_config": config, "vision_config": {"depth": 2}}
    write_json(target / "config.json", config)
    notes: list[str] = []
    problems: list[str] = []
    parse_target(target, problems, notes=notes)
    assert problems == []
    expected = [] if said is None else [f"target config.json: the engine runs the language model without {said}"]
    assert [note for note in notes if "without" in note] == expected


@pytest.mark.parametrize("makes_v_of_k", [True, False])
def test_sizes_of_gemma_4_by_layer_are_those_of_two_keys(tmp_path: Path, makes_v_of_k: bool) -> None:
    """transformers writes them by layer since 5.15."""
    sizes = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": makes_v_of_k}
    target = make_gemma(tmp_path, family="gemma4_text", **sizes)
    config = read_json(target / "config.json")
    layer = {"head_dim": 32} | ({"num_key_value_heads": 1} if makes_v_of_k else {})
    by_layer = {name: value for name, value in config.items() if name not in ("per_layer_config", *list(sizes)[:2])}
    by_layer |= {"per_layer_config": {"2": layer, "3": layer}}
    by_key = {name: value for name, value in by_layer.items() if name != "per_layer_config"} | sizes
    specs = []
    for written in (by_key, by_layer):
        write_json(target / "config.json", written)
        specs.append(read_target_spec(target))
    assert specs[0] == specs[1]
    assert [x.head_dim for x in specs[1].attentions] == [16, 16, 32, 32]
    assert [x.num_kv_heads for x in specs[1].attentions] == [2, 2, *([1, 1] if makes_v_of_k else [2, 2])]


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ({"2": {"head_dim": 32}}, "per_layer_config': expected the same sizes in every layer of full attention"),
        ({"0": {"head_dim": 32}}, "per_layer_config.0'"),
        ({"2": {"hidden_size": 32}, "3": {}}, "per_layer_config.2.hidden_size'"),
        ([32, 32], "per_layer_config': expected a JSON object"),
    ],
)
def test_other_sizes_by_layer_are_refused(tmp_path: Path, layers: Any, named: str) -> None:
    target = make_gemma(tmp_path, family="gemma4_text")
    edit_json(target / "config.json", per_layer_config=layers)
    assert named in target_refusal(target)
