"""What every target family owes, in the corners of its config: tokens around a page's end, taps, drafts, two ranks.

transformers gives tokens and the outputs of the layers, PyPI `dflash` the drafts that follow from them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.backends.sequence_batch import sequence_batch
from dflash_trt.backends.step_inputs import step_inputs
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.backends.torch.ops import TorchOps
from dflash_trt.network.decoder import run_target
from tests.engines import PAGE_SIZE, decode, make_executor
from tests.executor.rank_engines import build, opened
from tests.factories import make_target, make_zlab_drafter
from tests.parity import test_gemma as gemma
from tests.parity.corners import CORNERS
from tests.parity.test_dflash import BLOCK, NUM_NEW, PROMPT, expected_blocks
from tests.parity.test_llama4 import model_of
from tests.parity.test_speculators import layer_outputs
from tests.traces import GREEDY, PROMPTS, integers, logprobs, trace

TOLERANCE = 1e-4  # measured 1e-5, of numbers up to 10
VOCAB_SIZE = 12
TOKENS = [(7 * i + i // 5) % VOCAB_SIZE for i in range(4 * PAGE_SIZE + 1)]

# A matrix that only this family has, or has in its own way.
CHANGED = {
    "qwen3": "self_attn.q_norm.weight",
    "llama": "mlp.gate_proj.weight",
    "qwen2": "self_attn.v_proj.bias",
    "mistral": "self_attn.v_proj.weight",
    "phi3": "self_attn.qkv_proj.weight",
    "qwen3_moe": "mlp.gate.weight",
    "gpt_oss": "self_attn.sinks",
    "glm4_moe": "mlp.shared_experts.up_proj.weight",
    "minimax_m2": "self_attn.k_norm.weight",
    "deepseek_v3": "self_attn.kv_a_proj_with_mqa.weight",
    "deepseek_v32": "self_attn.kv_a_proj_with_mqa.weight",
    "glm_moe_dsa": "self_attn.kv_a_proj_with_mqa.weight",
    "llama4_text": "feed_forward.experts.gate_up_proj",
}


@dataclass(frozen=True)
class Pair:
    root: Path  # of directories `target` and `drafter`
    family: str
    is_first: bool  # of its family's corners

    @property
    def target(self) -> Path:
        return self.root / "target"

    @property
    def drafter(self) -> Path:
        return self.root / "drafter"


ALL_CORNERS = [(family, corner) for family, corners in CORNERS.items() for corner in corners]
FIRST_CORNERS = pytest.mark.parametrize(
    "pair",
    [
        pytest.param(each, id=": ".join(each), marks=[pytest.mark.slow] * (each[1] != next(iter(CORNERS[each[0]]))))
        for each in ALL_CORNERS
    ],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module", params=ALL_CORNERS, ids=": ".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, corner = request.param
    pair = Pair(tmp_path_factory.mktemp("pair"), family, is_first=corner == next(iter(CORNERS[family])))
    options = CORNERS[family][corner]
    make_target(pair.target, family=family, vocab_size=VOCAB_SIZE, tokenizer=False, **options)
    make_zlab_drafter(
        pair.drafter, target_dir=pair.target, block_size=BLOCK, attention_bias=True, target_layer_ids=(0, 2)
    )
    return pair


@torch.inference_mode()
def our_outputs(executor: TorchExecutor) -> list[torch.Tensor]:
    """Of all layers, after TOKENS."""
    inputs = step_inputs(sequence_batch(TOKENS, page_size=PAGE_SIZE))
    ops, network = executor._ops(inputs, num_draft_tokens=0), executor.network
    weights, state = network.target_weights, executor._state
    return list(run_target(ops, network.target, weights, inputs.token_ids, ops.token_rows(), state.target_kv))


def test_the_outputs_of_all_layers_are_those_of_transformers(pair: Pair, tmp_path: Path) -> None:
    """What a drafter taps. The negative control is one changed tensor, once in each family."""
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    expected = [output[0] for output in layer_outputs(model, torch.tensor([TOKENS]))[1:]]
    for ours, theirs in zip(our_outputs(make_executor(pair.target)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    if not pair.is_first:
        return
    tensors = load_file(pair.target / "model.safetensors")
    name = f"model.layers.1.{CHANGED[pair.family]}"
    tensors[name] = tensors[name].roll(1, dims=0)
    (tmp_path / "config.json").write_bytes((pair.target / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = our_outputs(make_executor(tmp_path))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=TOLERANCE)
    assert (found[1] - expected[1]).abs().max() > 100 * TOLERANCE


@torch.no_grad()
def greedy_tokens(model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """What transformers chooses after the prompt and after each of `tokens` but the last."""
    logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits
    return list(logits[0, len(prompt) - 1 :].argmax(dim=-1).tolist())


@FIRST_CORNERS
def test_prompts_around_the_end_of_a_page_have_the_tokens_of_transformers(pair: Pair) -> None:
    """In mixed batches; the longest prompt is longer than every window. Negative controls: a family's own tests."""
    executor = make_executor(pair.target, pair.drafter, max_batch_size=4)
    texts = gemma.tokens_of(executor, num_draft_tokens=0)
    assert len({tuple(tokens) for tokens in texts}) > 1
    model = model_of(pair.target)
    for prompt, tokens in zip(gemma.PROMPTS, texts, strict=True):
        assert greedy_tokens(model, prompt, tokens) == tokens
    for num_draft_tokens in (1, BLOCK - 1):
        assert gemma.tokens_of(executor, num_draft_tokens) == texts


def test_drafts_are_those_of_dflash(pair: Pair) -> None:
    run = decode(make_executor(pair.target, pair.drafter), PROMPT, NUM_NEW, num_draft_tokens=BLOCK - 1)
    assert run.blocks == expected_blocks(pair.target, pair.drafter, run.tokens, run.blocks)


@FIRST_CORNERS
def test_two_ranks_compute_what_one_does(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One K/V head, where a family can have so few, is held by both."""
    with opened(build(pair.root, tp_size=1)) as one, opened(build(pair.root, tp_size=2)) as two:
        expected, _ = trace(one, GREEDY, num_draft_tokens=(3, 0))
        found, _ = trace(two, GREEDY, num_draft_tokens=(3, 0))
        assert integers(found) == integers(expected)
        torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=TOLERANCE)
        expected_logits = one.target_logits(PROMPTS[1])
        torch.testing.assert_close(two.target_logits(PROMPTS[1]), expected_logits, rtol=0, atol=TOLERANCE)
        if any(gqa.has_joint_qk_norm for gqa in one.network.target.attentions):  # the negative control
            mean = TorchOps.joint_rms_norm
            monkeypatch.setattr(TorchOps, "joint_rms_norm", lambda *x: (mean(*x), TorchOps.rms_norm(*x))[1])
            assert (two.target_logits(PROMPTS[1]) - expected_logits).abs().max() > 100 * TOLERANCE
