"""Laws of `tests/parity/test_hybrid_prefixes.py` over TensorRT's executor, interpreted."""

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_trt.backends.slots import SlotSnapshots
from dflash_trt.backends.tensorrt.canary import check_pages
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from dflash_trt.core.errors import EngineDirError
from dflash_trt.core.step_plan import StateCopies
from tests.parity.test_hybrid_prefixes import executor as executor
from tests.parity.test_hybrid_prefixes import expected as expected
from tests.parity.test_hybrid_prefixes import make_loop, tokens_of
from tests.parity.test_hybrid_prefixes import pair as pair
from tests.parity.test_hybrid_prefixes import test_a_hit_changes_no_token as test_a_hit_changes_no_token
from tests.trt.engines import open_pair_engine


@pytest.fixture(scope="module")
def opened(trt: ModuleType) -> Any:
    return partial(open_pair_engine, trt)


def test_a_hit_whose_state_is_another_ones_shows(
    executor: TensorRTExecutor, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: pages without their state are a wrong answer."""
    restore = SlotSnapshots.restore

    def restore_wrongly(self: SlotSnapshots, copies: StateCopies) -> None:
        restore(self, copies)
        for name, tensor in executor.state.slots.items():
            if name.endswith(".state"):
                tensor[torch.from_numpy(copies.slots)] *= -1

    monkeypatch.setattr(SlotSnapshots, "restore", restore_wrongly)
    assert tokens_of(make_loop(executor, 0), together=False) != expected


def test_the_canary_finds_a_snapshot_that_a_step_writes_to(opened: Any, pair: tuple[Path, Path]) -> None:
    executor = opened(*pair, max_batch_size=3, num_snapshots=2)
    check_pages(executor)
    submit, state = executor.submit, next(iter(executor.state.slots.values()))
    executor.submit = lambda plan: (submit(plan), state[-1].zero_())[0]
    with pytest.raises(EngineDirError, match="expected no slot of others to be written, found 1 of them"):
        check_pages(executor)
