"""Hybrids over the GPU kernels after drafts were rejected at each place: tokens and taps are those of plain PyTorch.

tests/parity compares those with transformers' full forward.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt import SamplingParams
from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.cuda.handles import tensor_of
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.core.request import Request
from dflash_trt.network.drafters.dflash import DFlashDrafter
from dflash_trt.network.state import RecurrentCache
from dflash_trt.scheduler import ngram_index
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.engines import Decoding, decode
from tests.factories import make_target, make_zlab_drafter
from tests.kernels.test_step_on_kernels import PAGE_SIZE, Executor, make_executors

VOCAB_SIZE, NUM_DRAFT_TOKENS, NUM_NEW = 12, 2, 3
PROMPT = [5, 2, 9, 7, 1]  # a page and a token
TAPS = (1, 0)  # attention, a delta net
# Sums in another order, of hidden states of up to 20; measured in the interpreter: 1.2e-5.
TAP_TOLERANCE = 1e-4

Taps = dict[int, Tensor]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    target = make_target(root / "target", family="qwen3_5_text", vocab_size=VOCAB_SIZE, tokenizer=False, **layers)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    options = {"block_size": NUM_DRAFT_TOKENS + 1, "num_layers": 1, "target_layer_ids": TAPS}
    return target, make_zlab_drafter(root / "drafter", target_dir=target, **options, **heads)


@pytest.fixture(scope="module")
def executors(pair: tuple[Path, Path], device: torch.device) -> tuple[Executor, TorchGpuExecutor]:
    return make_executors(pair, device, max_num_tokens=12)


@pytest.fixture
def taps(monkeypatch: pytest.MonkeyPatch) -> Taps:
    """Of accepted tokens, by position; those of later steps win."""
    found: Taps = {}
    observe = DFlashDrafter.observe

    def record(drafter: Any, ops: Any, tokens: Any, target: Any, acceptance: Any, state: Any) -> None:
        joined, rows = torch.cat([tensor_of(tap).cpu() for tap in target.taps], dim=-1), target.rows
        for row, position in enumerate(rows.positions[: rows.token_offsets[1]].tolist()):  # behind it is padding
            if position < int(acceptance.next_context_lens[0]):
                found[position] = joined[row]
        observe(drafter, ops, tokens, target, acceptance, state)

    monkeypatch.setattr(DFlashDrafter, "observe", record)
    return found


def proposing(text: list[int], num_right: int) -> Callable[[Decoding], tuple[int, ...]]:
    def propose(run: Decoding) -> tuple[int, ...]:
        drafts = text[len(run.tokens) : len(run.tokens) + NUM_DRAFT_TOKENS]
        return tuple((token + (i == num_right)) % VOCAB_SIZE for i, token in enumerate(drafts))

    return propose


def difference(first: Taps, second: Taps, num_tokens: int) -> float:
    stacked = [torch.stack([taps[position] for position in range(num_tokens)]) for taps in (first, second)]
    assert stacked[0].std() > 0.1
    return float((stacked[0] - stacked[1]).abs().max())


@pytest.mark.parametrize(("num_draft_tokens", "num_right"), [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)])
def test_a_rejection_at_any_place_leaves_tokens_and_taps_as_they_are(
    executors: tuple[Executor, TorchGpuExecutor], taps: Taps, num_draft_tokens: int, num_right: int
) -> None:
    reference, executor = executors
    text = decode(reference, PROMPT, NUM_NEW + 4, num_draft_tokens=0).tokens
    expected = dict(taps)
    taps.clear()
    propose = proposing(text, num_right)
    run = decode(executor, PROMPT, NUM_NEW, num_draft_tokens=num_draft_tokens, propose=propose)
    assert run.tokens == text[: len(run.tokens)] and run.num_accepted[0] == num_right
    assert difference(taps, expected, run.context_len) < TAP_TOLERANCE


def test_prompts_of_a_token_and_around_a_page_share_batches_whose_k_changes(
    executors: tuple[Executor, TorchGpuExecutor],
) -> None:
    reference, executor = executors
    lengths = (1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1)  # together more than a step takes
    prompts = [[(7 * i + 3 * length) % VOCAB_SIZE for i in range(length)] for length in lengths]
    policy = BatchSizeDraftLength({1: NUM_DRAFT_TOKENS, 2: 1, 3: 0})
    scheduler = Scheduler(executor.limits, SchedulerConfig(enable_prefix_caching=False), policy)
    loop = EngineLoop(executor, scheduler, overlaps=True)
    streams = []
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_new_tokens=2 + i, ignore_eos=True)
        streams.append(loop.submit(Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling)))
    while loop.step():
        pass
    for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        expected = decode(reference, prompt, 2 + i, num_draft_tokens=0).tokens
        assert list(stream.result(timeout_s=1).token_ids) == expected
    loop.close()


def test_drafts_from_texts_share_steps_with_the_drafters(
    executors: tuple[Executor, TorchGpuExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, executor = executors
    monkeypatch.setattr(ngram_index, "MIN_MATCH", 1)
    scheduler = Scheduler(executor.limits, SchedulerConfig(enable_prefix_caching=False, ngram=True))
    loop = EngineLoop(executor, scheduler)
    prompts = [[3, 5, 3, 5], PROMPT, list(range(VOCAB_SIZE))]
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    streams = [
        loop.submit(Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling))
        for i, prompt in enumerate(prompts)
    ]
    while loop.step():
        pass
    for prompt, stream in zip(prompts, streams, strict=True):
        assert list(stream.result(timeout_s=1).token_ids) == decode(reference, prompt, 6, num_draft_tokens=0).tokens
    counts = scheduler.statistics()
    assert 0 < counts.num_ngram_accepted_tokens < counts.num_ngram_draft_tokens < counts.num_draft_tokens


def test_taps_of_other_layers_show(executors: tuple[Executor, TorchGpuExecutor], taps: Taps) -> None:
    """The negative control."""
    reference, executor = executors
    decode(reference, PROMPT, 1, num_draft_tokens=0)
    expected = dict(taps)
    taps.clear()
    assert executor.network.draft is not None
    draft = executor.network.draft.model_copy(update={"target_layer_ids": TAPS[::-1]})
    executor.network = replace(executor.network, draft=draft)
    decode(executor, PROMPT, 1, num_draft_tokens=0)
    assert difference(taps, expected, len(PROMPT)) > 1000 * TAP_TOLERANCE


def test_fp8_pages_hold_keys_and_values_and_no_states(
    executors: tuple[Executor, TorchGpuExecutor], pair: tuple[Path, Path], device: torch.device, exact_fp8: None
) -> None:
    scales = tuple(LayerKvScales(k=0.02 * (i + 1), v=0.01) for i in range(2))
    reference, executor = make_executors(
        pair, device, pages=QuantizationSpec(target_kv=scales, draft_kv=scales[:1]), max_num_tokens=12
    )
    assert [pages.dtype for pages in executor.pages] == [torch.float8_e4m3fn] * 2, "of attention and of the drafter"
    states = [cache for cache in executor._state.target_kv if isinstance(cache, RecurrentCache)]
    assert states[0].tensors["state"].dtype == torch.float32
    text = decode(reference, PROMPT, NUM_NEW, num_draft_tokens=0).tokens
    found = decode(executor, PROMPT, NUM_NEW, num_draft_tokens=NUM_DRAFT_TOKENS, propose=proposing(text, 1))
    assert found.tokens[:NUM_NEW] == text
    logits, expected, exact = (e.target_logits(PROMPT).cpu() for e in (executor, reference, executors[0]))
    assert (logits - expected).abs().max() < 1e-3 * expected.abs().max() < (exact - expected).abs().max()
