"""Layers with windows in pages of their own: transformers' tokens far beyond the windows, however requests are run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_trt import SamplingParams
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.core.request import Request
from dflash_trt.core.step_plan import StepExecutor, StepHandle, StepPlan
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.window_pages import WindowPages
from dflash_trt.serving.engine_loop import EngineLoop
from tests.dflash2_files import make_dflash2_drafter
from tests.dspark_files import save_dspark_drafter
from tests.eagle3_files import save_eagle3_head
from tests.engines import make_executor
from tests.factories import make_zlab_drafter
from tests.gemma_targets import EVERYTHING, make_gemma

NUM_NEW, VOCAB_SIZE, BLOCK_SIZE = 40, 12, 6
SHARED = [(5 * i * i + i) % VOCAB_SIZE for i in range(50)]
PROMPTS = [[*SHARED, 8, 4], SHARED + [3] * 9, [7], SHARED[:30], [*SHARED, 8, 4, 4]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    target = make_gemma(root / "target", family="gemma3_text", vocab_size=VOCAB_SIZE, head_dim=32)
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
    drafter = make_zlab_drafter(root / "drafter", target_dir=target, block_size=BLOCK_SIZE, num_layers=2, **windows)
    return target, drafter


@pytest.fixture(scope="module", params=[False, True], ids=["PyTorch", "CPU kernels"])
def executor(pair: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[TorchExecutor]:
    """Windows of 6 tokens, those of the drafter of 9; chunks of 20."""
    executor = make_executor(
        *pair,
        max_batch_size=3,
        max_num_tokens=20,
        has_page_groups=True,
        has_kernels=request.param,
        budget_bytes=600_000,
    )
    assert [group.window for group in executor.limits.page_windows] == [6, 9]
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None}
    tokens = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]
    assert len({tuple(row) for row in tokens}) > 3
    return tokens


def make_loop(executor: StepExecutor, num_draft_tokens: int, *, reuses: bool = True, **options: Any) -> EngineLoop:
    config = SchedulerConfig(enable_prefix_caching=reuses)
    scheduler = Scheduler(executor.limits, config, FixedDraftLength(num_draft_tokens))
    return EngineLoop(executor, scheduler, **options)


def tokens_of(
    loop: EngineLoop, prompts: list[list[int]] = PROMPTS, *, together: bool = False, preempts: bool = False
) -> list[list[int]]:
    sampling = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    streams = []
    for i, prompt in enumerate(prompts):
        streams.append(loop.submit(Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling)))
        if not together:
            run(loop, preempts=preempts)
    run(loop, preempts=preempts)
    assert loop._scheduler.num_window_pages_in_use == loop._scheduler.num_pages_in_use == 0
    return [list(stream.result(timeout_s=1).token_ids) for stream in streams]


def run(loop: EngineLoop, *, preempts: bool) -> None:
    number = 0
    while loop.step():
        loop.check_integrity()
        number += 1
        if preempts and number % 5 == 3:
            loop._scheduler.preempt(str(number % len(PROMPTS)))


@pytest.mark.parametrize("has_kernels", [False, True])
def test_deterministic_log_probabilities_do_not_depend_on_chunks_or_hits(
    pair: tuple[Path, Path], expected: list[list[int]], has_kernels: bool
) -> None:
    """Keys are gathered in tiles from position 0 on, those before a window as zeros: bits must not change."""
    logprobs = []
    for num_tokens, reuses in ((20, False), (7, True)):
        options = {"has_page_groups": True, "has_kernels": has_kernels, "is_deterministic": True}
        executor = make_executor(*pair, max_batch_size=3, max_num_tokens=num_tokens, **options)
        loop = make_loop(executor, BLOCK_SIZE - 1, reuses=reuses)
        sampling = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=True)
        streams = [
            loop.submit(Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling))
            for i, prompt in enumerate(PROMPTS[:2])
        ]
        run(loop, preempts=reuses)
        outputs = [stream.result(timeout_s=1) for stream in streams]
        assert [list(output.token_ids) for output in outputs] == expected[:2]
        logprobs.append([output.logprobs for output in outputs])
    assert logprobs[0] == logprobs[1] and logprobs[0][0]


class RecordedDrafts:
    """An executor whose drafts are recorded, by request and position."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        self.limits, self.has_queue, self.can_retry = executor.limits, False, True
        self.drafts: dict[tuple[str, int], list[int]] = {}

    def submit(self, plan: StepPlan) -> StepHandle:
        handle = self._executor.submit(plan)
        result = handle.result()
        rows = zip(plan.rows.request_ids, result.next_context_lens.tolist(), result.draft_tokens.tolist(), strict=True)
        self.drafts |= {(request_id, position): drafts for request_id, position, drafts in rows}
        return handle


@pytest.mark.parametrize("num_draft_tokens", [0, BLOCK_SIZE - 1])
def test_tokens_with_prefix_hits_equal_those_of_transformers(
    executor: TorchExecutor, expected: list[list[int]], num_draft_tokens: int
) -> None:
    loop = make_loop(executor, num_draft_tokens)
    assert tokens_of(loop, together=False) == expected
    assert loop.statistics().scheduler.num_prefix_hit_tokens >= 48 + 28 + 48


@pytest.mark.parametrize("overlaps", [False, True])
def test_tokens_of_mixed_batches_and_preempted_requests_equal_them(
    executor: TorchExecutor, expected: list[list[int]], overlaps: bool
) -> None:
    loop = make_loop(executor, BLOCK_SIZE - 1, overlaps=overlaps)
    for preempts in (False, True):
        assert tokens_of(loop, together=True, preempts=preempts) == expected
    loop.close()


DRAFTERS: dict[str, dict[str, Any]] = {
    "z-lab's, sliding and causal": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9},
    "z-lab's, sliding and not causal": {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 9,
        "is_causal": False,
    },
    "a window before the anchor": {"draft_window": 9},
    "DFlash2": {"make": make_dflash2_drafter, "draft_window": 7},
    "DSpark": {"make": save_dspark_drafter, "draft_window": 7},
    "EAGLE-3": {"make": save_eagle3_head, "draft_window": 7},
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_over_the_pages_of_a_window_are_those_over_all_pages(
    pair: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    """A wrong page of a drafter costs acceptance and no token, so drafts are compared."""
    fields = dict(DRAFTERS[name])
    make, draft_window = fields.pop("make", make_zlab_drafter), fields.pop("draft_window", None)
    options = {"block_size": BLOCK_SIZE, "num_layers": 2, **fields} if make is make_zlab_drafter else {}
    drafter = make(tmp_path / "drafter", target_dir=pair[0], **options)
    drafts = []
    groups = {"has_page_groups": True, "max_num_tokens": 20}
    for kinds in ({"has_kernels": False}, {**groups, "has_kernels": False}, groups):
        executor = make_executor(pair[0], drafter, max_batch_size=2, draft_window=draft_window, **kinds)
        recorded = RecordedDrafts(executor)
        tokens_of(make_loop(recorded, recorded.limits.max_draft_len, reuses=False), PROMPTS[:1])
        drafts.append(recorded.drafts)
    assert len(executor.limits.page_windows) == 2
    for found in drafts[1:]:
        shared = drafts[0].keys() & found.keys()
        assert len(shared) > 20 and all(drafts[0][place] == found[place] for place in shared)


def test_logits_of_a_sequence_longer_than_the_pages_of_its_windows_are_the_same(
    executor: TorchExecutor, pair: tuple[Path, Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()
    tokens = (SHARED * 5)[:240]
    assert min(group.num_pages for group in executor.limits.page_windows) < 240 // executor.limits.page_size
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(executor.target_logits(tokens), logits, rtol=0, atol=1e-4)


def test_a_page_that_leaves_its_window_too_early_changes_the_tokens(
    pair: tuple[Path, Path], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the scheduler frees a page that the device still reads."""
    first_page = WindowPages.first_page
    monkeypatch.setattr(WindowPages, "first_page", lambda pages, num_tokens: first_page(pages, num_tokens + 4))
    executor = make_executor(*pair, max_batch_size=3, max_num_tokens=20, has_page_groups=True, budget_bytes=600_000)
    assert tokens_of(make_loop(executor, 0, reuses=False), together=True) != expected


def test_layers_of_gemma_4_that_share_k_and_v_free_the_pages_of_both_geometries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 16 in windows and of 32 without; the last layers read the pages of the first."""
    target = make_gemma(tmp_path / "target", family="gemma4_text", vocab_size=VOCAB_SIZE, **EVERYTHING)
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK_SIZE)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None}
    expected = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS[:3]]

    def found() -> list[list[int]]:
        executor = make_executor(target, drafter, max_batch_size=3, max_num_tokens=20, has_page_groups=True)
        assert [group.window for group in executor.limits.page_windows] == [6]
        return tokens_of(make_loop(executor, BLOCK_SIZE - 1), PROMPTS[:3], together=True)

    assert found() == expected
    first_page = WindowPages.first_page
    monkeypatch.setattr(WindowPages, "first_page", lambda pages, num_tokens: first_page(pages, num_tokens + 4))
    assert found() != expected, "the negative control"
