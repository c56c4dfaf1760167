"""Steps without drafts leave the drafter's context to the next step with drafts, which has what it would have had."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.torch import deferred_context
from dflash_trt.backends.torch.deferred_context import DeferredContext
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.core.request import GenerationOutput, Request, SamplingParams
from dflash_trt.core.step_plan import PageCopies
from dflash_trt.network.drafters.dflash import DFlashDrafter
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength, DraftLengthPolicy
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.engines import make_executor
from tests.factories import make_target, make_zlab_drafter

SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
OTHERS = [
    [7, 7, 2, 9, 1, 4, 4, 4, 8, 0, 3, 3, 5, 6, 1, 2, 9, 9, 9, 1],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3],
]
PROMPTS = [SHARED + tail for tail in ([8, 4], [6, 2, 6], [4], [3, 3, 8, 3, 2, 7, 9])]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", vocab_size=12, tokenizer=False)
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=6)


class Script(BatchSizeDraftLength):
    """K of each step, the last one for all that follow."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__({1: lengths[-1]})
        self._script = list(lengths)

    def choose(self, num_decoding: int) -> int:
        return self._script.pop(0) if len(self._script) > 1 else self._script[0]


def executor_of(
    pair: tuple[Path, Path], *, num_blocks: int | None, has_kernels: bool = True, **sizes: Any
) -> TorchExecutor:
    """With that many blocks; None observes at once."""
    executor = make_executor(*pair, has_kernels=has_kernels, **sizes)
    drafter = executor.network.drafter
    assert isinstance(drafter, DFlashDrafter)
    executor._context = None
    if num_blocks is not None:
        executor._context = DeferredContext(
            drafter, executor.page_plan, num_blocks=num_blocks, num_logged_tokens=9, dtype=torch.float32
        )
    return executor


def outputs_of(
    executor: TorchExecutor,
    policy: DraftLengthPolicy,
    *,
    together: bool,
    reuses: bool = True,
    prompts: Sequence[list[int]] = tuple(PROMPTS),
) -> list[GenerationOutput]:
    config = SchedulerConfig(enable_prefix_caching=reuses)
    loop = EngineLoop(executor, Scheduler(executor.limits, config, policy))
    outputs = []
    for batch in [prompts] if together else [[prompt] for prompt in prompts]:
        streams = [
            loop.submit(
                Request(
                    request_id=str(prompt),
                    prompt_token_ids=tuple(prompt),
                    sampling=SamplingParams(max_new_tokens=24, ignore_eos=True),
                )
            )
            for prompt in batch
        ]
        while loop.step():
            pass
        outputs += [stream.result(timeout_s=1) for stream in streams]
    return outputs


def accepted(outputs: Sequence[GenerationOutput]) -> list[list[tuple[int, int]]]:
    return [[(step.num_candidates, step.num_accepted) for step in output.steps] for output in outputs]


SCRIPTS = {
    "late": [0] * 12 + [4],
    "at once": [4],
    "in turns": [0, 0, 4, 0, 4, 4, 0, 0, 0, 0, 0, 2, 3, 0, 4, 4, 0, 4],
    "once, and again": [0] * 5 + [3] * 2 + [0] * 4 + [3],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=list(SCRIPTS))
@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "together"])
@pytest.mark.parametrize(("num_blocks", "has_kernels"), [(100, True), (100, False), (30, True)])
def test_tokens_and_acceptance_are_those_of_an_engine_that_observes_at_once(
    pair: tuple[Path, Path], script: list[int], together: bool, num_blocks: int, has_kernels: bool
) -> None:
    """With prefix hits on pages whose context was left out, and with too few blocks for all pages."""
    found, expected = (
        outputs_of(executor_of(pair, num_blocks=blocks, has_kernels=has_kernels), Script(script), together=together)
        for blocks in (num_blocks, None)
    )
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert accepted(found) == accepted(expected)
    assert sum(count for steps in accepted(expected) for _, count in steps) > 0, "otherwise the test says nothing"


def test_a_context_that_is_lost_is_noticed(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    expected = outputs_of(executor_of(pair, num_blocks=None), Script(SCRIPTS["late"]), together=True)
    monkeypatch.setattr(DeferredContext, "_compute", lambda *arguments: None)
    found = outputs_of(executor_of(pair, num_blocks=100), Script(SCRIPTS["late"]), together=True)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert accepted(found) != accepted(expected)


@pytest.mark.parametrize("script", [[0] * 30 + [4] + [0] * 8 + [4], [0] * 24 + [4]], ids=["later", "at once"])
def test_a_page_with_another_owner_keeps_none_of_the_first_ones_taps(
    pair: tuple[Path, Path], script: list[int]
) -> None:
    """Without prefix caching the second request has the pages of the first."""
    found, expected = (
        outputs_of(executor_of(pair, num_blocks=blocks), Script(script), together=False, reuses=False, prompts=OTHERS)
        for blocks in (100, None)
    )
    assert accepted(found) == accepted(expected)


TIGHT = {"max_seq_len": 64, "max_batch_size": 2, "num_sequences": 1}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=list(SCRIPTS))
def test_pages_leave_with_their_context_and_come_back_with_it(pair: tuple[Path, Path], script: list[int]) -> None:
    """To host memory, while pages hold one request."""
    prompts = [[*prompt, talk] for talk in range(3) for prompt in OTHERS] * 2
    found, expected = (
        outputs_of(executor, Script(script), together=False, prompts=prompts)
        for executor in (
            executor_of(pair, num_blocks=12, **TIGHT, host_bytes=1 << 20),
            executor_of(pair, num_blocks=None, **TIGHT | {"num_sequences": 12}),
        )
    )
    hits = [[output.statistics.num_prefix_hit_tokens for output in outputs] for outputs in (found, expected)]
    assert hits[0] == hits[1] and sum(hits[0]) > 0
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert accepted(found) == accepted(expected)


def refuse(copies: PageCopies) -> None:
    raise MemoryError("none left")


def test_copies_that_are_not_made_lose_the_device(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed on pages whose content nobody knows."""
    executor = executor_of(pair, num_blocks=12, **TIGHT, host_bytes=1 << 20)
    loop = EngineLoop(executor, Scheduler(executor.limits))
    reasons = []
    for number, prompt in enumerate(OTHERS * 2):
        if number == 2:
            monkeypatch.setattr(executor._host_memory, "copy", refuse)
        sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
        request = Request(request_id=str(number), prompt_token_ids=(*prompt, number), sampling=sampling)
        stream = loop.submit(request)
        while loop.step():
            pass
        reasons.append((stream.result(timeout_s=1).finish_reason, loop.failure is not None))
        if loop.failure is not None:
            break
    assert reasons == [("length", False)] * 2 + [("error", True)]
    assert "PageCopyError: MemoryError: none left" in str(loop.failure)


def test_a_step_without_drafts_computes_no_context(pair: tuple[Path, Path]) -> None:
    executor = executor_of(pair, num_blocks=100)
    for cache in executor._state.draft_kv:
        cache.tensor.zero_()
    outputs_of(executor, Script([0]), together=True)
    assert not any(cache.tensor.any() for cache in executor._state.draft_kv)


def test_where_memory_is_short_context_is_computed_at_once(pair: tuple[Path, Path]) -> None:
    executor = make_executor(*pair)
    sizes: Any = {"max_batch_size": 4, "max_num_tokens": 64, "dtype": torch.float32}
    make = partial(deferred_context.deferred_context, executor.network, **sizes)
    assert make(executor.page_plan) is None
    assert make(replace(executor.page_plan, num_pages=1 << 20)) is not None
