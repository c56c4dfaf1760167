"""Plans where memory is short: slots of a hybrid need room besides its pages, windows count as pages do."""

from dataclasses import replace
from typing import Any

import pytest

from dflash_trt.backends.page_budget import GPU_FREE_MEMORY_FRACTION, TENSORRT_FREE_MEMORY_FRACTION
from dflash_trt.checkpoint.specs import PairSpecs, read_specs
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.mapping import Mapping
from dflash_trt.plan.gpus import gpu_of
from dflash_trt.plan.planning import EnginePlan, plan_engine
from dflash_trt.plan.rank_memory import _logit_features
from tests.factories import make_target, make_zlab_drafter


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> PairSpecs:
    base = tmp_path_factory.mktemp("hybrid")
    target = make_target(base / "target", family="qwen3_next", tokenizer=False, max_position_embeddings=2**18)
    return read_specs(target, make_zlab_drafter(base / "drafter", target_dir=target, max_position_embeddings=2**18))


def planned(pair: PairSpecs, memory_bytes: int, max_seq_len: int, **options: Any) -> EnginePlan:
    config = BuildConfig(
        target="t", drafter="d", max_seq_len=max_seq_len, max_batch_size=4, max_num_tokens=256, **options
    )
    return plan_engine(config, pair, replace(gpu_of("h200"), memory_bytes=memory_bytes))


def has_room(plan: EnginePlan) -> bool:
    """As its pages and its memory say, and not `missing_bytes`."""
    return plan.pages is not None and plan.left_bytes >= 0


@pytest.mark.parametrize("backend", ["torch", "tensorrt"])
@pytest.mark.parametrize("max_seq_len", [256, 2**18])  # where activations decide, and where a sequence's pages do
def test_what_a_hybrid_lacks_is_what_it_needs_besides(hybrid: PairSpecs, max_seq_len: int, backend: str) -> None:
    before_bytes = planned(hybrid, 2**40, max_seq_len, backend=backend).memory.before_pages_bytes
    short = planned(hybrid, before_bytes + 1000, max_seq_len, backend=backend)
    assert short.slot_bytes > 16384 and not has_room(short) and not short.fits
    enough_bytes = short.gpu.memory_bytes + short.missing_bytes
    enough = planned(hybrid, enough_bytes, max_seq_len, backend=backend)
    assert has_room(enough) and enough.fits
    assert not has_room(planned(hybrid, enough_bytes - 16384, max_seq_len, backend=backend))


def test_engines_of_both_backends_plan_snapshots(hybrid: PairSpecs) -> None:
    torch, tensorrt = (planned(hybrid, 2**40, 256, backend=name).pages for name in ("torch", "tensorrt"))
    assert torch is not None and tensorrt is not None
    assert torch.num_snapshots == tensorrt.num_snapshots > 0
    assert torch.snapshot_bytes == tensorrt.snapshot_bytes > 0


def test_requests_run_together_that_have_pages_and_windows(tmp_path) -> None:
    """Short requests need few pages, and as much of their windows as long ones."""
    target = make_target(tmp_path / "target", family="gpt_oss", tokenizer=False, max_position_embeddings=2**18)
    drafter = make_zlab_drafter(
        tmp_path / "drafter", target_dir=target, attention_bias=True, max_position_embeddings=2**18
    )
    pair = read_specs(target, drafter)
    roomy = planned(pair, 2**40, 2**18)
    assert roomy.pages is not None and roomy.pages.page_windows
    needed = roomy.sequence_bytes / roomy.free_fraction + roomy.memory.before_pages_bytes
    plan = planned(pair, int(needed) + 4096, 2**18)
    assert plan.pages is not None and plan.pages.num_windows < 4
    assert plan.max_requests(100) == plan.pages.num_windows
    assert plan.max_requests(2**18) == 1 and roomy.max_requests(100) == 4


def test_a_plan_repeats_what_the_files_and_the_description_left_open(hybrid: PairSpecs) -> None:
    notes = planned(replace(hybrid, notes=("left open",)), 2**40, 256).notes
    assert "left open" in notes and len(notes) > 1


def test_pages_get_the_fraction_of_their_back_end(hybrid: PairSpecs) -> None:
    fractions = {"torch": GPU_FREE_MEMORY_FRACTION, "tensorrt": TENSORRT_FREE_MEMORY_FRACTION}
    assert {name: planned(hybrid, 2**40, 256, backend=name).free_fraction for name in fractions} == fractions


def test_ranks_hold_their_logits_and_those_of_all() -> None:
    divided = [Mapping(world_size=num_ranks, tp_size=num_ranks) for num_ranks in (1, 2, 4)]
    assert [_logit_features(1000, 64, mapping) for mapping in divided] == [1000, 2000, 1500]
    assert _logit_features(1000, 64, Mapping(world_size=4, dp_size=4)) == 4 * 64 + 3 * 1000


def test_a_plan_counts_the_workspaces_of_the_gpus_multiprocessors(hybrid: PairSpecs) -> None:
    config = BuildConfig(target="t", drafter="d", max_seq_len=256, max_batch_size=4, max_num_tokens=256)
    gpu = gpu_of("h200")
    plans = [plan_engine(config, hybrid, replace(gpu, num_multiprocessors=count)) for count in (8, 128)]
    assert plans[0].memory.workspace_bytes < plans[1].memory.workspace_bytes
