"""The law of `tests/parity/test_foreign_state.py` over TensorRT's executor and an interpreted engine."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from dflash_trt.backends.tensorrt.context import StepContexts
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from dflash_trt.backends.torch import attention_plan
from dflash_trt.core.step_plan import ExecutorLimits, PageWindow
from dflash_trt.engine_dir import EngineLimits
from tests.parity.test_foreign_state import (
    CONTENTS,
    NUM_SLOTS,
    PAIRS,
    Foreign,
    check_free_memory,
    check_mates,
    contents,
    open_files,
    serve,
)
from tests.trt.fake_engine import USER_MANAGED, FakeEngine
from tests.trt.networks import define_pair
from tests.trt.test_trt_executor import CPU, HOST_STREAM

NUM_PAGES, MAX_SEQ_LEN = 48, 64


def open_engine(
    trt: ModuleType, name: str, root: Path, *, num_pages: int = NUM_PAGES, num_host_pages: int = 0
) -> TensorRTExecutor:
    """With so many pages in every group."""
    pair = PAIRS[name]
    target, drafter = open_files(pair, root)
    options = {name: value for name, value in pair.options.items() if name == "has_page_groups"}
    defined = define_pair(trt, target, drafter, pages=pair.options.get("quantization"), **options)
    sizes = {"max_batch_size": NUM_SLOTS, "max_num_tokens": 20, "max_seq_len": MAX_SEQ_LEN}
    sizes |= {"max_draft_len": defined.spec.max_draft_len, "page_size": defined.spec.page_size}
    limits = ExecutorLimits(
        **sizes,
        draft_topk=defined.spec.draft_topk,
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        num_snapshots=0 if defined.spec.states.is_recurrent else None,
        page_windows=tuple(PageWindow(window, num_pages) for window in defined.spec.page_windows),
    )
    contexts = StepContexts(
        FakeEngine(defined, EngineLimits(**sizes)), USER_MANAGED, HOST_STREAM, captured=(), device=CPU
    )
    return TensorRTExecutor(contexts, defined.spec, limits, stream=HOST_STREAM, capture=None, device=CPU)


@pytest.mark.parametrize("name", PAIRS)
def test_free_memory_and_a_bad_mate_change_no_bit(trt: ModuleType, tmp_path: Path, name: str) -> None:
    executor = open_engine(trt, name, tmp_path)
    check_free_memory(executor, CONTENTS[:1])
    check_mates(executor)


def test_what_a_weight_of_0_hides_is_noticed(trt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    executor = open_engine(trt, "experts", tmp_path)
    expected = contents(serve(Foreign(executor, None)))
    monkeypatch.setattr(attention_plan, "_foreign_rows", lambda *args: None)
    assert contents(serve(Foreign(executor, torch.nan))) != expected
