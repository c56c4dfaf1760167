"""Steps with an EAGLE-3 head: the TensorRT network, interpreted, makes the chains of the torch backend."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.eagle3_files import save_eagle3_head
from tests.engines import make_executor
from tests.factories import make_target
from tests.trt.networks import MAX_SEQ_LEN, InterpretedExecutor, define_pair
from tests.trt.test_dflash2_steps import assert_same, steps_of

SOME = (0, 1, 2, 4, 5, 7, 8, 10, 11)  # of twelve tokens
HEADS: dict[str, dict[str, Any]] = {
    "full vocabulary, normed residual": {"norm_before_residual": True},
    "norm of each tap, normed features, a window": {"fc_norm": True, "norm_output": True, "sliding_window": 5, "draft_tokens": SOME},
    "norm of two taps, Qwen3's layer": {"architecture": "qwen3", "norm_before_fc": True, "aux_hidden_state_layer_ids": (3, 1)},
}


def make_pair(root: Path, options: dict[str, Any]) -> tuple[Path, Path]:
    target = make_target(root / "target", vocab_size=12, tokenizer=False)
    return target, save_eagle3_head(root / "drafter", target_dir=target, **options)


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS.keys())
def test_every_step_of_a_trace_equals_torchs(trt: ModuleType, tmp_path: Path, options: dict[str, Any]) -> None:
    pair = make_pair(tmp_path, options)
    ours = InterpretedExecutor(define_pair(trt, *pair))
    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN)
    print(ours.limits.max_draft_len, theirs.limits.max_draft_len)
    ks = (3, 1, 0, 2)
    assert_same(steps_of(ours, ks=ks), steps_of(theirs, ks=ks))
