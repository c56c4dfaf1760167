"""Configs of EAGLE-3 heads and of Speculators' DFlash2, key by key, without tensors."""

from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint.draft_config import parse_draft
from dflash_trt.core.model.dflash2 import BlockConv, CandidateSelector
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.gqa import AttentionMask
from tests.factories import write_json

Config = dict[str, Any]
LAYER: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "vocab_size": 272,
}
TAPS = "eagle_aux_hidden_state_layer_ids"
SAFEAILAB = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", TAPS: [2, 5, 7]}
SPECULATORS: Config = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": LAYER | {"model_type": "llama"},
    "draft_vocab_size": 100,
    TAPS: [2, 5, 7],
}
DFLASH2: Config = {
    "speculators_model_type": "dflash2",
    "transformer_layer_config": LAYER
    | {"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": True},
    "draft_vocab_size": 272,
    "mask_token_id": 5,
    "aux_hidden_state_layer_ids": [1, 3],
}


def read(path: Path, fields: Config, *tensor_names: str, num_target_layers: int | None = None) -> DraftSpec:
    problems: list[str] = []
    write_json(path / "config.json", fields)
    found = parse_draft(path, tensor_names, problems, notes=[], num_target_layers=num_target_layers)
    assert problems == [] and found is not None
    return found


def proposing(*lengths: int) -> Config:
    methods = [{"proposal_type": "greedy", "speculative_tokens": length} for length in lengths]
    return SPECULATORS | {"speculators_config": {"algorithm": "eagle3", "proposal_methods": methods}}


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        (SAFEAILAB, 7),
        *((SAFEAILAB | {"speculative_tokens": asked}, made) for asked, made in ((5, 7), (12, 12), (100, 64))),
        *((proposing(*asked), made) for asked, made in (((3, 9), 9), ((9, 3), 9), ((), 7))),
    ],
)
def test_a_chain_has_seven_drafts_or_as_many_as_its_file_proposes(tmp_path: Path, fields: Config, length: int) -> None:
    assert read(tmp_path, fields).max_draft_len == length


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (SAFEAILAB, (1, 4, 6)),
        (SAFEAILAB | {TAPS: None, "eagle_config": {TAPS: [3, 4, 9]}}, (2, 3, 8)),
        (SAFEAILAB | {"eagle_config": {TAPS: [3, 4, 9]}, TAPS: None}, (2, 3, 8)),
        (SAFEAILAB | {TAPS: None}, (1, 17, 32)),
        (SPECULATORS, (1, 4, 6)),
        (SPECULATORS | {TAPS: None}, (1, 17, 32)),
    ],
)
def test_taps_are_inputs_of_layers(tmp_path: Path, fields: Config, expected: tuple[int, ...]) -> None:
    assert read(tmp_path, fields, num_target_layers=36).target_layer_ids == expected


@pytest.mark.parametrize(
    ("changes", "names", "draft_vocab_size", "has_embedding"),
    [
        ({}, (), None, False),
        ({}, ("lm_head.weight",), 272, False),
        ({"draft_vocab_size": 100}, (), 100, False),
        ({}, ("embed_tokens.weight",), None, True),
    ],
)
def test_a_head_has_its_own_matrices_where_it_stores_them(
    tmp_path: Path, changes: Config, names: tuple[str, ...], draft_vocab_size: int | None, has_embedding: bool
) -> None:
    found = read(tmp_path, SAFEAILAB | changes, *names)
    assert (found.draft_vocab_size, found.has_own_embedding) == (draft_vocab_size, has_embedding)
    assert (found.target_hidden_size, found.target_vocab_size) == (64, 272)
    assert read(tmp_path, SAFEAILAB | {"target_hidden_size": 128}).target_hidden_size == 128
    assert read(tmp_path, SPECULATORS | {"target_hidden_size": 128}).target_hidden_size == 128


def test_the_norm_before_fc_of_nvidias_files_is_in_their_own_section(tmp_path: Path) -> None:
    """As in the file of nvidia/gpt-oss-120b-Eagle3-v3 (vLLM pull request 42143, SGLang's 32334)."""
    section = {"eagle_config": {TAPS: [24, 30, 36], "norm_before_fc": True}, TAPS: None}
    for outside in ({}, {"norm_before_fc": False}):
        found = read(tmp_path, SAFEAILAB | section | outside)
        assert found.chain is not None
        assert (found.chain.fc_norm, found.target_layer_ids) == ("joint", (23, 29, 35))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("none", False, False)),
        ({"norm_before_fc": True}, ("joint", False, False)),
        ({"fc_norm": True}, ("per_tap", False, False)),
        ({"norm_before_residual": True}, ("none", True, False)),
        ({"norm_output": True}, ("none", False, True)),
    ],
)
def test_norms_of_a_chain_are_those_that_its_file_names(
    tmp_path: Path, changes: Config, expected: tuple[str, bool, bool]
) -> None:
    for fields in (SAFEAILAB, SPECULATORS):
        chain = read(tmp_path, fields | changes).chain
        assert chain is not None
        assert (chain.fc_norm, chain.has_normed_residual, chain.has_normed_features) == expected


def test_a_window_of_a_chain_counts_the_tokens_up_to_its_anchor(tmp_path: Path) -> None:
    assert read(tmp_path, SAFEAILAB).attentions[0].mask == AttentionMask(first_key=1)
    sliding = {"layer_types": ["sliding_attention"], "sliding_window": 5}
    [gqa] = read(tmp_path, SAFEAILAB | sliding).attentions
    assert gqa.mask == AttentionMask(window=4, is_window_anchored=True, first_key=1)


def test_norms_of_q_and_k_are_qwen3s_or_those_that_are_stored(tmp_path: Path) -> None:
    cases = [
        (SAFEAILAB, ()),
        (SAFEAILAB, ("midlayer.self_attn.q_norm.weight",)),
        (SAFEAILAB | {"model_type": "qwen3"}, ()),
    ]
    assert [read(tmp_path, fields, *names).attentions[0].has_qk_norm for fields, names in cases] == [False, True, True]


SLIDING = {"layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *(
            (SAFEAILAB | {"eagle_config": {key: value}}, f"eagle_config.{key}")
            for key, value in {
                "use_aux_hidden_state": False,
                "use_input_layernorm_in_first_layer": False,
                "use_last_layernorm": False,
                "use_mtp_layernorm": True,
                "parallel_draft_step": 2,
                "new_key": 1,
            }.items()
        ),
        (SAFEAILAB | {"norm_before_fc": True, "fc_norm": True}, "fc_norm"),
        (SAFEAILAB | {"mlp_bias": True}, "mlp_bias"),
        (SAFEAILAB | {"num_hidden_layers": 2}, "num_hidden_layers"),
        (SAFEAILAB | {"model_type": "gpt_oss"}, "model_type"),
        (SAFEAILAB | {"num_experts": 4}, "num_experts"),
        (SAFEAILAB | {"draft_vocab_size": 273}, "draft_vocab_size"),
        (SAFEAILAB | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (SAFEAILAB | SLIDING, "sliding_window"),
        (SAFEAILAB | SLIDING | {"sliding_window": 1}, "sliding_window"),
        (SAFEAILAB | {TAPS: None}, TAPS),
        (SAFEAILAB | {TAPS: [0, 2]}, TAPS),
        (SPECULATORS | {"speculators_config": {"algorithm": "dflash"}}, "speculators_config.algorithm"),
        (SPECULATORS | {"transformer_layer_config": None}, "transformer_layer_config"),
        (SPECULATORS | {"draft_vocab_size": 273}, "draft_vocab_size"),
        (SPECULATORS | {"quantization_config": {}}, "quantization_config"),
        (DFLASH2 | {"draft_vocab_size": 100}, "draft_vocab_size"),
        (DFLASH2 | {"sample_from_anchor": True}, "sample_from_anchor"),
    ],
)
def test_what_a_drafter_cannot_do_is_refused_by_its_key(tmp_path: Path, fields: Config, named: str) -> None:
    problems: list[str] = []
    write_json(tmp_path / "config.json", fields)
    assert parse_draft(tmp_path, (), problems, notes=[]) is None
    assert any(f"drafter config.json key '{named}': expected " in line for line in problems), problems


def test_dflash2_of_speculators_has_the_defaults_of_its_format(tmp_path: Path) -> None:
    found = read(tmp_path, DFLASH2)
    assert found.conv == BlockConv(kernel_size=2, group_size=16)
    assert found.selector == CandidateSelector(rank=256, top_k=16)
    assert (found.draft_block_size, found.logit_softcap) == (8, None)
    for keys, is_causal in (({}, False), ({"sliding_window_non_causal": False}, True)):
        [gqa] = read(tmp_path, DFLASH2 | keys).attentions
        assert gqa.mask == AttentionMask(window=8, is_causal=is_causal, is_window_anchored=True)
    given = {"conv_kernel_size": 3, "conv_group_size": 32, "selector_rank": 4, "selector_top_k": 9, "block_size": 5}
    changed = read(tmp_path, DFLASH2 | given)
    assert changed.conv == BlockConv(kernel_size=3, group_size=32)
    assert changed.selector == CandidateSelector(rank=4, top_k=9) and changed.draft_block_size == 5
