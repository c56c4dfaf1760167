"""Two ranks on two GPUs: NCCL, and exchanges inside CUDA graphs. Written without a GPU, and not yet run on one."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from dflash_trt.core.errors import RankError
from tests.executor.attention_dp import engine_loop, requests, run
from tests.executor.rank_engines import build, make_zlab_pair, opened
from tests.gpu.family_pairs import make_pair
from tests.traces import GREEDY, SAMPLED, integers, trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs: NCCL, exchanges in CUDA graphs"),
]


HEAD = {"head_dim": 16}  # the kernels' least


@pytest.mark.parametrize("samplings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_two_gpus_give_the_tokens_of_one_rank_on_a_cpu(tmp_path: Path, samplings: list) -> None:
    make_zlab_pair(tmp_path, draft=HEAD, **HEAD)
    engines = [build(tmp_path, tp_size=tp_size) for tp_size in (1, 2)]
    with opened(engines[0]) as one, opened(engines[1], device="cuda") as two:
        expected, _ = trace(one, samplings, num_draft_tokens=(3,))
        for _ in range(3):  # run, capture, replay
            found, _ = trace(two, samplings, num_draft_tokens=(3,))
            assert integers(found) == integers(expected)


@pytest.mark.parametrize("name", ["deepseek v3", "qwen3.5"])
def test_so_do_they_for_other_families(tmp_path: Path, name: str) -> None:
    make_pair(name, tmp_path)
    engines = [build(tmp_path, tp_size=tp_size, max_batch_size=4, max_num_tokens=16) for tp_size in (1, 2)]
    with opened(engines[0]) as one, opened(engines[1], device="cuda") as two:
        expected, _ = trace(one, SAMPLED, num_draft_tokens=(3, 0))
        found, _ = trace(two, SAMPLED, num_draft_tokens=(3, 0))
    assert integers(found) == integers(expected)


def test_so_do_they_where_they_divide_the_positions_of_latents(tmp_path: Path) -> None:
    make_pair("deepseek v3", tmp_path)
    sizes = {"max_batch_size": 4, "max_num_tokens": 16}
    engines = [build(tmp_path, tp_size=1, **sizes), build(tmp_path, tp_size=2, dcp_size=2, **sizes)]
    with opened(engines[0]) as one, opened(engines[1], device="cuda") as two:
        for samplings in (GREEDY, SAMPLED):
            expected, _ = trace(one, samplings, num_draft_tokens=(3, 0))
            for _ in range(3):  # run, capture, replay
                found, _ = trace(two, samplings, num_draft_tokens=(3, 0))
                assert integers(found) == integers(expected)


def test_a_killed_worker_does_not_leave_the_other_gpu_waiting(tmp_path: Path) -> None:
    make_zlab_pair(tmp_path, draft=HEAD, **HEAD)
    with opened(build(tmp_path, tp_size=2), device="cuda") as two:
        trace(two, GREEDY, num_draft_tokens=(3,))
        os.kill(two.worker_process_ids[0], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(RankError, match="rank 1 of 2"):
            trace(two, GREEDY, num_draft_tokens=(3,))
        assert time.monotonic() - started < 60


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "chained"])
def test_ranks_with_requests_of_their_own_give_the_tokens_of_one_rank_on_a_cpu(tmp_path: Path, overlaps: bool) -> None:
    make_pair("deepseek v3", tmp_path)
    sizes = {"max_batch_size": 4, "max_num_tokens": 16}
    one = build(tmp_path, tp_size=1, **sizes)
    two = build(tmp_path, tp_size=2, ep_size=2, attention_dp=True, **sizes)
    with engine_loop(one) as loop:
        expected = run(loop, requests(), at_once=3)
    with engine_loop(two, device="cuda", overlap_scheduling=overlaps) as loop:
        found = run(loop, requests(), at_once=3)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
