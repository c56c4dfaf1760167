"""Prefixes that stay findable after their request has gone, until their pages are needed."""

import pytest

from dflash_trt.core.errors import CapacityError
from dflash_trt.scheduler.page_store import PageStore
from dflash_trt.scheduler.prefix_tree import PrefixNode

PAGE_SIZE = 2


def keep(store: PageStore, tokens: list[int], *, salt: str = "") -> tuple[list[int], list[PrefixNode]]:
    """A request that computes `tokens` from nothing and keeps them; the pages it then holds."""
    page_ids = store.allocate(len(tokens) // PAGE_SIZE)
    path: list[PrefixNode] = []
    for index in range(len(page_ids)):
        node = store.insert(
            path[-1] if path else None, tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE], page_ids[index], salt=salt
        )
        assert node is not None
        page_ids[index] = node.page_id
        path.append(node)
    return page_ids, path


def matched(store: PageStore, tokens: list[int], *, salt: str = "") -> list[int]:
    return [node.page_id for node in store.match(tokens, salt=salt)]


def test_full_pages_are_found_by_their_tokens() -> None:
    store = PageStore(8, PAGE_SIZE)
    page_ids, _ = keep(store, [1, 2, 3, 4])
    store.release(page_ids)
    assert matched(store, [1, 2, 3, 4, 5]) == page_ids
    assert matched(store, [1, 2, 9, 4, 5]) == page_ids[:1]
    assert matched(store, [9, 2, 3, 4, 5]) == []


def test_at_least_one_token_is_left_to_compute() -> None:
    store = PageStore(8, PAGE_SIZE)
    page_ids, _ = keep(store, [1, 2, 3, 4])
    assert matched(store, [1, 2, 3, 4]) == page_ids[:1]


def test_another_salt_does_not_find_them() -> None:
    store = PageStore(8, PAGE_SIZE)
    page_ids, _ = keep(store, [1, 2], salt="adapter A")
    assert matched(store, [1, 2, 3], salt="adapter B") == []
    assert matched(store, [1, 2, 3], salt="adapter A") == page_ids


def test_the_same_tokens_after_another_beginning_are_another_page() -> None:
    store = PageStore(8, PAGE_SIZE)
    keep(store, [1, 2, 7, 8])
    assert matched(store, [7, 8, 0]) == []


def test_computing_known_tokens_again_gives_the_page_back() -> None:
    store = PageStore(8, PAGE_SIZE)
    first, _ = keep(store, [1, 2])
    page_ids = store.allocate(1)
    assert page_ids != first
    node = store.insert(None, [1, 2], page_ids[0], salt="")
    assert node is not None and node.page_id == first[0]
    store.check_integrity([first, [node.page_id]])
    assert store.num_available == 7


def test_pages_in_use_are_never_evicted() -> None:
    store = PageStore(3, PAGE_SIZE)
    page_ids, _ = keep(store, [1, 2, 3, 4])
    assert store.num_available == 1
    with pytest.raises(CapacityError):
        store.allocate(2)
    store.release(page_ids)
    assert store.num_available == 3


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    store = PageStore(4, PAGE_SIZE)
    old, _ = keep(store, [1, 2, 3, 4])
    store.release(old)
    new, _ = keep(store, [5, 6, 7, 8])
    store.release(new)
    held = store.retain(store.match([1, 2, 3, 4, 0], salt=""))  # the old one is used again
    store.release(held)
    taken = store.allocate(1)
    assert matched(store, [5, 6, 7, 8, 0]) == new[:1]
    assert matched(store, [1, 2, 3, 4, 0]) == old
    store.check_integrity([taken])
    taken += store.allocate(2)
    assert matched(store, [5, 6, 7, 8, 0]) == []
    assert matched(store, [1, 2, 3, 4, 0]) == old[:1]
    assert store.num_evicted_pages == 3
    store.check_integrity([taken])


def test_free_pages_are_used_before_any_prefix_is_evicted() -> None:
    store = PageStore(3, PAGE_SIZE)
    page_ids, _ = keep(store, [1, 2])
    store.release(page_ids)
    store.allocate(2)
    assert matched(store, [1, 2, 3]) == page_ids


def test_a_shared_page_is_idle_only_when_the_last_request_lets_go() -> None:
    store = PageStore(4, PAGE_SIZE)
    first, _ = keep(store, [1, 2])
    second = store.retain(store.match([1, 2, 3], salt=""))
    assert second == first
    store.release(first)
    assert store.num_available == 3
    store.release(second)
    assert store.num_available == 4
    store.check_integrity([])


def test_pages_freed_together_are_foretold() -> None:
    store = PageStore(6, PAGE_SIZE)
    first, _ = keep(store, [1, 2, 3, 4])
    second = [*store.retain(store.match([1, 2, 9], salt="")), *store.allocate(1)]
    before = store.num_available
    assert store.num_freed_by([first]) == 1  # its own last page; the first one is shared
    assert store.num_freed_by([first, second]) == 3
    store.release(first)
    store.release(second)
    assert store.num_available == before + 3


def test_prefixes_can_be_switched_off() -> None:
    store = PageStore(4, PAGE_SIZE, keeps_prefixes=False)
    page_ids = store.allocate(1)
    assert store.insert(None, [1, 2], page_ids[0], salt="") is None
    store.release(page_ids)
    assert matched(store, [1, 2, 3]) == []
    assert store.num_kept == 0
    store.check_integrity([])


def test_dropping_idle_prefixes_leaves_those_in_use() -> None:
    store = PageStore(6, PAGE_SIZE)
    used, _ = keep(store, [1, 2])
    idle, _ = keep(store, [5, 6, 7, 8])
    store.release(idle)
    assert store.forget_idle() == 2
    assert matched(store, [5, 6, 0]) == []
    assert matched(store, [1, 2, 0]) == used
    store.check_integrity([used])


def test_idle_pages_of_a_prefix_are_those_that_holding_it_takes_from_the_available_ones() -> None:
    store, nodes = PageStore(8, 4), []
    page_ids = store.allocate(3)
    for index, page_id in enumerate(page_ids):
        nodes.append(store.insert(nodes[-1] if nodes else None, range(4 * index, 4 * index + 4), page_id, salt=""))
    for num_idle in range(4):
        assert store.num_idle_among(nodes) == num_idle
        before = store.num_available
        held = store.retain(nodes)
        assert before - store.num_available == num_idle
        store.release(held)
        store.release(page_ids[2 - num_idle : 3 - num_idle])
