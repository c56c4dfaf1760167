"""Keys of families, changed one at a time, and what a spec has then."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import AutoConfig

from dflash_trt.checkpoint.target_config import parse_target
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.feed_forward import Moe
from tests.checkpoint.refusals import read_target_spec, target_refusal
from tests.factories import make_target, read_json, write_json
from tests.gemma_targets import Gemma, make_gemma

Config = dict[str, Any]
Write = Callable[..., Path]  # (family, keys; None: removed) -> a directory with a config.json


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Config]:
    found: dict[str, Config] = {}

    def config(family: Any) -> Config:
        if family not in found:
            path = tmp_path_factory.mktemp(family)
            made = make_gemma(path, family=family) if family in get_args(Gemma) else None
            made = made or make_target(path, family=family, tokenizer=False)
            found[family] = read_json(made / "config.json")
        return found[family]

    return config


@pytest.fixture
def write(configs: Callable[[str], Config], tmp_path: Path) -> Write:
    def written(family: str, **keys: Any) -> Path:
        fields = configs(family) | keys
        write_json(tmp_path / "config.json", {name: value for name, value in fields.items() if value is not None})
        return tmp_path

    return written


def windows(spec: TargetSpec) -> list[int | None]:
    return [gqa.mask.window for gqa in spec.attentions]


def experts(spec: TargetSpec) -> list[int]:
    return [i for i, layer in enumerate(spec.layers) if isinstance(layer.feed_forward, Moe)]


def moe(spec: TargetSpec) -> Moe:
    [found] = {layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, Moe)}
    return found


def chunks(spec: TargetSpec) -> list[int | None]:
    return [gqa.mask.chunk for gqa in spec.attentions]


def groups(spec: TargetSpec) -> tuple[int, int]:
    return moe(spec).num_groups, moe(spec).num_chosen_groups


def swiglu_limits(spec: TargetSpec) -> list[float | None]:
    return [layer.moe.limit for layer in spec.layers if layer.moe is not None]


def rotary_dim(spec: TargetSpec) -> int | None:
    return spec.attentions[0].rotary_dim


def full_attention(spec: TargetSpec) -> list[int]:
    return [i for i, layer in enumerate(spec.layers) if layer.mixer.kind == "gqa"]


def thetas(spec: TargetSpec) -> list[float]:
    return sorted({gqa.rope.theta for gqa in spec.attentions})


def per_layer_rows(spec: TargetSpec) -> int:
    assert spec.per_layer_embedding is not None
    return spec.per_layer_embedding.vocab_size


def positions(spec: TargetSpec) -> int:
    return spec.max_position_embeddings


def magnitude(spec: TargetSpec) -> float:
    """Of scores, beside the usual scale."""
    mla = spec.latents[0]
    return round(mla.scale * (mla.nope_dim + mla.rope_dim) ** 0.5, 6)


def yarn(factor: float, **keys: float) -> Config:
    section = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": factor}
    return {"rope_parameters": section | keys, "rope_scaling": None}


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
ONE_ROPE = {"rope_type": "default", "rope_theta": 5e5}  # also outside, as transformers writes it
FEW_ROWS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 11}
READ: list[tuple[str, Config, Callable[[TargetSpec], Any], Any]] = [
    ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}, windows, [6, None, 6, None]),
    ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 3}, windows, [6, 6, None, 6]),
    ("gemma3_text", {"layer_types": None}, windows, [6] * 4),
    ("gemma3_text", {"rope_parameters": ONE_ROPE | {"full_attention": ONE_ROPE}}, thetas, [1e4, 5e5]),
    ("gemma4_text", {"layer_types": ["sliding_attention"] * 4}, windows, [6, 6, 6, None]),
    ("gemma4_text", FEW_ROWS | {"vocab_size_per_layer_input": 12}, per_layer_rows, 12),  # as many as tokens
    ("mistral", {"sliding_window": 7}, windows, [7] * 4),
    ("mistral", {"sliding_window": None}, windows, [4096] * 4),
    ("qwen3_moe", {"num_experts_per_tok": 8}, lambda spec: moe(spec).num_experts_per_token, 8),
    ("deepseek_v3", {"first_k_dense_replace": 0}, experts, [0, 1, 2, 3]),
    ("deepseek_v3", {"first_k_dense_replace": 2}, experts, [2, 3]),
    ("deepseek_v3", {"first_k_dense_replace": None}, experts, [3]),
    ("deepseek_v3", {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}, experts, [0, 3]),
    ("deepseek_v3", {"n_shared_experts": 3}, lambda spec: moe(spec).shared_size, 3 * 32),
    ("deepseek_v3", {"n_shared_experts": 0}, lambda spec: moe(spec).shared_size, None),
    ("deepseek_v3", {"n_group": 2, "topk_group": 1}, groups, (2, 1)),
    ("deepseek_v3", {"routed_scaling_factor": 1.25}, lambda spec: moe(spec).routing_scale, 1.25),
    ("deepseek_v3", {"q_lora_rank": None}, lambda spec: spec.latents[0].q_rank, None),
    ("deepseek_v3", yarn(4.0), magnitude, 1.0),
    ("deepseek_v3", yarn(4.0, mscale_all_dim=2.0), magnitude, round((0.2 * math.log(4.0) + 1) ** 2, 6)),
    ("deepseek_v32", {"index_topk": 100}, positions, 100),
    ("deepseek_v32", {"index_topk": None}, positions, 512),
    ("glm_moe_dsa", {"n_group": None, "topk_group": None}, groups, (1, 1)),
    ("llama4_text", {"interleave_moe_layer_step": 1, "moe_layers": None}, experts, [0, 1, 2, 3]),
    ("llama4_text", {"interleave_moe_layer_step": 3, "moe_layers": None}, experts, [2]),
    ("llama4_text", {"moe_layers": [0, 3]}, experts, [0, 3]),
    ("llama4_text", {"no_rope_layers": None, "layer_types": None}, chunks, [12, 12, 12, None]),
    (
        "llama4_text",
        {"no_rope_layers": None, "no_rope_layer_interval": 2, "layer_types": None},
        chunks,
        [12, None, 12, None],
    ),
    ("qwen3_moe", {"decoder_sparse_step": 2}, experts, [1, 3]),
    ("qwen3_moe", {"mlp_only_layers": [1]}, experts, [0, 2, 3]),
    ("qwen3_next", {"layer_types": None, "full_attention_interval": None}, full_attention, [3]),
    ("qwen3_next", {"layer_types": None, "full_attention_interval": 2}, full_attention, [1, 3]),
    ("qwen3_5_text", {"layer_types": None, "full_attention_interval": None}, full_attention, [3]),
    ("qwen3_next", {"mlp_only_layers": [2], "decoder_sparse_step": 1}, experts, [0, 1, 3]),
    ("gpt_oss", {"swiglu_limit": 5.0}, swiglu_limits, [5.0] * 4),
    ("gpt_oss", {"swiglu_limit": None}, swiglu_limits, [7.0] * 4),
    ("minimax_m2", {"rotary_dim": 8}, rotary_dim, 8),
    ("glm4_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, rotary_dim, 8),
    ("qwen3_next", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, rotary_dim, 4),
    ("phi3", {"rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.25}}, rotary_dim, 4),
    (
        "gemma4_text",
        {"attention_k_eq_v": False, "per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1},
        lambda spec: [gqa.num_kv_heads for gqa in spec.attentions],
        [2] * 4,
    ),
]


@pytest.mark.parametrize(("family", "keys", "meaning", "expected"), READ, ids=[f"{f} {k}" for f, k, *_ in READ])
def test_a_changed_key_has_its_meaning(
    write: Write, family: str, keys: Config, meaning: Callable[[TargetSpec], Any], expected: Any
) -> None:
    assert meaning(read_target_spec(write(family, **keys))) == expected


def test_a_window_of_null_is_none_and_refused_where_some_layers_slide(write: Write) -> None:
    target = write("mistral")
    write_json(target / "config.json", read_json(target / "config.json") | {"sliding_window": None})
    assert windows(read_target_spec(target)) == [None] * 4
    for family in ("gemma3_text", "gemma4_text", "gpt_oss"):
        target = write(family)
        write_json(target / "config.json", read_json(target / "config.json") | {"sliding_window": None})
        assert "key 'sliding_window': expected an integer, since some layers are sliding" in target_refusal(target)


@pytest.mark.parametrize("pattern", [2, 3, 5])
def test_a_pattern_of_windows_is_that_of_transformers(write: Write, pattern: int) -> None:
    target = write("gemma3_text", layer_types=None, sliding_window_pattern=pattern, num_hidden_layers=8)
    kinds = AutoConfig.from_pretrained(target).layer_types
    assert [window is not None for window in windows(read_target_spec(target))] == [
        kind == "sliding_attention" for kind in kinds
    ]


def test_each_kind_of_layer_of_gemma_has_its_own_base_in_old_files_and_in_new_ones(write: Write) -> None:
    sections = {"sliding_attention": {"rope_theta": 3e3}, "full_attention": {"rope_theta": 7e4}}
    old = {"rope_parameters": None, "rope_theta": 7e4, "rope_local_base_freq": 3e3}
    for keys in ({"rope_parameters": sections}, old, old | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}):
        ropes = [gqa.rope for gqa in read_target_spec(write("gemma3_text", **keys)).attentions]
        assert [rope.theta for rope in ropes] == [3e3, 3e3, 7e4, 7e4]
        assert [rope.factor for rope in ropes] == [1.0, 1.0, *[8.0 if "rope_scaling" in keys else 1.0] * 2]
    absent = read_target_spec(write("gemma3_text", rope_parameters=None))
    assert [gqa.rope.theta for gqa in absent.attentions] == [1e4, 1e4, 1e6, 1e6]


@pytest.mark.parametrize(
    ("original", "trained", "expected", "amplitude"),
    [(64, 512, 64, (1 + 3 / 6) ** 0.5), (512, 512, 512, 1.0), (256, 512, 256, (1 + 1 / 8) ** 0.5)],
)
def test_longrope_goes_as_far_as_its_short_factors(
    write: Write, original: int, trained: int, expected: int, amplitude: float
) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    keys = {"rope_parameters": None, "rope_scaling": scaling, "original_max_position_embeddings": original}
    notes: list[str] = []
    other = {"rope_scaling": scaling | {"original_max_position_embeddings": 2 * original}}  # the outer key wins
    assert positions(read_target_spec(write("phi3", **keys | other, max_position_embeddings=trained))) == expected
    spec = parse_target(write("phi3", **keys, max_position_embeddings=trained), [], notes=notes)
    assert spec is not None and positions(spec) == expected
    assert spec.attentions[0].rope.attention_factor == pytest.approx(amplitude)
    assert any("as far as LongRoPE's short factors go" in note for note in notes) == (expected < trained)


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        ("minimax_m2", {"rotary_dim": 10}, "partial_rotary_factor"),
        ("minimax_m2", {"rotary_dim": 18}, "rotary_dim"),
        ("minimax_m2", {"rotary_dim": 7}, "rotary_dim"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
        ("glm4_moe", {"partial_rotary_factor": 0.45, "rope_parameters": DEFAULT_ROPE}, "partial_rotary_factor"),
        ("glm4_moe", {"partial_rotary_factor": 0.01, "rope_parameters": DEFAULT_ROPE}, "partial_rotary_factor"),
        ("glm4_moe", {"partial_rotary_factor": 1.5, "rope_parameters": DEFAULT_ROPE}, "partial_rotary_factor"),
        ("deepseek_v3", {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
        ("deepseek_v3", {"mlp_layer_types": ["dense"] * 3 + ["other"]}, "mlp_layer_types"),
        ("llama4_text", {"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
        ("llama4_text", {"no_rope_layers": [1, 1, 2, 0]}, "no_rope_layers"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_next", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ("gemma4_text", {"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ("gemma4_text", FEW_ROWS, "vocab_size_per_layer_input"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"sliding_window": 0}, "sliding_window"),
    ],
)
def test_a_key_that_contradicts_the_sizes_is_refused_by_name(
    write: Write, family: str, keys: Config, named: str
) -> None:
    read_target_spec(write(family))
    assert f"key '{named}': expected " in target_refusal(write(family, **keys))


FOREIGN: dict[str, Config] = {
    "deepseek_v3": {"attention_bias": True, "mlp_bias": True, "sliding_window": 4, "moe_layer_freq": 2}
    | {"scoring_func": "softmax", "topk_method": "greedy"},
    "gemma4_text": {"attn_logit_softcapping": 50.0, "hidden_activation": "silu"},
    "glm4_moe": {"sliding_window": 4, "scoring_func": "softmax", "topk_method": "greedy", "hidden_act": "gelu"},
    "gpt_oss": {"mlp_bias": True, "attention_multiplier": 2.0},
    "llama": {"residual_multiplier": 2.0, "logits_scaling": 2.0, "logit_scale": 2.0, "attention_multiplier": 2.0}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "add_cross_attention": True},
    "llama4_text": {"attention_bias": True},
    "minimax_m2": {"use_qk_norm": False, "qk_norm_type": "per_head", "sliding_window": 4, "attn_window_size": 4}
    | {"num_expert_group": 2, "topk_group": 1, "scoring_func": "softmax", "use_routing_bias": False}
    | {"shared_intermediate_size": 8, "routed_scaling_factor": 2.0, "layernorm_mlp_beta": 2.0}
    | {"layernorm_full_attention_beta": 2.0, "layernorm_linear_attention_beta": 2.0},
    "mistral": {"attention_bias": True, "num_local_experts": 4},
    "phi3": {"attention_bias": True, "mlp_bias": True, "lm_head_bias": True, "full_attn_mod": 2},
    "qwen2": {"attention_bias": False, "use_mrope": True, "num_experts": 4},
    "qwen3_5_text": {"output_gate_type": "sigmoid", "attn_output_gate": False, "num_experts": 4},
    "qwen3_next": {"output_gate_type": "sigmoid", "linear_num_key_heads": 0},
}


@pytest.mark.parametrize("family", FOREIGN)
def test_a_feature_of_others_is_refused_by_its_key(write: Write, family: str) -> None:
    read_target_spec(write(family))
    for key, value in FOREIGN[family].items():
        assert f"key '{key}': expected " in target_refusal(write(family, **{key: value})), key


def test_special_tokens_are_those_of_the_language_model_and_a_tied_head_that_of_the_whole(write: Write) -> None:
    text = read_json(write("qwen3_5_text") / "config.json")
    outer: Config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}

    def spec(inner_keys: Config, **outer_keys: Any) -> TargetSpec:
        target = write("qwen3_5_text")
        write_json(target / "config.json", outer | outer_keys | {"text_config": text | inner_keys})
        return read_target_spec(target)

    assert spec({"eos_token_id": 3}, eos_token_id=[4, 5]).eos_token_ids == (3,)
    assert spec({"eos_token_id": None}, eos_token_id=[4, 5]).eos_token_ids == (4, 5)
    for inner, whole in ((True, False), (False, True)):
        found = spec({"tie_word_embeddings": inner}, tie_word_embeddings=whole)
        assert found.is_embedding_tied is whole
        assert spec({"tie_word_embeddings": inner}).is_embedding_tied is inner
