"""Configs of DSpark drafters, key by key, without tensors: those of DeepSpec, NVIDIA, SpecForge and Speculators."""

from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint.draft_config import parse_draft
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.dspark import DSparkHeads
from dflash_trt.core.model.gqa import AttentionMask
from tests.factories import write_json

Config = dict[str, Any]
DECODER: Config = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "vocab_size": 272,
}
HEADS: Config = {"markov_rank": 8, "markov_head_type": "vanilla"}
CONFIDENCE: Config = {"enable_confidence_head": True, "confidence_head_with_markov": True}
# `build_draft_config` of DeepSpec, modeling/dspark/qwen3/config.py.
DEEPSPEC: Config = (
    DECODER
    | HEADS
    | CONFIDENCE
    | {
        "architectures": ["Qwen3DSparkModel"],
        "num_target_layers": 4,
        "block_size": 7,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 4,
        "mask_token_id": 5,
        "target_layer_ids": [0, 2],
        "num_anchors": 512,
    }
)
# The keys of nvidia/MiniMax-M3-DSpark.
NVIDIA: Config = DECODER | {
    "architectures": ["Qwen3DSparkModel"],
    "dflash_config": HEADS
    | {
        "block_size": 8,
        "target_layer_ids": [0, 2],
        "num_target_layers": 4,
        "use_confidence_head": True,
        "use_swa": True,
        "swa_window_size": 9,
        "mask_token_id": 5,
        "projector_type": "dspark",
        "shift_label": True,
        "causal": False,
    },
}
# Those of RadixArk/Qwen3.8-27B-DSpark, trained by SpecForge.
SPECFORGE: Config = (
    DECODER
    | HEADS
    | CONFIDENCE
    | {
        "architectures": ["DSparkDraftModel"],
        "block_size": 7,
        "num_target_layers": 4,
        "layer_types": ["full_attention"] * 2,
        "dflash_config": HEADS
        | CONFIDENCE
        | {
            "attention_mode": "gqa",
            "confidence_head_alpha": 1.0,
            "mask_token_id": 5,
            "projector_type": "dspark",
            "target_layer_ids": [0, 2],
        },
    }
)
# Those of RedHatAI/Qwen3.6-35B-A3B-speculator.dspark.
SPECULATORS: Config = (
    HEADS
    | CONFIDENCE
    | {
        "architectures": ["Qwen3DSparkModel"],
        "speculators_model_type": "dspark",
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}],
            "verifier": {"name_or_path": "Qwen/Qwen3.6-35B-A3B"},
        },
        "aux_hidden_state_layer_ids": [1, 3],
        "block_size": 8,
        "draft_vocab_size": 100,
        "mask_token_id": 5,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "transformer_layer_config": DECODER
        | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True},
    }
)
FULL, WINDOW = AttentionMask(is_causal=False), AttentionMask(window=9, is_causal=False)
ANCHORED = AttentionMask(window=9, is_causal=True, is_window_anchored=True)
ALL = {"DeepSpec": DEEPSPEC, "NVIDIA": NVIDIA, "SpecForge": SPECFORGE, "Speculators": SPECULATORS}


def read(path: Path, fields: Config, *tensor_names: str, notes: list[str] | None = None) -> DraftSpec:
    problems: list[str] = []
    write_json(path / "config.json", fields)
    found = parse_draft(path, tensor_names, problems, notes=[] if notes is None else notes)
    assert problems == [] and found is not None
    return found


@pytest.mark.parametrize(
    ("name", "block_size", "mask", "draft_vocab_size"),
    [
        ("DeepSpec", 7, FULL, None),
        ("NVIDIA", 8, WINDOW, None),
        ("SpecForge", 7, FULL, None),
        ("Speculators", 8, ANCHORED, 100),
    ],
)
def test_every_published_spelling_gives_the_same_heads(
    tmp_path: Path, name: str, block_size: int, mask: AttentionMask, draft_vocab_size: int | None
) -> None:
    found = read(tmp_path, ALL[name])
    assert found.algorithm == "dspark" and found.heads == DSparkHeads(rank=8, has_confidence=True)
    assert found.target_layer_ids == (0, 2)
    assert (found.draft_block_size, found.max_draft_len, found.mask_token_id) == (block_size, block_size, 5)
    assert {gqa.mask for gqa in found.attentions} == {mask} and all(gqa.has_qk_norm for gqa in found.attentions)
    assert (found.draft_vocab_size, found.has_own_embedding) == (draft_vocab_size, False)


def test_a_file_with_the_target_s_matrices_has_its_own(tmp_path: Path) -> None:
    found = read(tmp_path, DEEPSPEC, "embed_tokens.weight", "lm_head.weight")
    assert (found.draft_vocab_size, found.has_own_embedding) == (272, True)


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        *((DEEPSPEC | {"markov_head_type": kind}, {"markov_type": kind}) for kind in ("gated", "rnn")),
        (DEEPSPEC | {"enable_confidence_head": False}, {"has_confidence": False}),
        (DEEPSPEC | {"confidence_head_with_markov": False}, {"confidence_reads_token": False}),
        (DEEPSPEC | {"sample_from_anchor": False, "shift_label": False}, {"drafts_from_anchor": False}),
        (SPECULATORS | {"sample_from_anchor": False}, {"drafts_from_anchor": False}),
        (SPECULATORS | {"markov_rank": None}, {"rank": 256}),
    ],
)
def test_heads_are_those_that_a_file_names(tmp_path: Path, fields: Config, heads: Config) -> None:
    assert read(tmp_path, fields).heads == DSparkHeads(**{"rank": 8, "has_confidence": True} | heads)


@pytest.mark.parametrize(
    ("fields", "key"),
    [(NVIDIA, "confidence_head_with_markov"), (SPECULATORS | {"sample_from_anchor": None}, "sample_from_anchor")],
)
def test_keys_that_a_file_leaves_open_are_noted(tmp_path: Path, fields: Config, key: str) -> None:
    notes: list[str] = []
    assert read(tmp_path, fields, notes=notes).heads == DSparkHeads(rank=8, has_confidence=True)
    assert any(f"drafter config.json key '{key}' is " in note for note in notes)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *((DEEPSPEC | {"markov_head_type": kind}, "markov_head_type") for kind in ("fir", "Vanilla")),
        (DEEPSPEC | {"markov_rank": None}, "markov_rank"),
        (DEEPSPEC | {"markov_rank": 0}, "markov_rank"),
        (DEEPSPEC | {"shift_label": False}, "shift_label"),
        (DEEPSPEC | {"target_layer_ids": [-1, 2]}, "target_layer_ids"),
        (DEEPSPEC | {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (DEEPSPEC | {"output_multiplier": 0.5}, "output_multiplier"),
        (DEEPSPEC | {"model_type": "gemma4_text"}, "model_type"),
        (DEEPSPEC | {"attn_output_gate": True}, "attn_output_gate"),
        (DEEPSPEC | {"dspark_config": {"markov_rank": 8}}, "dspark_config"),
        (DEEPSPEC | {"confidence_temperatures": [1.5]}, "confidence_temperatures"),
        (DEEPSPEC | {"architectures": ["Gemma4DSparkModel"]}, "architectures"),
        (SPECFORGE | {"dflash_config": SPECFORGE["dflash_config"] | {"projector_type": "domino"}}, "projector_type"),
        (SPECFORGE | {"dflash_config": SPECFORGE["dflash_config"] | {"attention_mode": "mla"}}, "attention_mode"),
        (SPECULATORS | {"markov_head_type": "fir"}, "markov_head_type"),
        (SPECULATORS | {"markov_rank": 0}, "markov_rank"),
        (SPECULATORS | {"speculators_config": {"algorithm": "dflash"}}, "speculators_config.algorithm"),
        (DECODER | {"architectures": ["DeepseekV4ForCausalLM"], "dspark_markov_rank": 256}, "architectures"),
    ],
)
def test_what_a_drafter_cannot_do_is_refused_by_its_key(tmp_path: Path, fields: Config, named: str) -> None:
    problems: list[str] = []
    write_json(tmp_path / "config.json", fields)
    assert parse_draft(tmp_path, (), problems, notes=[]) is None
    assert any(f"drafter config.json key '{named}': expected " in line for line in problems), problems
