"""The law of `tests/parity/test_foreign_state.py` over TensorRT's plain layers: read back and run."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from dflash_trt.backends.tensorrt import lowering_gated_delta
from dflash_trt.backends.tensorrt.context import StepContexts
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from dflash_trt.core.page_windows import PageWindow
from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.engine_dir import EngineLimits
from tests.parity.test_foreign_state import BAD, NUM_SLOTS, PAIRS, Foreign, contents, serve
from tests.trt.fake_engine import USER_MANAGED, FakeEngine
from tests.trt.networks import define_pair
from tests.trt.test_trt_executor import CPU, HOST_STREAM

NUM_PAGES, MAX_SEQ_LEN = 48, 64


def open_layers(trt: ModuleType, name: str, root: Path) -> TensorRTExecutor:
    pair = PAIRS[name]
    target = pair.target(root / "target")
    drafter = pair.drafter(root / "drafter", target_dir=target)
    options = {name: value for name, value in pair.options.items() if name == "has_page_groups"}
    defined = define_pair(trt, target, drafter, pages=pair.options.get("quantization"), **options)
    sizes = {"max_batch_size": NUM_SLOTS, "max_num_tokens": 20, "max_seq_len": MAX_SEQ_LEN}
    sizes |= {"max_draft_len": defined.spec.max_draft_len, "page_size": defined.spec.page_size}
    limits = ExecutorLimits(
        **sizes,
        num_choices=defined.spec.num_choices,
        num_pages=NUM_PAGES,
        num_snapshots=0 if defined.spec.states.is_recurrent else None,
        page_windows=tuple(PageWindow(window, NUM_PAGES) for window in defined.spec.page_windows),
    )
    contexts = StepContexts(
        FakeEngine(defined, EngineLimits(**sizes)), USER_MANAGED, HOST_STREAM, captured=(), device=CPU
    )
    return TensorRTExecutor(contexts, defined.spec, limits, stream=HOST_STREAM, capture=None, device=CPU)


@pytest.mark.parametrize("name", PAIRS)
def test_free_memory_and_a_bad_mate_change_no_bit(trt: ModuleType, tmp_path: Path, name: str) -> None:
    executor = open_layers(trt, name, tmp_path)
    clean = Foreign(executor, None)
    expected = contents(serve(clean))
    assert clean.num_rejected > 0
    foreign = Foreign(executor, torch.nan)
    assert contents(serve(foreign)) == expected
    assert foreign.drafts == clean.drafts
    spoilt = Foreign(executor, torch.nan, spoils_at=3)
    found = serve(spoilt, reuses=False)
    assert [output.request_id for output in found if output.finish_reason == "error"] == [BAD]
    last = max(i for i, rows in enumerate(spoilt.drafts) if any(request == BAD for request, _ in rows))
    mates = serve(Foreign(executor, None), reuses=False, cancels_after=last + 1)
    bad = int(BAD)
    assert contents(found[:bad] + found[bad + 1 :]) == contents(mates[:bad] + mates[bad + 1 :])


def test_what_a_weight_of_0_hides_is_noticed(trt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(
        lowering_gated_delta, "_over_rows", lambda layers, weights, x, has_row: layers.matmul(weights, x)
    )
    found = serve(Foreign(open_layers(trt, "delta nets", tmp_path), torch.nan, spoils_at=3), reuses=False)
    assert len([output for output in found if output.finish_reason == "error"]) > 1
