"""Layers with a window keep the pages of their window: how many, when they leave, and what a prefix needs of them."""

import numpy as np
import pytest

from dflash_trt.core.errors import CapacityError
from dflash_trt.core.step_plan import ExecutorLimits, PageWindow
from dflash_trt.executor.idle import IdleExecutor
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.window_pages import WindowPages
from tests.fake_executor import always_wrong
from tests.scheduler.driver import Driver, expected_tokens, make_driver, make_limits, make_request

WINDOW = 9
PROMPT = tuple(range(30))


def windowed(num_window_pages: int, *, window: int = WINDOW, **changes: int) -> ExecutorLimits:
    return make_limits(page_windows=(PageWindow(window, num_window_pages),), **changes)


def run_one(driver: Driver, name: str = "one", prompt: tuple[int, ...] = PROMPT, max_new_tokens: int = 20) -> list[int]:
    request = make_request(name, prompt, max_new_tokens=max_new_tokens)
    driver.add(request)
    driver.run(ahead=True)
    assert driver.tokens[name] == expected_tokens(driver.executor, request)
    return driver.tokens[name]


def test_pages_of_a_window_stay_few_while_two_thousand_tokens_are_decoded() -> None:
    limits = windowed(40, window=64, max_seq_len=2100, num_pages=600, page_size=16, max_num_tokens=32)
    scheduler, executor = Scheduler(limits), IdleExecutor(limits)
    scheduler.add(make_request("one", range(40), max_new_tokens=2000))
    most, num_all = 0, 0
    while scheduler.has_work:
        step = scheduler.plan()
        scheduler.check_integrity()
        most, num_all = max(most, scheduler.num_window_pages_in_use), max(num_all, scheduler.num_pages_in_use)
        scheduler.commit(step, executor.submit(step.plan).result())
    assert num_all >= 2040 // 16
    assert most <= (64 - 1 + 2 * 6) // 16 + 2  # a window, and the verify blocks of two steps
    assert scheduler.num_window_pages_in_use == 0


def test_a_page_that_leaves_one_token_too_early_changes_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = windowed(21, page_size=1, num_pages=60)
    run_one(make_driver(limits, enable_prefix_caching=False))
    first_page = WindowPages.first_page
    monkeypatch.setattr(WindowPages, "first_page", lambda pages, num_tokens: first_page(pages, num_tokens + 1))
    with pytest.raises(AssertionError, match="no such page"):
        run_one(make_driver(limits, enable_prefix_caching=False))


def test_a_prompt_longer_than_all_pages_of_its_window_comes_in_chunks() -> None:
    driver = make_driver(windowed(7, max_num_tokens=40))
    run_one(driver, prompt=tuple(range(40)))
    chunks = [len(row.token_ids) for batch in driver.executor.batches for row in batch.requests if row.context_len < 40]
    assert sum(chunks) == 40 and max(chunks) == 7 * 4, "as long as the pages of the window allow"


def test_a_prefix_is_found_again_through_the_pages_of_its_last_window() -> None:
    driver = make_driver(windowed(12))
    run_one(driver, "first")
    assert driver.scheduler.num_window_pages_in_use == 0
    emitted = run_one(driver, "second")
    statistics = {event.request_id: event.statistics for event in driver.events if event.statistics is not None}
    assert statistics["second"].num_prefix_hit_tokens == 28
    assert emitted == driver.tokens["first"]


def test_a_prefix_whose_window_is_gone_is_found_up_to_where_it_is_there() -> None:
    driver = make_driver(windowed(12))
    run_one(driver, "first", PROMPT, max_new_tokens=1)
    [window] = driver.scheduler._request_pool.store.windows
    path = driver.scheduler._request_pool.store.match((*PROMPT, 0), salt="")
    assert [node.window_pages[0] is not None for node in path] == [True] * 7
    window.drop(path[-1])
    run_one(driver, "second", max_new_tokens=1)
    window.drop(path[5])  # of positions 20 to 23, which a hit at 24 and at 28 needs
    run_one(driver, "third", max_new_tokens=1)
    for node in path[3:6]:
        window.drop(node)
    run_one(driver, "fourth", max_new_tokens=1)
    hits = [event.statistics.num_prefix_hit_tokens for event in driver.events if event.statistics is not None]
    assert hits == [0, 24, 20, 12]


def test_requests_that_outgrow_their_window_run_together_where_one_table_would_hold_one() -> None:
    """The pages of one request for a layer that keeps all positions serve three for one with a window."""
    limits = windowed(18, num_pages=60, max_seq_len=64)  # 64 positions and a block more are 18 pages
    driver = make_driver(limits)
    for index in range(4):
        driver.add(make_request(f"r{index}", range(20), max_new_tokens=40))
    num_running = []
    while driver.scheduler.has_work:
        driver.step()
        num_running.append(driver.scheduler.num_running)
    assert max(num_running) == 3
    assert driver.scheduler._request_pool.num_preemptions == 0, "no window is a reason to preempt"
    assert set(driver.finish_reasons.values()) == {"length"}


def test_a_request_of_higher_priority_takes_the_window_of_another() -> None:
    driver = make_driver(windowed(6))  # of one request
    driver.add(make_request("low", range(20), max_new_tokens=20))
    driver.step()
    driver.add(make_request("high", range(40, 60), priority=1))
    driver.step()
    assert [row.request_id for row in driver.executor.batches[-1].requests] == ["high"]


@pytest.mark.parametrize("num_window_pages", [6, 7, 9])
def test_a_request_alone_waits_for_its_own_chunk_to_leave_the_window_and_preempts_nobody(num_window_pages: int) -> None:
    """A chunk may have lent pages beyond the claim until it is committed, and a step is planned before that."""
    for num_prompt_tokens in range(1, 40):
        driver = make_driver(windowed(num_window_pages, max_num_tokens=40, num_pages=40))
        run_one(driver, prompt=tuple(range(num_prompt_tokens)))
        assert driver.scheduler.statistics().num_preemptions == 0, num_prompt_tokens


def test_pages_of_an_answer_make_room_before_those_of_its_prompt() -> None:
    """The window passes all pages of a prompt of 18 tokens, 16 of them full, and some of the answer."""
    driver = make_driver(windowed(14), draft_rule=always_wrong)
    [window] = driver.scheduler._request_pool.store.windows
    request = make_request("one", range(18), max_new_tokens=40)
    driver.add(request)
    while len(driver.tokens.get("one", ())) < 34:
        driver.step()
    path = driver.scheduler._request_pool.find("one").prefix_path
    idle = [index for index, node in enumerate(path) if node.window_pages[0] in window._idle]
    order = sorted(idle, key=lambda index: list(window._idle).index(path[index].window_pages[0]))
    num_of_answer = sum(index >= 4 for index in idle)
    assert num_of_answer > 1 and set(range(4)) <= set(idle)
    assert all(index >= 4 for index in order[:num_of_answer])


def test_the_prompt_that_a_window_has_passed_is_found_before_its_events_are_told() -> None:
    """The loop plans a step before it tells the events of the one before: pages leave a window only once cached."""
    driver = make_driver(windowed(12))
    run_one(driver, "first", PROMPT)
    run_one(driver, "second", (*PROMPT[:13], 99, 98))
    statistics = {event.request_id: event.statistics for event in driver.events if event.statistics is not None}
    assert statistics["second"].num_prefix_hit_tokens == 12


def test_pages_of_all_groups_with_windows_are_counted_apart_from_others() -> None:
    driver = make_driver(make_limits(page_windows=(PageWindow(9, 12), PageWindow(20, 15))))
    driver.add(make_request("one", PROMPT, max_new_tokens=20))
    for _ in range(3):
        driver.step()
    statistics = driver.scheduler.statistics()
    held = [window.num_in_use for window in driver.scheduler._request_pool.store.windows]
    assert statistics.num_window_pages == 12 + 15 and 0 < held[0] < held[1]
    assert statistics.num_window_pages_in_use_now == driver.scheduler.num_window_pages_in_use == sum(held)


def test_a_group_that_holds_no_request_is_refused() -> None:
    with pytest.raises(CapacityError, match="pages of window 9: expected at least 6, for one request, found 5"):
        Scheduler(windowed(5))
    Scheduler(windowed(6))


def test_the_device_learns_of_the_pages_of_every_group_in_columns_of_its_own() -> None:
    limits = windowed(12)
    scheduler = Scheduler(limits)
    scheduler.add(make_request("one", PROMPT))
    updates = scheduler.plan().plan.page_updates
    in_window = updates.columns >= limits.max_pages
    assert np.array_equal(updates.columns[~in_window], range(8))
    assert np.array_equal(updates.columns[in_window] - limits.max_pages, range(6))  # of the first chunk


def test_pages_before_the_window_of_a_prefix_hit_are_blank_in_a_slot_that_served_another_request() -> None:
    """Kernels may load them, and a weight of 0 does not hide the NaN that another request left there."""
    limits = windowed(30, max_batch_size=1)
    driver = make_driver(limits)
    run_one(driver, "first")
    run_one(driver, "another", tuple(range(100, 130)))  # leaves its pages in the table of the only slot
    driver.add(make_request("hit", PROMPT, max_new_tokens=1))
    step = driver.scheduler.plan()
    [start] = step.plan.rows.context_lens.tolist()
    first = (start - WINDOW + 1) // limits.page_size
    updates = step.plan.page_updates
    group = updates.columns // limits.max_pages == 1
    page_ids = dict(
        zip((updates.columns[group] - limits.max_pages).tolist(), updates.page_ids[group].tolist(), strict=True)
    )
    [window] = limits.page_windows
    assert first > 0 and [page_ids.get(column) for column in range(first)] == [window.blank_page] * first
    assert window.blank_page not in [page_ids[column] for column in range(first, start // limits.page_size)]
