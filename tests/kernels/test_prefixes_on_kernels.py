"""Prefixes of hybrids over the GPU kernels: a hit restores state and pages, and no token differs from a cold start.

The scheduler is the real one; tokens of a cold start are those of plain PyTorch, which tests/parity compares with
transformers.
"""

from typing import Any

import pytest
import torch

from dflash_trt import SamplingParams
from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.cuda.step_launches import DeviceSnapshots
from dflash_trt.backends.graphs import Enqueue, GraphCache
from dflash_trt.backends.padding import warm_shapes
from dflash_trt.core.request import Request
from dflash_trt.core.step_plan import StateCopies
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.kernels.test_step_on_delta_nets import SMALL, make_pair
from tests.kernels.test_step_on_kernels import NUM_DRAFT_TOKENS, Executor, make_executors

VOCAB_SIZE, NUM_NEW = 12, 3
SHARED = [5, 2, 9, 7, 1, 1, 8, 3]  # two pages
PROMPTS = [SHARED + tail for tail in ([4], [6, 0], [10], [4])]


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> tuple[Executor, TorchGpuExecutor]:
    root = tmp_path_factory.mktemp("pair")
    pair = make_pair(root, family="qwen3_5_text", vocab_size=VOCAB_SIZE, tokenizer=False, **SMALL)
    return make_executors(pair, device, num_snapshots=2, max_num_tokens=12)


def make_loop(executor: Executor, num_draft_tokens: int, *, reuses: bool = True, overlaps: bool = False) -> EngineLoop:
    config = SchedulerConfig(enable_prefix_caching=reuses)
    return EngineLoop(
        executor, Scheduler(executor.limits, config, FixedDraftLength(num_draft_tokens)), overlaps=overlaps
    )


def tokens_of(
    loop: EngineLoop, prompts: list[list[int]], *, together: bool, preempted: str | None = None, num_new: int = NUM_NEW
) -> Any:
    sampling = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    streams, number = [], 0
    for i, prompt in enumerate(prompts):
        streams.append(loop.submit(Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling)))
        while (not together or i == len(prompts) - 1) and loop.step():
            loop.check_integrity()
            number += 1
            if number == 2 and preempted is not None:
                assert loop._scheduler.preempt(preempted)
    assert loop._scheduler.num_snapshots_in_use == loop._scheduler.num_pages_in_use == 0
    return [list(stream.result(timeout_s=1).token_ids) for stream in streams]


def num_hit_tokens(loop: EngineLoop) -> int:
    return loop.statistics().scheduler.num_prefix_hit_tokens


@pytest.fixture(scope="module")
def expected(executors: tuple[Executor, TorchGpuExecutor]) -> list[list[int]]:
    tokens = tokens_of(make_loop(executors[0], 0, reuses=False), PROMPTS, together=False)
    assert len({tuple(row) for row in tokens}) > 1
    return tokens


def test_a_hit_gives_the_tokens_of_a_cold_start_in_chained_steps_until_another_prefix_takes_its_snapshot(
    executors: tuple[Executor, TorchGpuExecutor], expected: list[list[int]]
) -> None:
    loop = make_loop(executors[1], NUM_DRAFT_TOKENS, overlaps=True)
    found = tokens_of(loop, PROMPTS[:1], together=False) + tokens_of(loop, PROMPTS[1:3], together=True)
    assert found == expected[:3] and num_hit_tokens(loop) == 8 + 8
    tokens_of(loop, [[7, 7, 2, 4, 0], [1, 11, 6, 6, 3]], together=True, num_new=1)
    assert tokens_of(loop, PROMPTS[:1], together=False, num_new=1) == [expected[0][:1]]
    assert num_hit_tokens(loop) == 8 + 8
    loop.close()


def test_a_preempted_request_goes_on_from_its_snapshot(
    executors: tuple[Executor, TorchGpuExecutor], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    restore, restored = DeviceSnapshots.restore, []

    def record(self: DeviceSnapshots, copies: StateCopies) -> None:
        restored.extend(copies.slots.tolist())
        restore(self, copies)

    monkeypatch.setattr(DeviceSnapshots, "restore", record)
    loop = make_loop(executors[1], NUM_DRAFT_TOKENS)
    assert tokens_of(loop, PROMPTS[:1], together=True, preempted="0") == expected[:1]
    assert len(restored) == 1


def test_graphs_are_replayed_between_the_copies(
    executors: tuple[Executor, TorchGpuExecutor], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph holds no copy, and one that is replayed finds its slot filled."""
    executor, events = executors[1], []

    def capture(enqueue: Enqueue) -> Enqueue:
        def replay() -> None:
            events.append("graph")
            enqueue()

        return replay

    copy = DeviceSnapshots._copy

    def record(self: DeviceSnapshots, source: int, destination: int) -> None:
        events.append("save" if destination > executor.limits.max_batch_size else "restore")
        copy(self, source, destination)

    monkeypatch.setattr(executor, "graphs", GraphCache(capture))
    shapes = [shape for shape in warm_shapes(executor.limits, (0,)) if shape.num_requests == 1]
    executor.warm_up(shape for shape in shapes if shape.has_graph)
    events.clear()
    monkeypatch.setattr(DeviceSnapshots, "_copy", record)
    assert tokens_of(make_loop(executor, 0), PROMPTS[:2], together=False) == expected[:2]
    step = ["graph"] * 3  # the target, sampling, drafts
    assert events == [*step, "save", *step * 3, "restore", *step * 3]


def test_a_copy_that_is_left_out_shows(
    executors: tuple[Executor, TorchGpuExecutor], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the slot keeps what the request before left there."""

    def leave_out(self: DeviceSnapshots, copies: StateCopies) -> None:
        pass

    monkeypatch.setattr(DeviceSnapshots, "restore", leave_out)
    assert tokens_of(make_loop(executors[1], 0), PROMPTS[:2], together=False) != expected[:2]
