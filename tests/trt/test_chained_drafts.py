"""Rejection sampling in steps that are fed on the device: slots bring a step its drafts' candidates."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.tensorrt.buffers import StepBuffers
from dflash_trt.backends.tensorrt.context import StepContexts
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, plan_of, request_results
from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.core.step_plan import CHAINED, ExecutorLimits, StepPlan
from dflash_trt.engine_dir import EngineLimits
from dflash_trt.scheduler import ngram_index
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.statistics import SchedulerStatistics
from dflash_trt.serving.engine_loop import EngineLoop
from tests.dflash2_files import make_dflash2_drafter
from tests.dspark_files import save_dspark_drafter
from tests.eagle3_files import save_eagle3_head
from tests.engines import PAGE_SIZE, make_executor
from tests.factories import make_target
from tests.mtp_files import make_mtp_target
from tests.traces import PROMPTS, Steps, integers
from tests.trt.fake_engine import USER_MANAGED, FakeEngine
from tests.trt.networks import MAX_SEQ_LEN, define_pair
from tests.trt.test_step_tokens import make_pair
from tests.trt.test_trt_executor import CPU, HOST_STREAM

K = 3
KS = (K, K, 2, K, 1, 0, *[K] * 12)  # of the steps in turn
NUM_PAGES = 24  # of a request
SAMPLINGS = (
    StepSampling(temperature=2.0, seed=(1 << 61) + 5, draft_stream=1),
    StepSampling(temperature=1.3, seed=7),
    StepSampling(),
    StepSampling(temperature=3.0, top_k=9, top_p=0.95, min_p=0.02, seed=11, draft_stream=1),
)
REJECTION = [i for i, sampling in enumerate(SAMPLINGS) if sampling.draft_stream]


def dflash(root: Path) -> tuple[Path, Path]:
    target, drafter = make_pair(root)
    assert drafter is not None
    return target, drafter


def reduced_vocabulary(root: Path) -> tuple[Path, Path]:
    target, drafter = make_pair(root, speculators=True)
    assert drafter is not None
    return target, drafter


def dflash2(root: Path) -> tuple[Path, Path]:
    target = make_target(root / "target", vocab_size=12, tokenizer=False)
    return target, make_dflash2_drafter(root / "drafter", target_dir=target, block_size=K + 1)


def eagle3(root: Path) -> tuple[Path, Path]:
    target = make_target(root / "target", num_hidden_layers=2, vocab_size=12, tokenizer=False)
    options: dict[str, Any] = {"aux_hidden_state_layer_ids": (2, 1), "draft_tokens": (0, 1, 2, 4, 5, 7, 8, 10, 11)}
    return target, save_eagle3_head(root / "drafter", target_dir=target, **options)


def dspark(root: Path) -> tuple[Path, Path]:
    target = make_target(root / "target", num_hidden_layers=2, vocab_size=12, tokenizer=False)
    options: dict[str, Any] = {"aux_hidden_state_layer_ids": (2, 1), "draft_tokens": (0, 1, 2, 4, 5, 7, 8, 10, 11)}
    return target, save_dspark_drafter(root / "drafter", target_dir=target, block_size=K, **options)


def mtp(root: Path) -> tuple[Path, Path]:
    target = make_mtp_target(root / "target", family="glm4_moe", num_hidden_layers=2, vocab_size=12, tokenizer=False)
    return target, target


DRAFTERS: Sequence[Callable[[Path], tuple[Path, Path]]] = (dflash, reduced_vocabulary, dflash2, eagle3, dspark, mtp)


def make_ours(trt: ModuleType, pair: tuple[Path, Path]) -> TensorRTExecutor:
    defined = define_pair(trt, *pair, max_draft_len=K)
    sizes: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": MAX_SEQ_LEN, "max_num_tokens": 64, "max_draft_len": K}
    sizes |= {"page_size": PAGE_SIZE}
    engine = FakeEngine(defined, EngineLimits(**sizes))
    contexts = StepContexts(engine, USER_MANAGED, HOST_STREAM, captured=(), device=CPU)
    limits = ExecutorLimits(**sizes, num_pages=4 * NUM_PAGES)
    return TensorRTExecutor(contexts, defined.spec, limits, stream=HOST_STREAM, capture=None, device=CPU)


def steps_of(executor: Any, *, before_step: Callable[[], object] = lambda: None) -> Steps:
    """The first three requests get their prompts together, the last one in the second step; the rest is chained."""
    steps: Steps = []
    num_candidates = 0
    for step, k in enumerate(KS):
        num_live = 3 if step == 0 else 4
        is_prompt = [step == 0 or (step == 1 and r == 3) for r in range(num_live)]
        parts = [_part(r, num_candidates=None if is_prompt[r] else min(num_candidates, k)) for r in range(num_live)]
        plan = plan_of(StepBatch(requests=tuple(parts), num_draft_tokens=k), max_pages=executor.limits.max_pages)
        before_step()
        steps.append(request_results(executor.submit(_chained(plan, is_prompt)).result()))
        num_candidates = k
    return steps


def _part(r: int, *, num_candidates: int | None) -> ScheduledRequest:
    """None: the prompt."""
    return ScheduledRequest(
        request_id=str(r),
        token_ids=tuple(PROMPTS[r]) if num_candidates is None else (0,) * (1 + num_candidates),
        context_len=0,
        num_candidates=num_candidates or 0,
        page_ids=tuple(range(NUM_PAGES * r, NUM_PAGES * (r + 1))),
        sampling=SAMPLINGS[r],
    )


def _chained(plan: StepPlan, is_prompt: Sequence[bool]) -> StepPlan:
    context_lens = np.where(is_prompt, plan.rows.context_lens, CHAINED)
    return replace(plan, rows=replace(plan.rows, context_lens=context_lens))


@pytest.mark.parametrize("make", DRAFTERS)
def test_chained_steps_give_torchs_tokens_and_drafts(
    trt: ModuleType, tmp_path: Path, make: Callable[[Path], tuple[Path, Path]]
) -> None:
    pair = make(tmp_path)
    expected = steps_of(make_executor(*pair, max_seq_len=MAX_SEQ_LEN))
    ours = make_ours(trt, pair)
    assert integers(steps_of(ours)) == integers(expected)
    counts = [(row[r].num_accepted, min(KS[i], KS[i + 1])) for i, row in enumerate(expected[2:], 1) for r in REJECTION]
    assert 0 < sum(accepted for accepted, _ in counts) < sum(given for _, given in counts)  # and rejections


@pytest.mark.parametrize("make", DRAFTERS)
def test_slots_that_lose_the_candidates_of_drafts_are_noticed(
    trt: ModuleType, tmp_path: Path, make: Callable[[Path], tuple[Path, Path]]
) -> None:
    pair = make(tmp_path)
    expected = steps_of(make_executor(*pair, max_seq_len=MAX_SEQ_LEN))
    ours = make_ours(trt, pair)
    draft_topk_probs = ours._buffers.staging.slots.draft_topk_probs
    found = steps_of(ours, before_step=draft_topk_probs.zero_)
    assert integers(found) != integers(expected)
    shared = [r for r in range(4) if r not in REJECTION]
    assert [[row[r] for r in shared if r < len(row)] for row in integers(found)] == [
        [row[r] for r in shared if r < len(row)] for row in integers(expected)
    ]


def served(executor: Any) -> tuple[list[tuple[int, ...]], SchedulerStatistics]:
    """Tokens of all prompts, served together with drafts from their texts, sampled in every way."""
    config = SchedulerConfig(enable_prefix_caching=False, ngram=True)
    scheduler = Scheduler(executor.limits, config, FixedDraftLength(K))
    loop = EngineLoop(executor, scheduler)
    streams = []
    for i, (prompt, options) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        fields = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
        sampling = SamplingParams(max_new_tokens=40, ignore_eos=True, **fields)
        request = Request(
            request_id=str(i),
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            seed=options.seed,
            is_reproducible=not options.draft_stream,
        )
        streams.append(loop.submit(request))
    while loop.step():
        pass
    tokens = [stream.result(timeout_s=1).token_ids for stream in streams]
    return tokens, scheduler.statistics()


@pytest.mark.parametrize("make", DRAFTERS)
def test_drafts_from_texts_give_torchs_tokens(
    trt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], tuple[Path, Path]]
) -> None:
    """Given rows of the host's drafts beside chained rows."""
    monkeypatch.setattr(ngram_index, "MIN_MATCH", 2)
    pair = make(tmp_path)
    expected, counts = served(make_executor(*pair, max_seq_len=MAX_SEQ_LEN))
    found, ours = served(make_ours(trt, pair))
    assert found == expected
    assert 0 < counts.num_ngram_accepted_tokens < counts.num_ngram_draft_tokens < counts.num_draft_tokens
    assert ours.num_ngram_draft_tokens == counts.num_ngram_draft_tokens


def test_candidates_of_drafts_are_no_part_of_what_the_host_gets(trt: ModuleType, tmp_path: Path) -> None:
    ours = make_ours(trt, dflash(tmp_path))
    buffers: StepBuffers = ours._buffers
    own = {"next_draft_topk_ids", "next_draft_topk_probs"}
    assert own <= set(buffers.tensors) and not own & set(buffers.results.device_tensors)
    num_probs = 8 * K * ours._spec.draft_topk
    assert {buffers.tensors[name].numel() for name in (*own, "draft_topk_ids", "draft_topk_probs")} == {num_probs}
