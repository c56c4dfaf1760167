"""The fake is only worth something if mistakes change what it answers."""

from dataclasses import replace

import pytest

from dflash_trt.core.batch import (
    RequestResult,
    ScheduledRequest,
    StepBatch,
    StepSampling,
    WindowColumns,
    plan_of,
    run_batch,
)
from dflash_trt.core.step_plan import PageWindow
from tests.fake_executor import FakeExecutor, always_wrong, right_with_probability
from tests.scheduler.driver import make_limits

PROMPT = (5, 6, 7, 8, 9)
PAGES = (3, 1, 4)


def make_row(**changes: object) -> ScheduledRequest:
    row = ScheduledRequest(
        request_id="r", token_ids=PROMPT, context_len=0, num_candidates=0, page_ids=PAGES, sampling=StepSampling()
    )
    return replace(row, **changes)


def run(executor: FakeExecutor, row: ScheduledRequest, num_draft_tokens: int = 3) -> RequestResult:
    return run_batch(executor, StepBatch(requests=(row,), num_draft_tokens=num_draft_tokens))[0]


def verify(executor: FakeExecutor, prefill: RequestResult, **changes: object) -> RequestResult:
    """The step after the prefill of PROMPT."""
    token_ids = (prefill.emitted_tokens[-1], *prefill.draft_tokens)
    row = make_row(token_ids=token_ids, context_len=len(PROMPT), num_candidates=len(token_ids) - 1)
    return run(executor, replace(row, **changes))


def test_right_drafts_are_all_accepted_and_wrong_ones_never() -> None:
    for rule, num_accepted in ((None, 3), (always_wrong, 0)):
        executor = FakeExecutor(make_limits(), **({"draft_rule": rule} if rule else {}))
        result = verify(executor, run(executor, make_row()))
        assert result.num_accepted == num_accepted
        assert len(result.emitted_tokens) == num_accepted + 1


def test_a_draft_is_right_about_as_often_as_asked() -> None:
    rule = right_with_probability(0.7)
    assert 0.65 < sum(rule(0, position) for position in range(2000)) / 2000 < 0.75


def test_the_tokens_are_those_of_one_at_a_time() -> None:
    executor = FakeExecutor(make_limits())
    prefill = run(executor, make_row())
    tokens = list(prefill.emitted_tokens + verify(executor, prefill).emitted_tokens)
    assert tokens == executor.target.generate(PROMPT, len(tokens))


@pytest.mark.parametrize(
    "changes",
    [{"page_ids": (1, 3, 4)}, {"context_len": 4}, {"page_ids": (3, 0, 4)}],
    ids=["pages in another order", "a position too early", "a page never written"],
)
def test_wrong_pages_or_positions_change_the_tokens(changes: dict[str, object]) -> None:
    executor = FakeExecutor(make_limits())
    prefill = run(executor, make_row())
    right = verify(executor, prefill).emitted_tokens
    executor = FakeExecutor(make_limits())
    assert verify(executor, run(executor, make_row()), **changes).emitted_tokens != right


def test_a_page_overwritten_by_another_request_changes_the_tokens() -> None:
    executor = FakeExecutor(make_limits())
    prefill = run(executor, make_row())
    right = verify(executor, prefill).emitted_tokens
    run(executor, make_row(request_id="other", token_ids=(1,), page_ids=(PAGES[0],)))
    assert verify(executor, prefill).emitted_tokens != right


def test_a_missing_draft_context_makes_drafts_wrong_but_not_tokens() -> None:
    executor = FakeExecutor(make_limits())
    prefill = run(executor, make_row())
    right = verify(executor, prefill)
    executor._draft_kv.clear()
    starved = verify(executor, prefill)
    assert starved.emitted_tokens == right.emitted_tokens
    assert starved.draft_tokens != right.draft_tokens


def test_a_seed_matters_only_when_sampling() -> None:
    executor = FakeExecutor(make_limits())
    tokens = {
        (temperature, seed): tuple(
            executor.target.generate(PROMPT, 8, StepSampling(temperature=temperature, seed=seed))
        )
        for temperature in (0.0, 1.0)
        for seed in (1, 2)
    }
    assert tokens[0.0, 1] == tokens[0.0, 2]
    assert tokens[1.0, 1] != tokens[1.0, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_ids": (3,)}, "do not cover"),
        ({"page_ids": (3, 3)}, "appears twice"),
        ({"page_ids": (3, 99)}, "no such page"),
        ({"context_len": 66, "page_ids": tuple(range(18))}, "beyond max_positions"),
        ({"token_ids": (5, 997)}, "no such token"),
        ({"num_candidates": 4}, "more candidates than K"),
    ],
)
def test_a_row_that_breaks_the_contract_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run(FakeExecutor(make_limits()), make_row(**changes))


def test_a_plan_for_fewer_pages_than_a_row_has_is_refused() -> None:
    plan = plan_of(StepBatch(requests=(make_row(token_ids=(1,) * 9),), num_draft_tokens=0))
    assert plan.num_pages == 3
    with pytest.raises(AssertionError, match="more pages than num_pages"):
        FakeExecutor(make_limits()).submit(replace(plan, num_pages=2))


def rows_apart(count: int, num_tokens: int) -> tuple[ScheduledRequest, ...]:
    """Each with its own pages."""
    pages = -(-num_tokens // 4)
    return tuple(
        make_row(request_id=f"r{i}", token_ids=(1,) * num_tokens, page_ids=tuple(range(i * pages, (i + 1) * pages)))
        for i in range(count)
    )


@pytest.mark.parametrize(
    ("rows", "num_draft_tokens", "message"),
    [
        (rows_apart(5, 1), 0, "more requests than max_batch_size"),
        (rows_apart(2, 13), 0, "more tokens than max_num_tokens"),
        (rows_apart(1, 1), 6, "K is beyond max_draft_len"),
        (rows_apart(1, 1) * 2, 0, "a request has two rows"),
        ((make_row(context_len=4), make_row(request_id="other", page_ids=(3, 9))), 0, "writes what a row of the same"),
    ],
)
def test_a_batch_that_breaks_the_contract_is_refused(
    rows: tuple[ScheduledRequest, ...], num_draft_tokens: int, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        run_batch(FakeExecutor(make_limits()), StepBatch(requests=rows, num_draft_tokens=num_draft_tokens))
    run_batch(FakeExecutor(make_limits()), StepBatch(requests=rows_apart(4, 6), num_draft_tokens=5))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((0, (7, 8)), (0, (8, 9)), "writes where another row of the step writes"),
        ((4, (7, 8)), (0, (7,)), "writes what a row of the same step reads"),
        ((0, (7, 7)), (0, (5, 6)), "a page appears twice"),
        ((0, (7, 10)), (0, (5, 6)), "no such page"),
    ],
)
def test_pages_of_windows_are_checked_like_others(
    first: tuple[int, tuple[int, ...]], second: tuple[int, tuple[int, ...]], message: str
) -> None:
    """Ten pages of a group with a window of 6; each row has its own pages in the first group."""
    rows = tuple(
        make_row(
            request_id=f"r{i}",
            token_ids=(1,) * (4 * len(pages) - context_len),
            context_len=context_len,
            page_ids=tuple(range(10 * i, 10 * i + len(pages))),
            window_pages=(WindowColumns(0, pages),),
        )
        for i, (context_len, pages) in enumerate((first, second))
    )
    limits = make_limits(page_windows=(PageWindow(6, 10),))
    with pytest.raises(AssertionError, match=message):
        run_batch(FakeExecutor(limits), StepBatch(requests=rows, num_draft_tokens=0))


def test_two_rows_must_not_write_the_same_place() -> None:
    rows = (make_row(), make_row(request_id="other"))
    with pytest.raises(AssertionError, match="writes where another"):
        run_batch(FakeExecutor(make_limits()), StepBatch(requests=rows, num_draft_tokens=0))
