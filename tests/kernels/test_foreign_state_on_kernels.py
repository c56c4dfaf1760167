"""The law of `tests/parity/test_foreign_state.py` over the GPU kernels: free memory changes no bit of a request."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.factories import make_target, make_zlab_drafter
from tests.kernels.test_step_on_kernels import NUM_DRAFT_TOKENS, make_executors
from tests.parity.test_foreign_state import BAD, CONTENTS, Foreign, contents, serve

PROMPTS = [[5, 9, 2, 7, 3, 8, 1, 4, 6], [7], [5, 9, 2, 7, 3, 8, 1, 4, 2, 2], [3] * 4]
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.slow
def test_free_memory_and_a_bad_mate_change_no_bit(tmp_path: Path, device: torch.device) -> None:
    target = make_target(tmp_path / "target", vocab_size=12, tokenizer=False, num_hidden_layers=1, **FEW_HEADS)
    drafter = make_zlab_drafter(
        tmp_path / "drafter",
        target_dir=target,
        num_layers=1,
        target_layer_ids=(0,),
        block_size=NUM_DRAFT_TOKENS + 1,
        **FEW_HEADS,
    )
    executor: Any = make_executors((target, drafter), device, num_snapshots=0)[1]
    given: dict[str, Any] = {"prompts": PROMPTS, "num_new": 3}
    clean = Foreign(executor, None)
    expected = contents(serve(clean, **given))
    for value in CONTENTS[:1]:
        foreign = Foreign(executor, value)
        assert contents(serve(foreign, **given)) == expected
        assert foreign.drafts == clean.drafts
    spoilt = Foreign(executor, torch.nan, spoils_at=2)
    found = serve(spoilt, reuses=False, **given)
    assert [output.request_id for output in found if output.finish_reason == "error"] == [BAD]
    last = max(i for i, rows in enumerate(spoilt.drafts) if any(request == BAD for request, _ in rows))
    mates = serve(Foreign(executor, None), reuses=False, cancels_after=last + 1, **given)
    others = [i for i in range(len(PROMPTS)) if str(i) != BAD]
    assert contents([found[i] for i in others]) == contents([mates[i] for i in others])
