"""Page ids and their owners."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.core.errors import CapacityError
from dflash_trt.scheduler.pages import PagePool


def test_the_lowest_free_page_is_handed_out_first() -> None:
    pool = PagePool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release(1)
    assert pool.allocate(1) == [1]


def test_a_page_is_free_again_only_when_its_last_owner_lets_go() -> None:
    pool = PagePool(1)
    pool.allocate(1)
    pool.retain(0)
    assert pool.release(0) == 1
    assert pool.num_free == 0
    assert pool.release(0) == 0
    assert pool.num_free == 1


def test_asking_for_too_many_pages_takes_none() -> None:
    pool = PagePool(3)
    with pytest.raises(CapacityError, match="expected 4 free pages, found 3"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(CapacityError, match="at least 1 page"):
        PagePool(0)


def test_releasing_a_free_page_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="released more often"):
        PagePool(1).release(0)


def test_integrity_fails_when_a_page_is_held_that_nobody_claims() -> None:
    pool = PagePool(2)
    pool.allocate(1)
    pool.check_integrity([[0]])
    with pytest.raises(AssertionError, match="page 0 has 1 owners, 0 claim it"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="page 1 has 0 owners, 1 claim it"):
        pool.check_integrity([[0, 1]])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 5)), max_size=60))
def test_owners_always_match_what_was_done(actions: list[tuple[str, int]]) -> None:
    pool, held = PagePool(6), list[int]()
    for action, number in actions:
        if action == "allocate" and number <= pool.num_free:
            held += pool.allocate(number)
        elif action == "retain" and held:
            page_id = held[number % len(held)]
            pool.retain(page_id)
            held.append(page_id)
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        pool.check_integrity([held])
        assert pool.num_free == 6 - len(set(held))
