"""Law 4 for prefixes of targets with gated delta nets: a hit restores the state with the pages; no token changes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.backends.slots import SlotSnapshots
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.core.request import Request
from dflash_trt.core.runtime_config import SettingError
from dflash_trt.core.step_plan import StateCopies
from dflash_trt.network.state import RecurrentCache
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength, FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.engines import make_executor
from tests.executor.rank_engines import build, make_zlab_pair
from tests.factories import make_target, make_zlab_drafter

NUM_NEW, VOCAB_SIZE, BLOCK_SIZE = 10, 12, 6
SHARED = [(5 * i * i + i) % VOCAB_SIZE for i in range(13)]
PROMPTS = [SHARED + tail for tail in ([8, 4], [6, 2, 6, 1, 1], [4] * 9, [3, 3, 8])] + [SHARED[:9], SHARED[:8]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", family="qwen3_5_text", vocab_size=VOCAB_SIZE, tokenizer=False)
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def opened() -> Any:
    """Opens an executor over a pair of checkpoints: the modules that run these laws over others have their own."""
    return make_executor


@pytest.fixture(scope="module")
def executor(opened: Any, pair: tuple[Path, Path]) -> Iterator[TorchExecutor]:
    executor = opened(*pair, max_batch_size=3, num_snapshots=3)  # fewer of both than prompts
    yield executor
    executor.close()


def make_loop(
    executor: TorchExecutor, drafts: int | dict[int, int], *, reuses: bool = True, **options: Any
) -> EngineLoop:
    """`drafts` are K, or K by the number of decoding requests."""
    config = SchedulerConfig(enable_prefix_caching=reuses)
    policy = FixedDraftLength(drafts) if isinstance(drafts, int) else BatchSizeDraftLength(drafts)
    return EngineLoop(executor, Scheduler(executor.limits, config, policy), **options)


def tokens_of(loop: EngineLoop, *, together: bool, preempts: bool = False) -> list[list[int]]:
    """Of each prompt; `together` in one batch, otherwise one after the other."""
    sampling = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    streams = []
    for i, prompt in enumerate(PROMPTS):
        streams.append(loop.submit(Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling)))
        if not together:
            run(loop, preempts=preempts)
    run(loop, preempts=preempts)
    assert loop._scheduler.num_snapshots_in_use == loop._scheduler.num_pages_in_use == 0
    return [list(stream.result(timeout_s=1).token_ids) for stream in streams]


def run(loop: EngineLoop, *, preempts: bool) -> None:
    number = 0
    while loop.step():
        loop.check_integrity()
        number += 1
        if preempts and number % 5 == 3:
            loop._scheduler.preempt(str(number % len(PROMPTS)))


def num_hit_tokens(loop: EngineLoop) -> int:
    return loop.statistics().scheduler.num_prefix_hit_tokens


@pytest.fixture(scope="module")
def expected(executor: TorchExecutor) -> list[list[int]]:
    """Without reuse and without drafts; tests/parity/test_hybrids.py compares these with transformers."""
    tokens = tokens_of(make_loop(executor, 0, reuses=False), together=False)
    assert len({tuple(row) for row in tokens}) > 3
    return tokens


@pytest.mark.parametrize("num_draft_tokens", [0, 1, BLOCK_SIZE - 1])
def test_a_hit_changes_no_token(executor: TorchExecutor, expected: list[list[int]], num_draft_tokens: int) -> None:
    loop = make_loop(executor, num_draft_tokens)
    assert tokens_of(loop, together=False) == expected
    assert num_hit_tokens(loop) >= 12 + 12 + 8  # from the third prompt on: of pages of four tokens


@pytest.mark.parametrize("overlaps", [False, True])
def test_hits_in_mixed_batches_preemptions_and_chained_steps_change_no_token(
    executor: TorchExecutor, expected: list[list[int]], overlaps: bool
) -> None:
    loop = make_loop(executor, {1: BLOCK_SIZE - 1, 2: 0, 3: 2}, overlaps=overlaps)  # from step to step another K
    for preempts in (False, True):
        assert tokens_of(loop, together=True, preempts=preempts) == expected
    assert num_hit_tokens(loop) > 0
    loop.close()


def test_a_hit_whose_state_is_another_ones_shows(
    executor: TorchExecutor, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: pages without their state are a wrong answer."""
    restore = SlotSnapshots.restore

    def restore_wrongly(self: SlotSnapshots, copies: StateCopies) -> None:
        restore(self, copies)
        for cache in executor._state.target_kv:
            if isinstance(cache, RecurrentCache):
                cache.tensors["state"][torch.from_numpy(copies.slots)] *= -1

    monkeypatch.setattr(SlotSnapshots, "restore", restore_wrongly)
    assert tokens_of(make_loop(executor, 0), together=False) != expected


def test_a_step_with_copies_that_fails_is_run_again(
    executor: TorchExecutor, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a step copy the states of their own rows: slots of parts that have run keep what they have."""
    submit, failed = TorchExecutor.submit, 0

    def fails_with_copies(self: TorchExecutor, plan: Any) -> Any:
        nonlocal failed
        if plan.rows.num_requests > 1 and (len(plan.restores.slots) or len(plan.saves.slots)):
            failed += 1
            raise RuntimeError("a fault")
        return submit(self, plan)

    monkeypatch.setattr(TorchExecutor, "submit", fails_with_copies)
    loop = make_loop(executor, 4)
    for _ in range(2):
        assert tokens_of(loop, together=True) == expected
    assert failed > 1 and num_hit_tokens(loop) > 0


def test_snapshots_are_in_the_memory_budget_and_a_setting(tmp_path: Path) -> None:
    make_zlab_pair(tmp_path, family="qwen3_5_text")
    engine = build(tmp_path, tp_size=1, max_seq_len=64, max_batch_size=2)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]

    def opened(**settings: Any) -> tuple[LLM, list[tuple[int, ...]]]:
        with LLM(engine.path, kv_cache_bytes=1 << 19, **settings) as llm:
            outputs = [llm.generate([prompt], SamplingParams(max_new_tokens=8))[0] for prompt in prompts]
            assert (llm.statistics.scheduler.num_prefix_hit_tokens > 0) == (llm.page_plan.num_snapshots > 0)
            return llm, [output.token_ids for output in outputs]

    (default, tokens), (off, in_full) = opened(), opened(num_state_snapshots=0)
    assert tokens == in_full
    per_slot = off.page_plan.slot_bytes // 3
    assert off.page_plan.snapshot_bytes == 0
    assert default.page_plan.num_snapshots == 2 and default.page_plan.snapshot_bytes == 2 * per_slot
    five, _ = opened(num_state_snapshots=5)
    assert five.page_plan.total_bytes + five.page_plan.slot_bytes + 5 * per_slot <= 1 << 19
    assert f"{5 * per_slot / 2**20:.1f} MiB of 5 snapshots for prefixes" in str(five.page_plan)


def test_a_target_of_attention_alone_has_no_snapshots(tmp_path: Path) -> None:
    make_zlab_pair(tmp_path)
    engine = build(tmp_path, tp_size=1)
    with pytest.raises(SettingError, match="num_state_snapshots: expected a target with recurrent layers"):
        LLM(engine.path, num_state_snapshots=1)
