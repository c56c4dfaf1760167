"""Prefixes of targets with recurrent layers: a hit ends where the state was kept, and no snapshot is lost."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dflash_trt.core.step_plan import StateCopies, StepPlan
from dflash_trt.scheduler.host_tier import HostTier
from dflash_trt.scheduler.prefix_tree import PrefixNode, PrefixTree
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.snapshots import SnapshotStore
from tests.fake_executor import ToyStates, right_with_probability
from tests.scheduler.driver import Driver, expected_tokens, make_driver, make_limits, make_request

PAGE_SIZE = 4  # of make_limits
SYSTEM = [7] * 9  # two pages and a token


def make_recurrent(num_snapshots: int, **limits: Any) -> Driver:
    return make_driver(
        make_limits(num_snapshots=num_snapshots, **limits), vocab_size=11, draft_rule=right_with_probability(0.6)
    )


def run(driver: Driver, name: str, prompt: list[int], *, ahead: bool = False) -> int:
    """Hit tokens of a request that runs alone, and whose tokens are right."""
    hits = driver.scheduler.statistics().num_prefix_hit_tokens
    request = make_request(name, prompt)
    driver.add(request)
    driver.run(ahead=ahead)
    assert driver.tokens[name] == expected_tokens(driver.executor, request)
    assert driver.scheduler.num_snapshots_in_use == 0
    return driver.scheduler.statistics().num_prefix_hit_tokens - hits


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("length", "hit"),
    [(1, 0), (PAGE_SIZE, 0), (PAGE_SIZE + 1, 4), (2 * PAGE_SIZE, 4), (2 * PAGE_SIZE + 1, 8), (30, 28)],
)
def test_a_prompt_is_found_again_up_to_its_last_full_page(length: int, hit: int, ahead: bool) -> None:
    driver = make_recurrent(2)
    prompt = list(range(1, 10)) * 4
    assert [run(driver, name, prompt[:length], ahead=ahead) for name in ("a", "b", "c")] == [0, hit, hit]


def test_a_beginning_that_two_prompts_share_is_found_by_the_third() -> None:
    driver = make_recurrent(4)
    hits = [run(driver, str(i), SYSTEM + [i] * 9) for i in range(4)]
    assert hits == [0, 0, 8, 8]


def test_a_snapshot_is_read_once_by_each_of_those_that_begin_with_it() -> None:
    driver = make_recurrent(4, num_pages=40)
    run(driver, "a", SYSTEM)
    requests = [make_request(name, [*SYSTEM, tail]) for name, tail in (("b", 1), ("c", 2))]
    for request in requests:
        driver.add(request)
    driver.step()
    assert driver.scheduler.statistics().num_prefix_hit_tokens == 2 * 8
    assert driver.scheduler.num_snapshots_in_use == 0, "both slots are filled"
    driver.add(make_request("d", range(9)))
    driver.run()
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)


def test_chunks_end_where_the_state_is_kept() -> None:
    driver = make_recurrent(4)
    run(driver, "a", SYSTEM + [1] * 9)
    run(driver, "b", SYSTEM + [2] * 9)
    rows = [
        (row.request_id, row.context_len, len(row.token_ids)) for b in driver.executor.batches for row in b.requests
    ]
    prompts = [row for row in rows if row[1] + row[2] <= 18]
    assert prompts == [("a", 0, 16), ("a", 16, 2), ("b", 0, 8), ("b", 8, 8), ("b", 16, 2)]


def test_without_snapshots_every_prompt_is_computed_in_full_and_in_one_chunk() -> None:
    driver = make_recurrent(0)
    assert [run(driver, name, SYSTEM) for name in "ab"] == [0, 0]
    assert [len(batch.requests[0].token_ids) for batch in driver.executor.batches].count(len(SYSTEM)) == 2
    assert driver.scheduler.statistics().num_pages_kept_now == 0, "pages that no request can begin behind"


def test_the_same_prompt_twice_at_once_keeps_one_snapshot() -> None:
    driver = make_recurrent(2, num_pages=40)
    for name in "ab":
        driver.add(make_request(name, SYSTEM))
    driver.run()
    assert driver.scheduler.num_snapshots_in_use == 0
    assert driver.scheduler._request_pool.store.snapshots.num_kept == 1
    assert run(driver, "c", SYSTEM) == 8


def test_the_first_of_several_chunks_on_their_way_restores_the_state() -> None:
    driver = make_recurrent(4, num_pages=40, max_num_tokens=8)
    run(driver, "a", SYSTEM)
    driver.add(make_request("b", SYSTEM + [2] * 20))
    steps = [driver.scheduler.plan() for _ in range(2)]
    assert [len(step.plan.restores.slots) for step in steps] == [1, 0]
    driver._take(driver.scheduler.commit(steps[0], driver.executor.submit(steps[0].plan).result()))


@pytest.mark.parametrize(
    "leave",
    [lambda each: each.end("b", "cancelled"), lambda each: each.preempt("b"), lambda each: each.pause("b")],
    ids=["cancel", "preempt", "pause"],
)
def test_a_request_that_leaves_before_its_first_step_is_over_holds_no_snapshot(
    leave: Callable[[Scheduler], object],
) -> None:
    driver = make_recurrent(1)
    run(driver, "a", SYSTEM)
    driver.add(make_request("b", SYSTEM))
    step = driver.scheduler.plan()
    assert driver.scheduler.num_snapshots_in_use == 1
    leave(driver.scheduler)
    assert driver.scheduler.num_snapshots_in_use == 0
    driver.scheduler.commit(step, driver.executor.submit(step.plan).result())
    driver.cancel("b")
    assert run(driver, "c", SYSTEM) == 8


def test_a_step_that_did_not_run_leaves_the_snapshots_of_the_one_that_runs() -> None:
    """Chunks end at 8 and 16, where the prompts part and where this one's last page ends."""
    driver = make_recurrent(4, num_pages=40, max_num_tokens=8)
    run(driver, "a", SYSTEM + [1] * 9)
    driver.add(make_request("b", SYSTEM + [2] * 9))
    first = driver.scheduler.plan()
    result = driver.executor.submit(first.plan).result()
    assert len(driver.scheduler.plan().plan.saves.slots) == 1
    driver.scheduler.abandon()
    driver._take(driver.scheduler.commit(first, result))
    driver.run()
    assert run(driver, "c", SYSTEM + [3] * 9) == 8
    assert run(driver, "b again", SYSTEM + [2] * 9) == 16, "from the snapshot of the step that ran"


def test_the_least_recently_used_snapshot_makes_room() -> None:
    driver = make_recurrent(2)
    prompts = {name: [i] * 9 for i, name in enumerate("abc")}
    assert run(driver, "a", prompts["a"]) == run(driver, "b", prompts["b"]) == 0
    assert run(driver, "a again", prompts["a"]) == 8
    assert run(driver, "c", prompts["c"]) == 0  # in the place of b's
    assert [run(driver, f"{name} at last", prompts[name]) for name in "ab"] == [8, 0]


def test_evicted_pages_take_their_snapshot_with_them() -> None:
    driver = make_recurrent(4, num_pages=8)
    run(driver, "a", SYSTEM)
    run(driver, "b", [5] * 19)  # all pages
    assert run(driver, "a again", SYSTEM) == 0


def test_a_preempted_request_goes_on_from_its_snapshot() -> None:
    driver = make_recurrent(2)
    request = make_request("a", SYSTEM, max_new_tokens=20)
    driver.add(request)
    for _ in range(4):
        driver.step()
    assert driver.scheduler.preempt("a")
    driver.run()
    assert driver.tokens["a"] == expected_tokens(driver.executor, request)
    starts = [row.context_len for batch in driver.executor.batches for row in batch.requests]
    assert starts.count(8) >= 2 and starts.count(0) == 1
    assert driver.scheduler.num_snapshots_in_use == 0


def test_a_plan_that_did_not_run_gives_its_snapshots_back() -> None:
    driver = make_recurrent(1)
    run(driver, "a", SYSTEM)
    driver.add(make_request("b", SYSTEM))
    step = driver.scheduler.plan()
    assert len(step.plan.restores.slots) == 1
    driver.scheduler.abandon()
    driver.scheduler.check_integrity()
    again = driver.scheduler.plan()
    assert again.plan.restores.snapshots.tolist() == step.plan.restores.snapshots.tolist()
    driver.scheduler.abandon()
    driver.add(make_request("c", [3] * 9))  # wants to save where b's snapshot is held
    driver.run()
    assert driver.tokens["b"] == expected_tokens(driver.executor, make_request("b", SYSTEM))
    assert driver.scheduler.num_snapshots_in_use == 0


@pytest.mark.parametrize("copies", ["restores", "saves"])
def test_a_copy_that_is_left_out_changes_the_tokens(copies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the toy target: it sees states, not pages alone."""
    begin, end = ToyStates.begin, ToyStates.end
    none = StateCopies(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def without(self: ToyStates, plan: StepPlan, call: Any) -> None:
        from dataclasses import replace

        call(self, replace(plan, **{copies: none}))

    monkeypatch.setattr(ToyStates, "begin", lambda self, plan: without(self, plan, begin))
    monkeypatch.setattr(ToyStates, "end", lambda self, plan: without(self, plan, end))
    driver = make_recurrent(2)
    run(driver, "a", SYSTEM)
    run(driver, "c", [4] * 6)  # in a's slot
    with pytest.raises(AssertionError):
        run(driver, "b", SYSTEM)


def test_parts_of_a_plan_have_the_copies_of_their_rows() -> None:
    copies = StateCopies(np.array([4, 1, 3]), np.array([0, 1, 2]))
    part = copies.of_slots(np.array([3, 4]))
    assert part.slots.tolist() == [4, 3] and part.snapshots.tolist() == [0, 2]


def test_a_snapshot_that_a_request_reads_is_not_evicted() -> None:
    store = SnapshotStore(1, HostTier(PrefixTree(1)))
    node = PrefixNode((1,), block_id=0, parent=None, salt="")
    reserved = store.reserve()
    assert reserved == 0 and store.reserve() is None
    store.attach(reserved, node)
    assert store.retain(node) == 0 and store.reserve() is None
    store.release(0)
    assert store.reserve() == 0 and node.snapshot_id is None


def test_a_snapshot_of_the_hosts_tier_comes_back_to_one_that_is_free_or_idle() -> None:
    store = SnapshotStore(1, HostTier(PrefixTree(1)))
    away, other = (PrefixNode((token,), block_id=token, parent=None, salt="") for token in (1, 2))
    assert not store.has(away)
    away.host_snapshot_id = 0
    assert store.has(away), "there is a free one"
    reserved = store.reserve()
    assert reserved is not None and not store.has(away)
    store.attach(reserved, other)
    assert store.has(away) and store.has(other)
    store.retain(other)
    assert not store.has(away) and store.has(other)
