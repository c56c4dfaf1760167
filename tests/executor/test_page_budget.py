import pytest

from dflash_trt.core.errors import CapacityError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model_spec import AttentionSpec, DraftSpec, RopeSpec, TargetSpec
from dflash_trt.executor.page_budget import plan_pages

DECODER = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope": RopeSpec(theta=1e6),
    "has_qk_norm": True,
    "max_position_embeddings": 40960,
}
QWEN3_8B = TargetSpec(
    **DECODER, attention=(AttentionSpec(),) * 36, family="qwen3", vocab_size=151936, is_embedding_tied=False
)
QWEN3_8B_DFLASH = DraftSpec(
    **DECODER,
    attention=(AttentionSpec(is_causal=False),) * 5,
    source_format="z-lab",
    target_layer_ids=(1, 9, 17, 25, 33),
    target_hidden_size=4096,
    target_vocab_size=151936,
    draft_block_size=16,
    mask_token_id=151669,
)


def plan(**changes):
    options = {
        "target": QWEN3_8B,
        "draft": QWEN3_8B_DFLASH,
        "mapping": Mapping(),
        "element_bytes": 2,
        "page_size": 32,
        "max_batch_size": 64,
        "max_seq_len": 4096,
        "budget_bytes": 40 << 30,
    }
    return plan_pages(**options | changes)


def test_bytes_per_token_are_those_of_the_real_checkpoints():
    found = plan()
    assert found.target_bytes_per_token == 36 * 2 * 8 * 128 * 2 == 147_456
    assert found.draft_bytes_per_token == 5 * 2 * 8 * 128 * 2 == 20_480


def test_pages_stay_inside_the_budget_and_use_it_up():
    found = plan()
    page_bytes = 32 * found.bytes_per_token
    assert found.total_bytes <= 40 << 30 < found.total_bytes + page_bytes
    assert found.num_full_sequences == found.num_pages // 128


def test_no_more_pages_are_taken_than_the_largest_batch_can_use():
    assert plan(budget_bytes=1 << 50).num_pages == 64 * 128


def test_two_ranks_halve_the_bytes_of_a_token():
    halved = plan(mapping=Mapping(world_size=2, tp_size=2))
    assert halved.bytes_per_token * 2 == plan().bytes_per_token


def test_an_engine_without_a_drafter_spends_nothing_on_one():
    assert plan(draft=None).draft_bytes_per_token == 0


def test_a_budget_below_one_sequence_is_refused_with_the_bytes_it_needs():
    needed = 128 * 32 * plan().bytes_per_token
    assert plan(budget_bytes=needed).num_pages == 128
    with pytest.raises(CapacityError, match=f"{needed} bytes"):
        plan(budget_bytes=needed - 1)
