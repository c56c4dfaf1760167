"""Families whose networks no other test here builds: from config.json alone, through TensorRT-RTX's real builder."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.factories import make_target
from tests.gemma_targets import make_gemma
from tests.trt.test_check import LIMITS, check, config_of

FAMILIES = ("minimax_m2", "glm4_moe")
SLOW = (
    *("qwen2", "mistral", "phi3", "qwen3_moe", "deepseek_v32", "glm_moe_dsa"),
    *("qwen3_next", "qwen3_5_moe_text", "gemma4_unified_text"),
)


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_each_kind_of_layer_of_a_family_compiles(trt: ModuleType, tmp_path: Path, family: Any) -> None:
    if family.startswith("gemma"):
        target = make_gemma(tmp_path / "target", family=family)
    else:
        target = make_target(tmp_path / "target", family=family, vocab_size=12, tokenizer=False)
    result = check("--target", config_of(target, tmp_path / "config"), *LIMITS, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["plan_bytes"] > report["weights_bytes"] > 0
    two_kinds = ("glm", "deepseek", "qwen3_next", "qwen3_5", "gemma4")
    assert len(report["layer_ids"]["target"]) == (2 if family.startswith(two_kinds) else 1)
