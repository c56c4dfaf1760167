"""The law of `tests/parity/test_foreign_state.py` on a GPU, in graphs: free memory and a bad mate change no bit."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dflash_trt.backends.padding import decode_shapes
from tests.executor.rank_engines import build
from tests.gpu.foreign_state_rank import REQUESTS, run_rank
from tests.parity import test_foreign_state as foreign_state
from tests.parity.test_foreign_state import (
    NUM_SLOTS,
    PAIRS,
    Foreign,
    check_free_memory,
    check_mates,
    contents,
    open_pair,
    paged_tensors,
    serve,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: an executor on it"),
]


@pytest.mark.parametrize("name", PAIRS)
def test_free_memory_and_a_bad_mate_change_no_bit(name: str, tmp_path: Path) -> None:
    executor = open_pair(name, tmp_path, torch.device("cuda"))
    executor.warm_up(decode_shapes(executor.limits, num_draft_tokens=executor.limits.max_draft_len))
    statistics = check_free_memory(executor, overlaps=True, **REQUESTS).statistics()
    assert statistics.num_prefix_hit_tokens > 0 and statistics.num_preemptions > 0
    check_mates(executor, **REQUESTS)
    for group, tensor in paged_tensors(executor):
        assert not group or not tensor[executor.limits.page_windows[group - 1].blank_page].float().any()
    executor.close()


def test_nan_that_a_weight_of_0_does_not_hide_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: in the blank page, which the kernels load beside the keys of a window."""
    executor = open_pair("windows, CPU kernels", tmp_path, torch.device("cuda"))
    expected = contents(serve(Foreign(executor, None), **REQUESTS))
    monkeypatch.setattr(foreign_state, "keeps_blank_pages", lambda executor: False)
    assert contents(serve(Foreign(executor, torch.nan), **REQUESTS)) != expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs: NCCL, exchanges in CUDA graphs")
@pytest.mark.parametrize("name", ["delta nets", "latents"])
def test_so_do_they_on_two_ranks(name: str, tmp_path: Path) -> None:
    pair = PAIRS[name]
    pair.drafter(tmp_path / "drafter", target_dir=pair.target(tmp_path / "target"), intermediate_size=96)
    engine = build(tmp_path, tp_size=2, max_batch_size=NUM_SLOTS, max_num_tokens=20)
    words = [sys.executable, "-m", "tests.gpu.foreign_state_rank", str(engine.path), str(tmp_path / "store")]
    with subprocess.Popen(words, cwd=Path(__file__).parents[2]) as other:
        try:
            run_rank(0, engine.path, tmp_path / "store")
        except BaseException:
            other.kill()
            raise
    assert other.returncode == 0


@pytest.mark.parametrize("name", ["experts", "latents", "delta nets", "sinks, DFlash2"])
def test_memory_that_a_step_allocates_holds_nan_first(name: str, tmp_path: Path) -> None:
    """Inside of graphs, too; without that mode of PyTorch it is whatever another step left there."""
    executor = open_pair(name, tmp_path, torch.device("cuda"))
    expected = contents(serve(Foreign(executor, None), **REQUESTS))
    with fills_new_memory():
        executor.warm_up(decode_shapes(executor.limits, num_draft_tokens=executor.limits.max_draft_len))
        assert torch.empty(1, device="cuda").isnan().all()
        assert contents(serve(Foreign(executor, None), **REQUESTS)) == expected
    executor.close()


@contextmanager
def fills_new_memory() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of operations that are not deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
