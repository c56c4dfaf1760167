"""FP8 pages against transformers, whose cache then holds what the pages do: codes of K / k_scale and V / v_scale."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from tests.engines import make_executor
from tests.factories import make_target
from tests.gemma_targets import make_gemma

VOCAB_SIZE = 12
TOKENS = [(7 * i + i // 5) % VOCAB_SIZE for i in range(25)]


class CodedCache(DynamicCache):
    """Rounds K and V to FP8 codes as they enter. Masks do what windows do."""

    def __init__(self, scales: tuple[LayerKvScales, ...]) -> None:
        super().__init__()
        self._scales = scales

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **more: Any) -> Any:
        scales = self._scales[layer_idx]
        coded = (self._coded(key_states, scales.k), self._coded(value_states, scales.v))
        return super().update(*coded, layer_idx, *rest, **more)

    @staticmethod
    def _coded(x: Tensor, scale: float) -> Tensor:
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "mistral", "phi3", "qwen3_moe", "gpt_oss", "glm4_moe", "minimax_m2", "gemma3_text"]
)
@torch.inference_mode()
def test_logits_over_fp8_pages_are_those_of_transformers_over_the_same_codes(tmp_path: Path, family: str) -> None:
    if family == "gemma3_text":
        target = make_gemma(tmp_path / "target", family="gemma3_text", vocab_size=VOCAB_SIZE)
    else:
        target = make_target(tmp_path / "target", family=family, vocab_size=VOCAB_SIZE, tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    scales = tuple(LayerKvScales(k=0.02 + 0.01 * i, v=0.01) for i in range(model.config.num_hidden_layers))

    def theirs(**options: Any) -> Tensor:
        logits: Tensor = model(torch.tensor([TOKENS]), use_cache=True, **options).logits[0]
        return logits

    expected = theirs(past_key_values=CodedCache(scales))
    found = make_executor(target, quantization=QuantizationSpec(target_kv=scales)).target_logits(TOKENS)
    rounding = (theirs() - expected).abs()  # what the codes change
    differences = (found - expected).abs()
    assert differences.max() < rounding.max() / 30  # a value beside a border may get the next code: measured 1 / 104
    assert differences.median() < rounding.median() / 100  # measured 1 / 305, without such a value 1 / 100,000
    others = tuple(LayerKvScales(k=each.v, v=each.k) for each in scales)
    exchanged = (theirs(past_key_values=CodedCache(others)) - expected).abs()
    assert exchanged.max() > rounding.max() / 10  # the negative control
