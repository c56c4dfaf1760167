"""Drafts from texts over real networks: the tokens and log probabilities of transformers, whatever the layers are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_trt import SamplingParams
from dflash_trt.core.request import GenerationOutput, Request
from dflash_trt.scheduler import ngram_index
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.dflash2_files import make_dflash2_drafter
from tests.eagle3_files import save_eagle3_head
from tests.engines import make_executor
from tests.factories import make_target, make_zlab_drafter
from tests.gemma_targets import make_gemma

VOCAB_SIZE, NUM_NEW, MIN_MATCH = 12, 30, 2
SHARED = [(5 * i * i + i) % VOCAB_SIZE for i in range(40)]
PROMPTS = [[*SHARED, 8, 4], SHARED + [3] * 9, SHARED[:30], [*SHARED, 8, 4, 4], [7]]
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}

Pair = tuple[Path, Path]


def dflash(root: Path) -> Pair:
    target = make_target(root / "target", vocab_size=VOCAB_SIZE, tokenizer=False)
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=6)


def dflash2(root: Path) -> Pair:
    target = make_target(root / "target", vocab_size=VOCAB_SIZE, tokenizer=False)
    return target, make_dflash2_drafter(root / "drafter", target_dir=target, block_size=6)


def eagle3(root: Path) -> Pair:
    target = make_target(root / "target", vocab_size=VOCAB_SIZE, tokenizer=False)
    return target, save_eagle3_head(root / "drafter", target_dir=target)


def latents(root: Path) -> Pair:
    target = make_target(root / "target", family="deepseek_v3", vocab_size=VOCAB_SIZE, tokenizer=False)
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=6)


def hybrid(root: Path) -> Pair:
    target = make_target(root / "target", family="qwen3_5_text", vocab_size=VOCAB_SIZE, tokenizer=False, **HYBRID)
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=6)


def windows(root: Path) -> Pair:
    target = make_gemma(root / "target", family="gemma3_text", vocab_size=VOCAB_SIZE, head_dim=32)
    layers = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=6, num_layers=2, **layers)


SIZES: dict[Callable[[Path], Pair], dict[str, Any]] = {
    dflash: {},
    dflash2: {},
    eagle3: {},
    latents: {},
    hybrid: {"num_snapshots": 4},
    windows: {"has_page_groups": True, "budget_bytes": 600_000},
}


def outputs_of(loop: EngineLoop, *, preempts: bool) -> list[GenerationOutput]:
    """Of all prompts, the first alone and the others together."""
    sampling = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=True)
    streams, number = [], 0
    for i, prompt in enumerate(PROMPTS):
        streams.append(loop.submit(Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling)))
        while i in (0, len(PROMPTS) - 1) and loop.step():
            loop.check_integrity()
            number += 1
            if preempts and number % 5 == 3:
                loop._scheduler.preempt(str(number % len(PROMPTS)))
    return [stream.result(timeout_s=1) for stream in streams]


@pytest.mark.parametrize("make", SIZES, ids=lambda make: make.__name__)
def test_tokens_and_log_probabilities_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Pair]
) -> None:
    """With short matches, so that drafts are rejected too; after prefix hits and preemptions."""
    monkeypatch.setattr(ngram_index, "MIN_MATCH", MIN_MATCH)
    pair = make(tmp_path)
    executor = make_executor(*pair, max_batch_size=3, max_num_tokens=20, **SIZES[make])
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()
    for preempts in (False, True):
        loop = EngineLoop(executor, Scheduler(executor.limits, SchedulerConfig(ngram=True)))
        outputs = outputs_of(loop, preempts=preempts)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
            assert list(output.token_ids) == logits.argmax(1).tolist()
            expected = logits.log_softmax(1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(output.logprobs), expected, rtol=0, atol=1e-4)
        counts = loop.statistics().scheduler
        assert 0 < counts.num_ngram_accepted_tokens < counts.num_ngram_draft_tokens < counts.num_draft_tokens
        assert counts.num_prefix_hit_tokens > 0
        assert (counts.num_preemptions > 0) == preempts
