"""Taps and states of targets with gated delta nets, after drafts were rejected: those of transformers' full forward.

Every step is compared with one forward pass over the tokens so far, without a cache: the state that a wrong number of
tokens was folded into shows in the next taps. States themselves are compared with those of a prefill.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash_trt.backends.torch import gated_delta
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.backends.torch.gated_delta import SlotRows
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.network.drafters.dflash import DFlashDrafter
from dflash_trt.network.state import RecurrentCache
from tests.engines import PAGE_SIZE, Decoding, decode, make_executor
from tests.factories import make_target, make_zlab_drafter
from tests.parity.test_speculators import layer_outputs

VOCAB_SIZE, BLOCK_SIZE, NUM_NEW = 12, 6, 24
TAPS = (3, 0, 2)  # the last layer, before the final norm; a delta net; attention
LENGTHS = (1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 33)
FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", family=request.param, vocab_size=VOCAB_SIZE, tokenizer=False)
    drafter = make_zlab_drafter(root / "drafter", target_dir=target, block_size=BLOCK_SIZE, target_layer_ids=TAPS)
    return target, drafter


@pytest.fixture(scope="module")
def executor(pair: tuple[Path, Path]) -> Iterator[TorchExecutor]:
    executor = make_executor(*pair)
    yield executor
    executor.close()


class Observed:
    """Taps of accepted tokens, by position; those of later steps win."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taps: dict[int, Tensor] = {}
        observe = DFlashDrafter.observe

        def record(drafter: Any, ops: Any, tokens: Any, target: Any, acceptance: Any, state: Any) -> None:
            for row, position in enumerate(target.rows.positions.tolist()):
                if position < int(acceptance.next_context_lens[0]):
                    self.taps[position] = torch.cat([tap[row] for tap in target.taps])
            observe(drafter, ops, tokens, target, acceptance, state)

        monkeypatch.setattr(DFlashDrafter, "observe", record)

    def difference(self, target: Path, run: Decoding) -> float:
        """The largest one from transformers' over all tokens but the last."""
        tokens = (run.prompt + run.tokens)[: run.context_len]
        assert sorted(self.taps) == list(range(len(tokens)))
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        outputs = layer_outputs(model, torch.tensor([tokens]))
        expected = torch.cat([outputs[layer_id + 1][0] for layer_id in TAPS], dim=-1)
        found = torch.stack([self.taps[position] for position in range(len(tokens))])
        assert found.shape == expected.shape and expected.std() > 0.1
        return float((found - expected).abs().max())


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + 3 * length) % VOCAB_SIZE for i in range(length)]


def half_right(executor: TorchExecutor, prompt: list[int]) -> Any:
    """Drafts of which every number is accepted in turn, and K of which every number comes."""
    text = decode(executor, prompt, NUM_NEW + 2 * BLOCK_SIZE, num_draft_tokens=0).tokens

    def propose(run: Decoding) -> tuple[int, ...]:
        num_right, start = len(run.blocks) % BLOCK_SIZE, len(run.tokens)
        drafts = text[start : start + BLOCK_SIZE - 1]
        return tuple((token + (i >= num_right)) % VOCAB_SIZE for i, token in enumerate(drafts))

    return propose


@pytest.mark.parametrize("length", LENGTHS)
def test_taps_are_the_hidden_states_of_transformers_whatever_was_rejected(
    pair: tuple[Path, Path], executor: TorchExecutor, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(length)
    propose = half_right(executor, prompt)
    observed = Observed(monkeypatch)
    run = decode(executor, prompt, NUM_NEW, num_draft_tokens=BLOCK_SIZE - 1, propose=propose, chunk=17)
    assert set(run.num_accepted) == set(range(BLOCK_SIZE))
    assert observed.difference(pair[0], run) < 2e-4  # measured 4e-5


def test_one_token_more_in_the_state_shows_in_the_taps(
    pair: tuple[Path, Path], executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a bonus token that is counted twice."""
    prompt, fold = prompt_of(LENGTHS[-1]), gated_delta.fold
    propose = half_right(executor, prompt)
    observed = Observed(monkeypatch)

    def fold_one_more(state: Tensor, keys: Tensor, deltas: Tensor, decays: Tensor, is_folded: Tensor) -> Tensor:
        more = is_folded | is_folded.roll(1, 1)
        return fold(state, keys, deltas, decays, more)

    monkeypatch.setattr(gated_delta, "fold", fold_one_more)
    run = decode(executor, prompt, NUM_NEW, num_draft_tokens=BLOCK_SIZE - 1, propose=propose)
    assert observed.difference(pair[0], run) > 1e-2


def states_of(executor: TorchExecutor, position: int) -> list[Tensor]:
    """State and last inputs of slot 0 before `position`, of each delta net."""
    rows = SlotRows(slot_ids=torch.tensor([0]), num_rows=[1], context_lens=torch.tensor([position]))
    caches = [cache for cache in executor._state.target_kv if isinstance(cache, RecurrentCache)]
    return [part for cache in caches for part in gated_delta._folded(cache, rows, torch.tensor([0]))]


def test_the_state_after_decoding_is_that_of_a_prefill_of_the_same_tokens(executor: TorchExecutor) -> None:
    """The bonus token is not in it: it is the anchor of the next block."""
    prompt = prompt_of(9)
    run = decode(executor, prompt, NUM_NEW, num_draft_tokens=BLOCK_SIZE - 1, propose=half_right(executor, prompt))
    found = states_of(executor, run.context_len)
    tokens = (prompt + run.tokens)[: run.context_len]
    assert tokens == prompt + run.tokens[:-1]
    decode(executor, tokens, 1, num_draft_tokens=0)
    expected = states_of(executor, len(tokens))
    decode(executor, tokens[:-1], 1, num_draft_tokens=0)
    shorter = states_of(executor, len(tokens) - 1)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-4)  # measured 6e-5
    assert max(float((a - b).abs().max()) for a, b in zip(shorter, expected, strict=True)) > 1e-2


def test_another_prompt_in_a_used_slot_starts_from_nothing(executor: TorchExecutor) -> None:
    alone = decode(executor, prompt_of(5), 12, num_draft_tokens=3)
    decode(executor, prompt_of(33), 20, num_draft_tokens=5)
    again = decode(executor, prompt_of(5), 12, num_draft_tokens=3)
    assert (again.tokens, again.blocks) == (alone.tokens, alone.blocks)


def test_fp8_pages_hold_keys_and_values_and_no_states(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's results equal those on float32 pages into which rounded K and V are written."""
    scales = tuple(LayerKvScales(k=0.02 * (i + 1), v=0.01) for i in range(4))
    quantization = QuantizationSpec(target_kv=scales)
    fp8 = make_executor(*pair, quantization=quantization, has_kernels=False)
    attention = [cache.spec.scales for cache in fp8._state.target_kv if not isinstance(cache, RecurrentCache)]
    assert attention == [scales[2]], "of the only layer that attends"
    prompt = prompt_of(33)
    tokens = [decode(fp8, prompt, 12, num_draft_tokens=k).tokens[:12] for k in (0, 1, BLOCK_SIZE - 1)]
    assert tokens[0] == tokens[1] == tokens[2]
    found = fp8.target_logits(prompt)

    from dflash_trt.backends.torch.ops import TorchOps

    attend = TorchOps.attend

    def attend_rounded(self: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        rounded = [
            (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            for x, scale in ((k, scales[2].k), (v, scales[2].v))
        ]
        return attend(self, q, *rounded, *rest)

    plain = make_executor(*pair, has_kernels=False)
    exact = plain.target_logits(prompt)
    monkeypatch.setattr(TorchOps, "attend", attend_rounded)
    torch.testing.assert_close(found, plain.target_logits(prompt), rtol=0, atol=1e-4)
    assert (found - exact).abs().max() > 1e-3
