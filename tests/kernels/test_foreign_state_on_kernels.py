"""The law of `tests/parity/test_foreign_state.py` over the GPU kernels: free memory changes no bit of a request."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.factories import make_target, make_zlab_drafter
from tests.kernels.test_step_on_kernels import NUM_DRAFT_TOKENS, make_executors
from tests.parity.test_foreign_state import CONTENTS, check_free_memory, check_mates

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
    check_free_memory(executor, CONTENTS[:1], **given)
    check_mates(executor, spoils_at=2, **given)
