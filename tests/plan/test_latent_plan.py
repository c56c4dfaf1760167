"""A target with latent attention of published size: what its pages cost, on one rank and on eight."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.checkpoint.specs import PairSpecs, read_specs
from dflash_trt.core.config import BuildConfig
from dflash_trt.plan.computed_rows import ComputedRows
from dflash_trt.plan.gpus import gpu_of
from dflash_trt.plan.planning import _latent_notes, plan_engine
from dflash_trt.plan.step_work import EngineWork
from tests.plan.test_step_floor import write

GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
KIMI_K2_6: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "early_stopping": False,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "quantization_config": {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}},
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
}
WRAPPER: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "media_placeholder_token_id": 163605,
    "text_config": KIMI_K2_6,
    "vision_config": {},
}
LATENT_BYTES = 61 * 576 * 2  # bfloat16
EXPERT_BYTES = 60 * 384 * 3 * 7168 * 2048 * 4.5 / 8  # INT4 in groups of 32


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> PairSpecs:
    return read_specs(write(tmp_path_factory.mktemp("published"), "target", WRAPPER), None)


def test_eight_ranks_share_the_experts_and_copy_the_latents(kimi: PairSpecs) -> None:
    config = BuildConfig(target="target", dtype="bfloat16", tp_size=8, ep_size=8, max_seq_len=32768)
    made = plan_engine(config, kimi, gpu_of("b300"))
    assert made.pages is not None and made.pages.bytes_per_token == LATENT_BYTES
    others = made.memory.weights_bytes - EXPERT_BYTES / 8
    assert 6e9 < others < 7e9  # embedding, routers and what makes latents are whole: 4.5 GB, beside an eighth of 18 GB
    (cost,) = [note for note in made.notes if "latent" in note]
    assert cost.startswith(
        "latent pages are whole on every rank: 68.6 KiB of each token's 68.6 KiB a rank, 549.0 KiB on 8"
    )
    assert not [note for note in made.notes if "refused" in note or "of a node" in note]


@pytest.mark.parametrize(
    ("fields", "other"),
    [
        ({}, "ranks with requests of their own (--attention-dp)"),
        ({"first_k_dense_replace": 61}, "replicas on fewer ranks"),
    ],
)
def test_what_holds_more_tokens_is_named_for_a_target_with_experts_and_one_without(
    tmp_path: Path, fields: dict[str, Any], other: str
) -> None:
    specs = read_specs(write(tmp_path, "target", WRAPPER | {"text_config": KIMI_K2_6 | fields}), None)
    made = plan_engine(BuildConfig(target="target", dtype="bfloat16", tp_size=8), specs, gpu_of("b300"))
    (cost,) = [note for note in made.notes if note.startswith("latent")]
    assert f"; {other}, or ranks that divide positions (--dcp-size 8), hold more tokens" in cost


def test_the_cost_of_ranks_counts_the_part_that_each_of_them_copies() -> None:
    states = SimpleNamespace(replicated_bytes_per_token=2048, bytes_per_token=3072)
    mapping, target = SimpleNamespace(tp_size=4), SimpleNamespace(moes=())
    [cost] = _latent_notes(SimpleNamespace(states=lambda: states, mapping=mapping, target=target))
    assert ": 2.0 KiB of each token's 3.0 KiB a rank, 8.0 KiB on 4 ranks; " in cost


def test_ranks_that_divide_positions_hold_an_eighth_of_each_latent(kimi: PairSpecs) -> None:
    """Their exchanges are of all heads, of at most 512 rows at once."""
    divided, whole = (
        plan_engine(
            BuildConfig(target="target", dtype="bfloat16", tp_size=8, ep_size=8, dcp_size=dcp_size),
            kimi,
            gpu_of("h200"),
        )
        for dcp_size in (8, 1)
    )
    assert divided.pages is not None and divided.pages.bytes_per_token == LATENT_BYTES // 8
    assert divided.num_kv_tokens == pytest.approx(8 * whole.num_kv_tokens, rel=0.01)
    assert not [note for note in divided.notes if note.startswith("latent")]
    work = EngineWork(divided.pretrained_config, has_drafter=False)
    for num_requests, rows, count in ((4, 32, 61), (65, 260, 2 * 61)):
        rows_of_a_step = ComputedRows.decode(num_requests=num_requests, context_len=1000, num_draft_tokens=7)
        step = work.of(rows_of_a_step)
        sums, queries, parts, logits = step.exchanges
        assert (sums.kind, logits.features) == ("all_reduce", 163840)
        assert (queries.kind, queries.count, queries.rows, queries.features) == ("all_gather", count, rows, 64 * 576)
        assert (parts.kind, parts.count, parts.rows, parts.features) == ("all_to_all", count, rows, 64 * 512)
        assert parts.num_bytes == count * rows * 64 * 512 * 2 * 7 / 8
        assert [mixed.num_parts for mixed in step.mixings] == [8]
    step = EngineWork(whole.pretrained_config, has_drafter=False).of(rows_of_a_step)
    assert [mixed.num_parts for mixed in step.mixings] == [1], "each rank attends with its heads over all keys"


def test_ranks_beyond_a_node_are_planned_as_if_they_were_one(kimi: PairSpecs) -> None:
    config = BuildConfig(target="target", dtype="bfloat16", tp_size=16, ep_size=16, max_seq_len=32768)
    (note,) = [note for note in plan_engine(config, kimi, gpu_of("b300")).notes if "of a node" in note]
    assert note.startswith("16 ranks are more than the 8 GPUs of a node. Sums over nodes take their network")


def test_one_rank_copies_nothing(kimi: PairSpecs) -> None:
    config = BuildConfig(target="target", dtype="bfloat16", max_seq_len=32768)
    made = plan_engine(config, kimi, gpu_of("1000"))
    assert made.pages is not None and made.pages.bytes_per_token == LATENT_BYTES
    assert not [note for note in made.notes if note.startswith("latent")]


def test_the_score_scale_has_yarns_magnitude(kimi: PairSpecs) -> None:
    assert kimi.target.latents[0].scale == pytest.approx(192**-0.5 * (0.1 * 4.1588831 + 1) ** 2)
