"""Plans of a hybrid where memory is short: its slots need room besides its pages."""

from dataclasses import replace

import pytest

from dflash_trt.checkpoint.specs import PairSpecs, read_specs
from dflash_trt.core.config import BuildConfig
from dflash_trt.plan.gpus import gpu_of
from dflash_trt.plan.planning import EnginePlan, plan_engine
from tests.factories import make_target, make_zlab_drafter


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> PairSpecs:
    base = tmp_path_factory.mktemp("hybrid")
    target = make_target(base / "target", family="qwen3_next", tokenizer=False, max_position_embeddings=2**18)
    return read_specs(target, make_zlab_drafter(base / "drafter", target_dir=target, max_position_embeddings=2**18))


def planned(pair: PairSpecs, memory_bytes: int, max_seq_len: int) -> EnginePlan:
    config = BuildConfig(target="t", drafter="d", max_seq_len=max_seq_len, max_batch_size=4, max_num_tokens=256)
    return plan_engine(config, pair, replace(gpu_of("h200"), memory_bytes=memory_bytes))


def has_room(plan: EnginePlan) -> bool:
    """As its pages and its memory say, and not `missing_bytes`."""
    return plan.pages is not None and plan.left_bytes >= 0


@pytest.mark.parametrize("max_seq_len", [256, 2**18])  # where activations decide, and where a sequence's pages do
def test_what_a_hybrid_lacks_is_what_it_needs_besides(hybrid: PairSpecs, max_seq_len: int) -> None:
    before_bytes = planned(hybrid, 2**40, max_seq_len).memory.before_pages_bytes
    short = planned(hybrid, before_bytes + 1000, max_seq_len)
    assert short.slot_bytes > 16384 and not has_room(short)
    enough_bytes = short.gpu.memory_bytes + short.missing_bytes
    assert has_room(planned(hybrid, enough_bytes, max_seq_len))
    assert not has_room(planned(hybrid, enough_bytes - 16384, max_seq_len))
