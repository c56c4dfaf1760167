"""A step in parts: together they are the whole, whatever a plan has."""

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, plan_of
from dflash_trt.core.logprobs import PromptRows, TopRows
from dflash_trt.core.step_plan import (
    ExecutorLimits,
    FinishedStep,
    JointRows,
    PageWindow,
    StateCopies,
    StepPlan,
    StepResult,
    TokenMasks,
)

K = 2


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Rows of any lengths in any slots, some with masks, scored tokens, restores and saves."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    rows = tuple(
        ScheduledRequest(
            request_id=f"r{i}",
            token_ids=tuple(range(10 * i, 10 * i + length)),
            context_len=i,
            num_candidates=min(K, length - 1),
            page_ids=(i,),
            sampling=StepSampling(seed=i, temperature=i / 8),
        )
        for i, length in enumerate(lengths)
    )
    plan = plan_of(StepBatch(requests=rows, num_draft_tokens=K))
    slots = np.array(draw(st.permutations(range(6)))[: len(rows)])
    masked = np.flatnonzero([draw(st.booleans()) for _ in range(len(rows) * (K + 1))])
    scored = np.flatnonzero([draw(st.booleans()) for _ in range(plan.rows.total_tokens)])
    copied = [slots[[draw(st.booleans()) for _ in rows]] for _ in range(2)]
    restores, saves = (StateCopies(of, 100 * (1 + i) + of) for i, of in enumerate(copied))
    return replace(
        plan,
        rows=replace(plan.rows, slot_ids=slots),
        masks=TokenMasks(rows=masked, bits=masked[:, None].astype(np.int32)),
        top_rows=TopRows.of(np.array([draw(st.integers(0, 2)) for _ in rows])),
        prompt_rows=PromptRows(token_rows=scored, next_tokens=7 * scored, num_top_logprobs=3),
        restores=restores,
        saves=saves,
    )


@settings(deadline=None)
@given(plans(), st.data())
def test_the_parts_of_a_plan_are_the_plan(plan: StepPlan, data: st.DataObject) -> None:
    num_rows = plan.rows.num_requests
    cuts = sorted(data.draw(st.sets(st.integers(1, num_rows - 1)) if num_rows > 1 else st.just(set())))
    edges = [0, *cuts, num_rows]
    masks, top, scored, copies = [], [], [], []
    for start, stop in pairwise(edges):
        part = plan.part(slice(start, stop))
        rows, whole = part.rows, plan.rows
        for name in ("request_ids", "slot_ids", "num_tokens", "num_candidates", "context_lens"):
            assert list(getattr(rows, name)) == list(getattr(whole, name)[start:stop]), name
        first, last = whole.token_offsets[[start, stop]].tolist()
        assert rows.token_ids.tolist() == whole.token_ids[first:last].tolist()
        assert {name: column.tolist() for name, column in rows.sampling.items()} == {
            name: column[start:stop].tolist() for name, column in whole.sampling.items()
        }
        assert part.masks is not None
        masks += zip((part.masks.rows + start * (K + 1)).tolist(), part.masks.bits.tolist(), strict=True)
        if part.top_rows is not None:
            assert plan.top_rows is not None and part.top_rows.num_top_logprobs == plan.top_rows.num_top_logprobs
            top += (part.top_rows.requests + start).tolist()
        if part.prompt_rows is not None:
            assert part.prompt_rows.num_top_logprobs == 3
            scored += zip(part.prompt_rows.token_rows + first, part.prompt_rows.next_tokens, strict=True)
        for kind, found in (("restore", part.restores), ("save", part.saves)):
            assert np.isin(found.slots, rows.slot_ids).all(), "a copy of a slot without a row"
            copies += [(kind, *copy) for copy in zip(found.slots.tolist(), found.snapshots.tolist(), strict=True)]
    assert plan.masks is not None and plan.prompt_rows is not None
    assert masks == [*zip(plan.masks.rows.tolist(), plan.masks.bits.tolist(), strict=True)]
    assert top == ([] if plan.top_rows is None else plan.top_rows.requests.tolist())
    assert scored == [*zip(plan.prompt_rows.token_rows, plan.prompt_rows.next_tokens, strict=True)]
    assert sorted(copies) == sorted(
        (kind, *copy)
        for kind, found in (("restore", plan.restores), ("save", plan.saves))
        for copy in zip(found.slots.tolist(), found.snapshots.tolist(), strict=True)
    )


@settings(deadline=None)
@given(st.lists(plans(), min_size=1, max_size=3))
def test_a_joint_step_decodes_where_no_rank_has_a_longer_row(ranks: list[StepPlan]) -> None:
    joint = JointRows.of(ranks)
    lengths = [plan.rows.num_tokens.tolist() for plan in ranks]
    assert joint.num_tokens == tuple(map(sum, lengths)) and joint.num_requests == tuple(map(len, lengths))
    scored = [0 if plan.prompt_rows is None else len(plan.prompt_rows.token_rows) for plan in ranks]
    assert joint.num_prompt_rows == tuple(scored)
    assert joint.is_decode == (max(map(max, lengths)) <= K + 1)


def test_limits_leave_room_for_a_row_behind_the_last_token() -> None:
    limits = ExecutorLimits(
        max_batch_size=2,
        max_seq_len=30,
        max_num_tokens=8,
        max_draft_len=3,
        page_size=4,
        num_pages=50,
        page_windows=(PageWindow(5, 6), PageWindow(9, 7)),
    )
    assert (limits.max_positions, limits.max_pages) == (33, 9)
    assert (limits.num_page_groups, limits.table_width) == (3, 27)
    assert [window.blank_page for window in limits.page_windows] == [6, 7]
    assert (limits.draft_topk, limits.num_snapshots) == (0, None)


def test_a_finished_step_has_the_time_that_it_ran() -> None:
    step = FinishedStep(lambda: time.sleep(0.05) or RESULT)  # type: ignore[func-returns-value]
    assert step.result() is RESULT and 0.05 <= step.elapsed_s < 5


RESULT = StepResult(
    emitted_tokens=np.zeros((1, 1)),
    emitted_logprobs=np.zeros((1, 1)),
    num_accepted=np.zeros(1),
    next_context_lens=np.zeros(1),
    draft_tokens=np.zeros((1, 0)),
)


@pytest.mark.parametrize(("num_top_logprobs", "has_prompt"), [(0, False), (1, False), (0, True)])
def test_a_plan_says_if_it_wants_more_than_the_emitted_tokens(num_top_logprobs: int, has_prompt: bool) -> None:
    row = ScheduledRequest(
        request_id="r", token_ids=(1,), context_len=0, num_candidates=0, page_ids=(0,), sampling=StepSampling()
    )
    plan = plan_of(StepBatch(requests=(row,), num_draft_tokens=0))
    prompts = PromptRows(token_rows=np.zeros(1, int), next_tokens=np.zeros(1, int), num_top_logprobs=0)
    top_rows = TopRows.of(np.array([num_top_logprobs]))
    plan = replace(plan, top_rows=top_rows, prompt_rows=prompts if has_prompt else None)
    assert plan.has_logprobs == (num_top_logprobs > 0 or has_prompt)


def test_masks_of_wider_blocks_stay_with_their_rows() -> None:
    masks = TokenMasks(rows=np.array([0, 1, 5]), bits=np.arange(3, dtype=np.int32)[:, None])
    wider = masks.widened(2, 4)
    assert wider.rows.tolist() == [0, 1, 9]
    assert wider.bits is masks.bits
