"""Records of a slot that are not folded may hold anything: a request that ended leaves NaN there."""

import pytest
import torch

from dflash_trt.backends.torch.gated_delta import fold


@pytest.mark.parametrize("stale", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("num_folded", [0, 2])
def test_what_a_slot_holds_after_its_records_changes_no_state(stale: float, num_folded: int) -> None:
    torch.manual_seed(0)
    state, keys, deltas, decays = (
        torch.randn(shape) for shape in ((1, 4, 3, 5), (1, 2, 6, 3), (1, 4, 6, 5), (1, 4, 6))
    )
    is_folded = torch.arange(6)[None] < num_folded
    clean = [torch.where(is_folded.view(1, 1, 6, *[1] * (x.dim() - 3)), x, 0.0) for x in (keys, deltas, decays)]
    dirty = [torch.where(is_folded.view(1, 1, 6, *[1] * (x.dim() - 3)), x, stale) for x in (keys, deltas, decays)]
    assert torch.equal(fold(state, *dirty, is_folded), fold(state, *clean, is_folded))
