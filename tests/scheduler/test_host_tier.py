"""Prefixes that leave the device and come back: as good as if they had stayed, and never anyone else's."""

from typing import Any

import numpy as np
import pytest

from dflash_trt.core.step_plan import NO_PAGE_COPIES, SNAPSHOTS, PageCopies, PageWindow
from dflash_trt.scheduler.page_store import PageStore
from dflash_trt.scheduler.prefix_tree import PrefixNode
from tests.fake_executor import FakeExecutor
from tests.scheduler.driver import Driver, expected_tokens, make_driver, make_limits, make_request
from tests.scheduler.test_page_store import PAGE_SIZE, keep

PROMPTS = [[talk] * 21 for talk in range(6)]  # five pages of four each, and a token: more than the device holds


def copies_of(store: PageStore) -> list[tuple[bool, int, int, int]]:
    copies = store.host.take_copies()
    columns = (copies.is_onboard, copies.groups, copies.ids, copies.host_ids)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def evicted(store: PageStore, tokens: list[int]) -> list[PrefixNode]:
    """A prefix that was cached and has left the device."""
    page_ids, path = keep(store, tokens)
    store.release(page_ids)
    store.release(store.allocate(store.num_available))
    assert all(node.page_id is None for node in path)
    return path


def hits(driver: Driver, name: str, prompt: list[int], *, ahead: bool = False, **fields: Any) -> int:
    """Hit tokens of a request that runs alone; its tokens are right, and so are its drafts."""
    before = driver.scheduler.statistics()
    request = make_request(name, prompt, max_new_tokens=4, **fields)
    driver.add(request)
    driver.run(ahead=ahead)
    after = driver.scheduler.statistics()
    assert driver.tokens[name] == expected_tokens(driver.executor, request)
    num_drafts = after.num_draft_tokens - before.num_draft_tokens
    assert after.num_accepted_tokens - before.num_accepted_tokens == num_drafts, "the drafter lost its context"
    return after.num_prefix_hit_tokens - before.num_prefix_hit_tokens


@pytest.mark.parametrize("ahead", [False, True])
def test_conversations_that_the_device_cannot_hold_are_found_again(ahead: bool) -> None:
    driver = make_driver(make_limits(num_host_pages=40))
    first = [hits(driver, f"a{i}", prompt, ahead=ahead) for i, prompt in enumerate(PROMPTS)]
    second = [hits(driver, f"b{i}", prompt, ahead=ahead) for i, prompt in enumerate(PROMPTS)]
    assert (first, second) == ([0] * 6, [20] * 6)
    counts = driver.scheduler.statistics()
    assert counts.num_onboarded_pages >= 5 * 3 and counts.num_host_pages == 40
    assert counts.num_host_pages_kept_now <= counts.num_offloaded_pages <= 40
    driver.scheduler.lose_device("gone")
    assert driver.scheduler.statistics().num_offloaded_pages == counts.num_offloaded_pages, "none is copied any more"


def test_without_a_tier_they_are_not() -> None:
    driver = make_driver(make_limits())
    for round_name in "ab":
        found = [hits(driver, f"{round_name}{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        assert found == [0] * 6
    assert driver.scheduler.statistics().num_offloaded_pages == 0


def test_the_least_recently_used_leave_the_tier_first_their_end_before_their_beginning() -> None:
    driver = make_driver(make_limits(num_host_pages=8))
    for i, prompt in enumerate(PROMPTS):
        assert hits(driver, f"a{i}", prompt) == 0
    # Of 30 pages 20 are on the device and 8 in the tier; the last requests begin while the first still leave.
    found = [hits(driver, f"b{i}", prompt) for i, prompt in enumerate(PROMPTS[-3:])]
    assert found == [20, 20, 20]
    assert hits(driver, "c", PROMPTS[0]) == 0


def test_a_tier_is_not_shared_across_salts() -> None:
    driver = make_driver(make_limits(num_host_pages=40))
    for i, prompt in enumerate(PROMPTS):
        hits(driver, f"a{i}", prompt, cache_salt="mine")
    assert hits(driver, "b", PROMPTS[0], cache_salt="yours") == 0
    assert hits(driver, "c", PROMPTS[0], cache_salt="mine") == 20


def test_windows_come_back() -> None:
    """The pages of layers with a window are fewer; they leave alone, and with their node."""
    limits = make_limits(num_host_pages=60, page_windows=(PageWindow(6, 7), PageWindow(11, 9)))
    driver = make_driver(limits)
    for i, prompt in enumerate(PROMPTS):
        assert hits(driver, f"a{i}", prompt) == 0
    assert [hits(driver, f"b{i}", prompt) for i, prompt in enumerate(PROMPTS)] == [20] * 6


def test_pages_that_an_answer_has_passed_take_no_place() -> None:
    driver = make_driver(make_limits(num_host_pages=8, num_pages=40, page_windows=(PageWindow(6, 7),)))
    driver.add(make_request("r", PROMPTS[0][:5], max_new_tokens=50))
    driver.run()
    assert driver.scheduler.statistics().num_offloaded_pages <= 1, "that of the prompt"


def test_snapshots_come_back() -> None:
    limits = make_limits(num_host_pages=40, num_host_snapshots=6, num_snapshots=1)
    driver = make_driver(limits)
    for i, prompt in enumerate(PROMPTS):
        assert hits(driver, f"a{i}", prompt) == 0
    assert [hits(driver, f"b{i}", prompt) for i, prompt in enumerate(PROMPTS)] == [20] * 6
    assert driver.scheduler.num_snapshots_in_use == 0


def test_without_its_snapshot_a_prefix_in_the_tier_is_computed_again() -> None:
    driver = make_driver(make_limits(num_host_pages=40, num_host_snapshots=0, num_snapshots=1))
    for i, prompt in enumerate(PROMPTS):
        hits(driver, f"a{i}", prompt)
    assert hits(driver, "b", PROMPTS[0]) == 0
    assert hits(driver, "c", PROMPTS[0]) == 20, "its pages are the device's again"


def test_a_step_that_fails_is_run_in_parts_after_its_copies() -> None:
    driver = make_driver(make_limits(num_host_pages=40))
    for i, prompt in enumerate(PROMPTS):
        hits(driver, f"a{i}", prompt)
    for i in range(2):
        driver.add(make_request(f"b{i}", PROMPTS[i]))
    step = driver.scheduler.plan(0.0)
    assert len(step.plan.page_copies) and step.plan.part(slice(0, 1)).page_copies is NO_PAGE_COPIES
    driver.scheduler.abandon()
    driver.run()
    for i in range(2):
        assert driver.tokens[f"b{i}"] == expected_tokens(driver.executor, make_request(f"b{i}", PROMPTS[i]))


def test_a_lost_device_takes_the_tier_with_it() -> None:
    driver = make_driver(make_limits(num_host_pages=40, num_snapshots=2, num_host_snapshots=4))
    for i, prompt in enumerate(PROMPTS):
        hits(driver, f"a{i}", prompt)
    driver.add(make_request("b", PROMPTS[0]))
    driver.scheduler.plan(0.0)
    assert [event.request_id for event in driver.scheduler.lose_device("gone")] == ["b"]
    driver.scheduler.check_integrity()
    driver.executor = FakeExecutor(driver.executor.limits)  # an empty one
    assert driver.scheduler.statistics().num_host_pages_kept_now == 0
    for i, prompt in enumerate(PROMPTS):
        assert hits(driver, f"c{i}", prompt) == 0


# The store


def test_an_evicted_page_is_copied_out_once_and_back_each_time() -> None:
    store = PageStore(4, PAGE_SIZE, num_host_pages=4)
    path = evicted(store, [1, 2, 3, 4])
    pages = {node.host_id: copy for node, copy in zip(reversed(path), copies_of(store), strict=True)}
    assert {copy[0] for copy in pages.values()} == {False}
    for _ in range(2):
        with store.host.pinned(path):
            held = store.retain(path)
        assert copies_of(store) == [(True, 0, page_id, node.host_id) for page_id, node in zip(held, path, strict=True)]
        store.check_integrity([held])
        store.release(held)
        store.release(store.allocate(4))
        assert copies_of(store) == [], "what has not changed is not copied"
    store.check_integrity([])


def test_pages_that_come_back_count_as_missing_ones() -> None:
    store = PageStore(4, PAGE_SIZE, num_host_pages=4)
    path = evicted(store, [1, 2, 3, 4])
    assert store.num_idle_among(path) == 0 and store.num_available == 4
    with store.host.pinned(path):
        store.retain(path)
    assert store.num_available == 2


def test_a_page_computed_again_is_the_node_s_own() -> None:
    store = PageStore(4, PAGE_SIZE, num_host_pages=4)
    (node, _) = evicted(store, [1, 2, 3, 4])
    page_ids, path = keep(store, [1, 2])
    assert path == [node] and node.page_id == page_ids[0] and node.is_on_host(0)
    store.check_integrity([page_ids])


def test_a_path_that_comes_back_keeps_its_places_from_what_leaves_for_it() -> None:
    """The tier is full of the path: what makes room on the device finds no place, and is forgotten."""
    store = PageStore(2, PAGE_SIZE, num_host_pages=2)
    path = evicted(store, [1, 2, 3, 4])
    other, _ = keep(store, [5, 6, 7, 8])
    store.release(other)
    copies_of(store)
    with store.host.pinned(path):
        held = store.retain(path)
    assert [copy[:2] for copy in copies_of(store)] == [(True, 0), (True, 0)]
    assert store.match([5, 6, 7], salt="") == []
    store.check_integrity([held])


def test_what_comes_back_and_leaves_again_was_used_after_what_left_meanwhile() -> None:
    store = PageStore(2, PAGE_SIZE, num_host_pages=4)
    first, second = evicted(store, [1, 2, 3, 4]), evicted(store, [5, 6, 7, 8])
    with store.host.pinned(first):
        held = store.retain(first)
    store.release(held)
    store.release(store.allocate(2))  # the first leaves again, and needs no copy
    evicted(store, [9, 10])
    assert [node.is_on_host(0) for node in first] == [True, True]
    assert [node.is_on_host(0) for node in second] == [True, False], "its end goes first"


def test_what_leaves_again_was_used_after_what_left_while_it_was_there() -> None:
    store = PageStore(4, PAGE_SIZE, num_host_pages=4)
    first = evicted(store, [1, 2, 3, 4])
    with store.host.pinned(first):
        held = store.retain(first)
    second = evicted(store, [5, 6, 7, 8])
    store.release(held)
    store.release(store.allocate(4))
    evicted(store, [9, 10])
    assert [node.is_on_host(0) for node in (*first, *second)] == [True, True, True, False]


@pytest.mark.parametrize("is_published", [False, True])
def test_of_a_path_that_was_used_the_end_leaves_first(is_published: bool) -> None:
    """Whether it has its places for long, or is copied to new ones for a store."""
    store = PageStore(4, PAGE_SIZE, num_host_pages=3)
    store.host.note_arrivals()
    path = keep(store, [1, 2, 3, 4])[1] if is_published else evicted(store, [1, 2, 3, 4])
    with store.host.pinned(path):
        store.publish(path)
    for tokens in ([5, 6], [7, 8]):
        evicted(store, tokens)
    assert [node.is_on_host(0) for node in path] == [True, False]


def test_what_comes_back_is_no_arrival() -> None:
    store = PageStore(4, PAGE_SIZE, num_host_pages=4)
    store.host.note_arrivals()
    path = evicted(store, [1, 2, 3, 4])
    store.host.settle(store.host.take_copies())
    assert store.host.take_arrivals(9) == [(node, False) for node in reversed(path)]
    with store.host.pinned(path):
        store.retain(path)
    store.host.settle(store.host.take_copies())
    assert not store.host.has_arrivals


def test_copies_of_a_step_that_did_not_run_come_first_in_the_next() -> None:
    store = PageStore(2, PAGE_SIZE, num_host_pages=4)
    evicted(store, [1, 2])
    first = store.host.take_copies()
    evicted(store, [3, 4])
    store.host.take_back(first)
    assert store.host.num_offloaded_pages == 0
    assert [copy[3] for copy in copies_of(store)] == [0, 1]
    assert store.host.take_copies() is NO_PAGE_COPIES and store.host.num_offloaded_pages == 2


def test_runs_have_one_kind_and_no_place_twice() -> None:
    rows = [(0, 0, 5, 1), (0, 0, 6, 2), (0, 0, 7, 1), (1, 0, 5, 2), (1, 0, 6, 2), (1, 0, 5, 1), (0, SNAPSHOTS, 0, 0)]
    is_onboard, groups, ids, host_ids = np.array(rows).T
    copies = PageCopies(is_onboard=is_onboard.astype(bool), groups=groups, ids=ids, host_ids=host_ids)
    runs = [(run.is_onboard, run.group, run.ids.tolist(), run.host_ids.tolist()) for run in copies.runs()]
    assert runs == [
        (False, 0, [5, 6], [1, 2]),
        (False, 0, [7], [1]),
        (True, 0, [5, 6], [2, 2]),
        (True, 0, [5], [1]),
        (False, SNAPSHOTS, [0], [0]),
    ]
    assert list(NO_PAGE_COPIES.runs()) == []
