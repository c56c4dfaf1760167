"""Blocks that go to a store and come from it at any moment: same tokens, same drafts, no place with two owners."""

from random import Random
from typing import Any

import pytest

from dflash_trt.core.step_plan import PageWindow
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.stored_prefixes import Block
from tests.fake_executor import FakeExecutor
from tests.scheduler.driver import Driver, expected_tokens, make_limits, make_request
from tests.scheduler.toy_store import ToyStore

TALKS = [[talk] * 9 + [9 - talk] * 9 + [talk + 1] * 8 for talk in range(4)]
LIMITS: dict[str, dict[str, Any]] = {
    "pages alone": {},
    "windows": {"page_windows": (PageWindow(6, 14), PageWindow(11, 16))},
    "states": {"num_snapshots": 2, "num_host_snapshots": 3},
}


class Episode:
    """Engines one after another over one store, their requests and transfers in any order."""

    def __init__(self, seed: int, **limits: Any) -> None:
        self.random = Random(seed)
        self.limits = make_limits(
            num_pages=self.random.randint(14, 22),
            num_host_pages=self.random.choice([2, 5, 9, 14]),
            max_seq_len=40,
            **limits,
        )
        self.is_ahead = self.random.random() < 0.5
        self.store = ToyStore()
        self.num_loaded = self.num_saved = self.num_requests = 0
        self.restart()

    def restart(self) -> None:
        executor = FakeExecutor(self.limits, vocab_size=11)
        self.driver = Driver(Scheduler(self.limits), executor)
        self.store.attach(self.driver.scheduler, executor, publishes_all=self.random.random() < 0.5)
        self.requests: dict[str, Any] = {}

    def run(self, num_events: int) -> None:
        actions = {self.add: 3, self.step: 8, self.end_saving: 3, self.end_loading: 3, self.disturb: 1, self.lose: 0.1}
        for _ in range(num_events):
            self.random.choices(list(actions), list(actions.values()))[0]()
            self.driver.scheduler.check_integrity()
        self.finish()
        self.restart()

    def add(self) -> None:
        talk = self.random.choice(TALKS)
        prompt = talk[: self.random.randint(4, len(talk))] + [self.random.randrange(11)] * self.random.randint(0, 3)
        salt = self.random.choice(["", "", "other"])
        request = make_request(
            f"r{self.num_requests}", prompt, max_new_tokens=self.random.randint(1, 8), cache_salt=salt
        )
        self.num_requests += 1
        self.driver.add(request)
        self.requests[request.request_id] = request
        if self.random.random() < 0.8:
            self.store.begin_loading(request)

    def step(self) -> None:
        self.store.begin_saving()
        if self.is_ahead:
            self.driver.step_ahead()
        else:
            self.driver.step()

    def end_saving(self) -> None:
        if self.store.saving:
            index = self.random.randrange(len(self.store.saving))
            self.store.end_saving(index, is_saved=self.random.random() < 0.9)

    def end_loading(self) -> None:
        if self.store.loading:
            index = self.random.randrange(len(self.store.loading))
            num_transfers = len(self.store.loading[index][1])
            self.store.end_loading(index, self.random.choice([num_transfers, num_transfers, num_transfers // 2]))

    def disturb(self) -> None:
        """Requests leave at a bad moment, or a step does not run."""
        if not self.requests:
            return
        request_id, act = self.random.choice(list(self.requests)), self.random.randrange(3)
        if act == 0:
            self.driver.scheduler.preempt(request_id)
        elif act == 1:
            self.driver.plan_and_abandon()
        else:
            self.driver.cancel(request_id)

    def lose(self) -> None:
        """The device; what was on its way to its places is forgotten, and so are these requests."""
        self.driver.scheduler.lose_device("gone")
        self.driver.scheduler.check_integrity()
        self.restart()

    def finish(self) -> None:
        while self.store.loading:
            self.end_loading()
        self.driver.run(ahead=self.is_ahead)
        for request_id, request in self.requests.items():
            expected, found = expected_tokens(self.driver.executor, request), self.driver.tokens[request_id]
            if self.driver.finish_reasons[request_id] != "cancelled":
                assert found == expected, request_id
        for event in self.driver.events:
            assert event.num_accepted == event.num_candidates, "the drafter lost its context"
        counts = self.driver.counts
        counts.num_loaded, counts.num_saved = self.store.num_loaded, self.store.num_saved
        counts.check(self.driver.scheduler)
        self.num_loaded, self.num_saved = self.num_loaded + counts.num_loaded, self.num_saved + counts.num_saved
        assert self.driver.scheduler.num_pages_in_use == self.driver.scheduler.num_snapshots_in_use == 0


@pytest.mark.parametrize("name", LIMITS)
def test_any_order_of_transfers_and_steps(name: str) -> None:
    num_loaded = num_saved = 0
    for seed in range(60):
        episode = Episode(seed, **LIMITS[name])
        for _ in range(4):
            episode.run(60)
        num_loaded, num_saved = num_loaded + episode.num_loaded, num_saved + episode.num_saved
    assert num_loaded > 40 and num_saved > 300, (num_loaded, num_saved)


def kept(prompt: list[int], **fields: Any) -> tuple[ToyStore, Driver]:
    """A store with the blocks of a prompt, of which a second request made use, and a new engine over it."""
    limits = make_limits(num_host_pages=40)
    store = ToyStore()
    for _ in range(2):
        driver = Driver(Scheduler(limits), FakeExecutor(limits))
        store.attach(driver.scheduler, driver.executor)
        for name in "ab" if not store.blocks else "":
            driver.add(make_request(name, prompt, **fields))
            driver.run()
            store.begin_saving()
            while store.saving:
                store.end_saving(0)
    return store, driver


def hits(store: ToyStore, driver: Driver, prompt: list[int], **fields: Any) -> int:
    driver.add(request := make_request("c", prompt, **fields))
    store.begin_loading(request)
    store.end_loading(0, len(store.loading[0][1]))
    driver.run()
    assert driver.tokens["c"] == expected_tokens(driver.executor, request)
    return driver.scheduler.statistics().num_prefix_hit_tokens


PROMPT = [*range(21)]  # five pages of four, and a token


@pytest.mark.parametrize(
    ("prompt", "salt", "expected"),
    [
        (PROMPT, "", 20),
        (PROMPT[:20], "", 16),
        ([*PROMPT[:9], 50, *PROMPT[10:]], "", 8),
        ([*PROMPT, 60, 61], "", 20),
        (PROMPT, "mine", 0),
        ([50, *PROMPT[1:]], "", 0),
    ],
)
def test_a_block_is_for_the_tokens_up_to_its_end_and_for_its_salt(prompt: list[int], salt: str, expected: int) -> None:
    assert hits(*kept(PROMPT), prompt, cache_salt=salt) == expected


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (20, 4), (21, 5)])
def test_a_prompt_whose_blocks_are_all_cached_needs_no_store(num_tokens: int, num_blocks: int) -> None:
    """Its last token is computed, also where it ends a page."""
    store, driver = ToyStore(), Driver(Scheduler(limits := make_limits(num_host_pages=40)), FakeExecutor(limits))
    store.attach(driver.scheduler, driver.executor)
    driver.add(make_request("a", PROMPT))
    driver.run()
    prompt = PROMPT[:num_tokens]
    assert store.prefixes.num_known(prompt, salt="") == store.prefixes.num_blocks(prompt) == num_blocks
    assert len(store.prefixes.keys(prompt, salt="")) == num_blocks


def test_keys_of_nodes_are_those_of_prompts() -> None:
    store, driver = kept(PROMPT, cache_salt="salt")
    assert list(store.blocks) == [(key, False) for key in store.prefixes.keys(PROMPT, salt="salt")]
    assert len({*store.blocks, *((key, False) for key in store.prefixes.keys(PROMPT, salt=""))}) == 10
    other = driver.scheduler.stored_prefixes(b"another engine")
    assert not {*other.keys(PROMPT, salt="salt")} & {key for key, _ in store.blocks}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_is_in_the_store_though_nothing_comes_after_it(ahead: bool) -> None:
    """What is computed goes there, too, if others wait for it: by a step without rows."""
    limits = make_limits(num_host_pages=40, page_windows=(PageWindow(6, 14),))
    store, driver = ToyStore(), Driver(Scheduler(limits), FakeExecutor(limits))
    store.attach(driver.scheduler, driver.executor, publishes_all=True)
    driver.add(make_request("a", PROMPT, max_new_tokens=9))
    driver.run(ahead=ahead)
    taken = [[block for _, block in store.prefixes.arrivals(2)] for _ in range(4)]
    assert [len(blocks) for blocks in taken] == [2, 2, 1, 0], "whoever takes some gets the others later"
    blocks = [block for part in taken for block in part]
    assert [block.key for block in blocks] == store.prefixes.keys(PROMPT, salt=""), "none of the answer"
    assert blocks[-1].groups == 3 and driver.scheduler.statistics().num_offloaded_pages >= 5
    assert not driver.scheduler.has_work


def test_only_blocks_after_which_a_request_could_begin_are_loaded() -> None:
    store, _ = kept(PROMPT)
    keys = store.prefixes.keys(PROMPT, salt="")
    found = [[store.blocks[key, False][0]] for key in keys]
    without_first_group = [*found[:2], [Block(key=keys[2], is_state=False, groups=2)], *found[3:]]
    assert len(store.prefixes.begin_loading(PROMPT, without_first_group, start=0, salt="")) == 2
    limits = make_limits(num_host_pages=40, num_snapshots=2, num_host_snapshots=4)
    prefixes = Scheduler(limits).stored_prefixes(b"toy")
    assert prefixes.begin_loading(PROMPT, found, start=0, salt="") == []
    states = [
        [*blocks, Block(key=key, is_state=True)] if i in (1, 3) else blocks
        for i, (key, blocks) in enumerate(zip(keys, found, strict=True))
    ]
    wanted = [transfer.block for transfer in prefixes.begin_loading(PROMPT, states, start=0, salt="")]
    assert wanted == [*(blocks[0] for blocks in found[:4]), Block(key=keys[3], is_state=True)]


def test_a_state_is_loaded_without_the_pages_that_are_there() -> None:
    """Of the prompt's first three blocks the engine has the pages, but the snapshot is another request's now."""
    limits = make_limits(num_pages=40, num_host_pages=40, num_snapshots=1, num_host_snapshots=1)
    driver = Driver(Scheduler(limits), FakeExecutor(limits))
    store = ToyStore()
    store.attach(driver.scheduler, driver.executor)
    for name, prompt in (("a", PROMPT[:13]), ("b", [99] * 9), ("c", [98] * 9)):
        driver.add(make_request(name, prompt, max_new_tokens=1))
        driver.run()
    keys = store.prefixes.keys(PROMPT, salt="")
    assert store.prefixes.num_known(PROMPT, salt="") == 0
    found = [[Block(key=key, is_state=kind, groups=int(not kind)) for kind in (False, True)] for key in keys]
    wanted = [transfer.block.name for transfer in store.prefixes.begin_loading(PROMPT, found, start=0, salt="")]
    assert wanted == [(keys[3], False), (keys[4], False), (keys[4], True)]


def test_what_comes_takes_no_place_from_its_beginning() -> None:
    """The first two pages of the prompt are in the only places that there are."""
    limits = make_limits(num_host_pages=2, num_pages=16)
    store, driver = ToyStore(), Driver(Scheduler(limits), FakeExecutor(limits))
    store.attach(driver.scheduler, driver.executor)
    driver.add(make_request("a", PROMPT[:9]))
    driver.run()
    driver.add(make_request("b", [99] * 63, max_new_tokens=1))  # all pages
    driver.run()
    found = [[Block(key=key, is_state=False, groups=1)] for key in store.prefixes.keys(PROMPT, salt="")]
    assert store.prefixes.num_known(PROMPT, salt="") == 2
    assert store.prefixes.begin_loading(PROMPT, found[2:], start=2, salt="") == []
    driver.scheduler.check_integrity()
