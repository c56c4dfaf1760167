"""What a watcher is told of the prefix cache is all that a router needs to know its contents."""

import random
from typing import Any

import pytest

from dflash_trt.core.prefix_watcher import PrefixWatcher
from dflash_trt.scheduler.page_store import PageStore
from dflash_trt.scheduler.prefix_tree import PrefixNode
from dflash_trt.scheduler.shared_prefixes import SharedPrefixes
from tests.scheduler.driver import make_driver, make_request


class Mirror:
    """The cache as a router sees it: the salt, and the tokens from the start to each page."""

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[str | int, ...]] = {}

    def stored(self, block_id: int, parent_id: int | None, token_ids: tuple[int, ...], salt: str) -> None:
        assert block_id not in self.prefixes
        before = (salt,) if parent_id is None else self.prefixes[parent_id]
        assert before[0] == salt
        self.prefixes[block_id] = (*before, *token_ids)

    def removed(self, block_id: int) -> None:
        del self.prefixes[block_id]


class Both:
    """Tells two watchers."""

    def __init__(self, *watchers: PrefixWatcher) -> None:
        self.watchers = watchers

    def stored(self, *block: Any) -> None:
        for watcher in self.watchers:
            watcher.stored(*block)

    def removed(self, block_id: int) -> None:
        for watcher in self.watchers:
            watcher.removed(block_id)


def path_tokens(node: PrefixNode | None) -> tuple[int, ...]:
    return () if node is None else (*path_tokens(node.parent), *node.token_ids)


def use(store: PageStore, dice: random.Random) -> tuple[PrefixNode, str, list[int]]:
    """Cache a prompt of up to four pages, and let go of it."""
    tokens = [dice.randrange(2) for _ in range(2 * dice.randint(1, 4))]
    salt = dice.choice(["", "other"])
    path = store.match([*tokens, 9], salt=salt)
    with store.host.pinned(path):
        held = store.retain(path)
    node = path[-1] if path else None
    for start in range(2 * len(path), len(tokens), 2):
        (page_id,) = store.allocate(1)
        node = store.insert(node, tokens[start : start + 2], page_id, salt=salt)
        assert node is not None and node.page_id is not None
        held.append(node.page_id)
    assert node is not None
    store.release(held)
    return node, salt, tokens


@pytest.mark.parametrize("num_host_pages", [0, 1, 7])
def test_a_mirror_holds_exactly_the_cached_prefixes_after_any_use(num_host_pages: int) -> None:
    dice = random.Random(3)
    store, mirror = PageStore(12, page_size=2, num_host_pages=num_host_pages), Mirror()
    store.watch(mirror)
    for _ in range(400):
        node, salt, tokens = use(store, dice)
        assert mirror.prefixes[node.block_id] == (salt, *tokens)
        assert path_tokens(node) == tuple(tokens)
        store.check_integrity([])
        assert store.num_kept <= len(mirror.prefixes) <= store.num_kept + store.host.num_kept
    assert store.num_evicted_pages > 0, "pages were evicted, and the mirror told"
    assert store.host.take_copies().is_onboard.any() == (num_host_pages > 0)
    store.forget_idle()
    assert mirror.prefixes == {}


def test_a_mirror_of_ranks_holds_what_any_of_them_has() -> None:
    dice, mirror, own = random.Random(5), Mirror(), [Mirror(), Mirror()]
    shared, stores = SharedPrefixes(mirror), [PageStore(9, page_size=2) for _ in own]
    for store, alone in zip(stores, own, strict=True):
        store.watch(Both(alone, shared.of_rank()))
    for _ in range(300):
        use(dice.choice(stores), dice)
        held = sorted(mirror.prefixes.values())
        assert held == sorted({prefix for alone in own for prefix in alone.prefixes.values()})
    for store in stores:
        assert store.num_evicted_pages > 0 and mirror.prefixes
        store.forget_idle()
    assert mirror.prefixes == {}


def test_a_watcher_hears_of_a_scheduler_s_pages_until_another_one_does() -> None:
    driver, first, second = make_driver(), Mirror(), Mirror()
    for watcher, prompt in ((first, range(12)), (second, range(20, 32)), (None, range(40, 52))):
        driver.scheduler.watch_prefixes(watcher)
        driver.add(make_request("r", prompt, max_new_tokens=1, cache_salt="a"))
        driver.run()
        driver.finish_reasons.clear()
    assert set(first.prefixes.values()) == {("a", *range(stop)) for stop in (4, 8, 12)}
    assert set(second.prefixes.values()) == {("a", *range(20, stop)) for stop in (24, 28, 32)}
