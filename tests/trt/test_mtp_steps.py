"""Steps with an MTP head: the TensorRT network, interpreted, makes the chains of the torch backend."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.engines import make_executor
from tests.mtp_files import make_mtp_target
from tests.trt.networks import MAX_SEQ_LEN, InterpretedExecutor, define_pair
from tests.trt.test_eagle3_steps import NUM_PAGES, SAMPLED, K, assert_same, expected_of

TARGETS: dict[str, dict[str, Any]] = {
    "Qwen3.5": {"family": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]},
    "Qwen3.5 with experts": {"family": "qwen3_5_moe_text", "layer_types": ["linear_attention", "full_attention"]},
    "GLM-4.5": {"family": "glm4_moe"},
}


@pytest.mark.parametrize("name", TARGETS)
def test_every_step_of_a_mixed_trace_equals_torchs(trt: ModuleType, tmp_path: Path, name: str) -> None:
    """Whatever others left in the pages, even if it is not finite."""
    sizes = {"num_hidden_layers": 2, "vocab_size": 12, "tokenizer": False}
    target = make_mtp_target(tmp_path / "target", **TARGETS[name], **sizes)
    ours = InterpretedExecutor(define_pair(trt, target, target, max_draft_len=K), num_pages=NUM_PAGES)
    for state, pages in ours.state.items():
        if state.startswith(("target_kv", "draft")):
            pages.fill_(torch.nan)
    expected = expected_of(make_executor(target, target, max_seq_len=MAX_SEQ_LEN))
    assert_same(expected.steps_of(ours), expected.greedy)
    assert_same(expected.steps_of(ours, SAMPLED), expected.sampled)
