"""Keys that a config.json leaves out mean what transformers takes them to mean."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from dflash_trt.checkpoint.foreign_keys import HARMLESS_KEYS
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.feed_forward import Moe
from tests.checkpoint.refusals import read_target_spec
from tests.factories import make_target, read_json, write_json
from tests.parity.test_config_keys import FAMILIES, Config, changed_values, make
from tests.specs import Flat


def experts(spec: TargetSpec) -> Moe:
    assert Flat(spec).moe is not None
    return Flat(spec).moe


def layer_types(spec: TargetSpec) -> list[str]:
    return ["full_attention" if layer.window is None else "sliding_attention" for layer in Flat(spec).masks]


MEANINGS: list[tuple[str, str, Callable[[TargetSpec], Any]]] = [
    *((family, "tie_word_embeddings", lambda spec: spec.is_embedding_tied) for family in ("qwen3", "llama")),
    *((family, "tie_word_embeddings", lambda spec: spec.is_embedding_tied) for family in ("qwen3_moe", "gpt_oss")),
    *((family, "attention_bias", lambda spec: Flat(spec).has_qkv_bias) for family in ("qwen3", "llama")),
    *((family, "attention_bias", lambda spec: Flat(spec).has_o_bias) for family in ("qwen3_moe", "gpt_oss")),
    ("llama", "mlp_bias", lambda spec: Flat(spec).has_mlp_bias),
    ("qwen3_moe", "norm_topk_prob", lambda spec: experts(spec).normalizes_top_k),
    ("gpt_oss", "layer_types", layer_types),
    ("qwen3", "layer_types", layer_types),
]


@pytest.mark.parametrize(("family", "key", "meaning"), MEANINGS, ids=[f"{family} {key}" for family, key, _ in MEANINGS])
def test_a_key_left_out_means_what_transformers_takes_it_for(
    tmp_path: Path, family: Any, key: str, meaning: Callable[[TargetSpec], Any]
) -> None:
    target = make_target(tmp_path, family=family, num_hidden_layers=2, tokenizer=False)
    fields = read_json(target / "config.json")
    assert key in fields
    write_json(target / "config.json", {name: value for name, value in fields.items() if name != key})
    assert meaning(read_target_spec(target)) == getattr(AutoConfig.from_pretrained(target), key)


# Sizes that the tensors prove, and a token that a published file names or does not have.
_OF_THE_FILE = {"bos_token_id", "head_dim", "moe_layers", "n_shared_experts", "num_key_value_heads", "q_lora_rank"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_taken_away_has_the_value_that_transformers_gives_it(tmp_path: Path, family: Any) -> None:
    """One by one, every key of the file that both readings accept: without it, and with that value."""
    target = make(tmp_path / "target", family)
    fields, defaults, num_compared = read_json(target / "config.json"), CONFIG_MAPPING[family]().to_dict(), 0
    for name in sorted(fields.keys() & defaults.keys() - _OF_THE_FILE):
        specs = []
        for changed in ({key: value for key, value in fields.items() if key != name}, fields | {name: defaults[name]}):
            write_json(target / "config.json", changed)
            with suppress(ConfigError):
                specs.append(read_target_spec(target))
        if len(specs) == 2:
            assert specs[0] == specs[1], name
            num_compared += 1
    assert num_compared > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_the_value_that_an_absent_key_has_is_read_as_its_absence(tmp_path: Path, family: Any) -> None:
    """One by one, every key of transformers' config class that the file leaves out."""
    target = make(tmp_path / "target", family)
    spec, fields = read_target_spec(target), read_json(target / "config.json")
    absent = {name: value for name, value in CONFIG_MAPPING[family]().to_dict().items() if name not in fields}
    assert absent
    for name, value in absent.items():
        write_json(target / "config.json", fields | {name: value})
        assert read_target_spec(target) == spec, name


def without_effect(target: Path, config: Config, spec: TargetSpec) -> Iterator[str]:
    """Keys of which no other value changes the spec or is refused."""
    for key, value in config.items():
        others = [changed for changed in changed_values(value) if changed is not None]
        specs = []
        for other in others:
            write_json(target / "config.json", config | {key: other})
            with suppress(ConfigError):
                specs.append(read_target_spec(target))
        if others and specs == [spec] * len(others):
            yield key


# What another key or file says first, or what is of training, of an indexer, or of parts that the tiny models lack.
_TRAINING = {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}
_INDEXER = {"first_k_dense_replace", "index_head_dim", "index_n_heads", "layer_types", "max_position_embeddings"}
_UNREAD: dict[str, set[str]] = {
    "deepseek_v32": _INDEXER,
    "gemma3_text": {"_sliding_window_pattern"},
    "gemma4_text": {"moe_intermediate_size", "num_experts", "top_k_experts", "use_double_wide_mlp"}
    | {"vocab_size_per_layer_input"},
    "gemma4_unified_text": {"use_double_wide_mlp"},
    "glm4_moe": {"partial_rotary_factor"},
    "glm_moe_dsa": _INDEXER | {"indexer_types"},
    "llama4_text": {"interleave_moe_layer_step", "no_rope_layer_interval"},
    "phi3": {"original_max_position_embeddings"},
    "qwen2": {"max_window_layers", "use_sliding_window"},
    "qwen3": {"max_window_layers", "use_sliding_window"},
    "qwen3_5_moe_text": {"intermediate_size", "partial_rotary_factor"},
    "qwen3_5_text": {"partial_rotary_factor"},
    "qwen3_moe": {"intermediate_size", "sliding_window"},
    "qwen3_next": {"intermediate_size", "partial_rotary_factor"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_that_changes_a_model_is_left_unread(tmp_path: Path, family: Any) -> None:
    target = make(tmp_path / "target", family)
    config = read_json(target / "config.json")
    unread = set(without_effect(target, config, read_target_spec(target)))
    assert unread - {"eos_token_id", *HARMLESS_KEYS} - _TRAINING == _UNREAD.get(family, set())
