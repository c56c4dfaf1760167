"""Requests whose prefix is on its way from a store, and what else happens meanwhile."""

import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.stored_prefixes import Block
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.local_engine import LocalEngine
from dflash_trt.serving.prefix_directory import PrefixDirectory
from dflash_trt.serving.prefix_transfers import PrefixTransfers
from dflash_trt.serving.stream import RequestStream
from tests.parity.test_foreign_state import AnyExecutor, open_pair
from tests.parity.test_host_tier import TALKS
from tests.serving.engines import WAIT_S, until

PAIR = "experts"
SAMPLING = SamplingParams(max_new_tokens=5, ignore_eos=True)


class GatedDirectory(PrefixDirectory):
    """Reads wait for the test; `reading` counts them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, name="pair", max_bytes=1 << 26)
        self.gate, self.write_gate = threading.Event(), threading.Event()
        self.write_gate.set()
        self.writing: list[Block] = []
        self._read: list[Block] = []
        self.fails = False

    @property
    def reading(self) -> int:
        return len(self._read)

    def read(self, block: Block, parts: Sequence[memoryview]) -> bool:
        self._read.append(block)
        assert self.gate.wait(WAIT_S)
        if self.fails:
            raise RuntimeError("a bug of the store")
        return super().read(block, parts)

    def write(self, block: Block, parts: Sequence[bytes]) -> bool:
        self.writing.append(block)
        assert self.write_gate.wait(WAIT_S)
        return super().write(block, parts)


class Engine:
    def __init__(self, root: Path, store: PrefixDirectory) -> None:
        self.executor = open_pair(PAIR, root, None, num_sequences=2, host_bytes=1 << 22)
        self.scheduler = Scheduler(self.executor.limits)
        self.loop = EngineLoop(self.executor, self.scheduler)
        self.loop.keep_prefixes([self.scheduler], store, root=b"pair", place_bytes=self.executor.place_bytes)

    def submit(self, name: str, prompt: list[int], **fields: object) -> RequestStream:
        return self.loop.submit(
            Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=SAMPLING, **fields)  # type: ignore[arg-type]
        )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, and a store that has the first two talks."""
    root = tmp_path_factory.mktemp("pair")
    engine = Engine(root, PrefixDirectory(root / "store", name="pair", max_bytes=1 << 26))
    for index in (0, 0, 1, 1):
        stream = engine.submit("first", TALKS[index])
        while engine.loop.step():
            pass
        stream.result(timeout_s=1)
    engine.loop.close()
    return root


@pytest.fixture
def store(root: Path, tmp_path: Path) -> GatedDirectory:
    """A copy: what a test does to it is its own."""
    return GatedDirectory(shutil.copytree(root / "store", tmp_path / "store"))


@pytest.fixture
def engine(root: Path, store: GatedDirectory) -> Iterator[Engine]:
    engine = Engine(root, store)
    engine.loop.start()
    yield engine
    store.gate.set()
    engine.loop.close()
    engine.loop.check_integrity()


def hits(stream: RequestStream) -> int:
    output = stream.result(timeout_s=WAIT_S)
    assert output.error is None and len(output.token_ids) == 5
    return output.statistics.num_prefix_hit_tokens


def test_others_run_while_a_prefix_is_on_its_way(engine: Engine, store: GatedDirectory) -> None:
    waiting = engine.submit("waiting", TALKS[0])
    until(lambda: store.reading > 0)
    assert hits(engine.submit("other", TALKS[2])) == 0
    assert not waiting.is_done and engine.loop.statistics().num_waiting_now == 1
    store.gate.set()
    assert hits(waiting) == 28
    assert engine.loop.statistics().scheduler.num_loaded_blocks == 7  # type: ignore[union-attr]


def test_two_requests_for_one_prefix_read_it_once(engine: Engine, store: GatedDirectory) -> None:
    first = engine.submit("first", TALKS[0])
    until(lambda: store.reading > 0)
    second = engine.submit("second", [*TALKS[0], 5])
    store.gate.set()
    assert hits(first) == hits(second) == 28
    assert store.reading == 7


def test_a_request_that_is_cancelled_leaves_what_was_read_to_others(engine: Engine, store: GatedDirectory) -> None:
    stream = engine.submit("cancelled", TALKS[0])
    until(lambda: store.reading > 0)
    engine.loop.cancel("cancelled")
    assert stream.result(timeout_s=WAIT_S).finish_reason == "cancelled"
    store.gate.set()
    until(lambda: engine.loop.statistics().scheduler.num_loaded_blocks == 7)  # type: ignore[union-attr]
    assert hits(engine.submit("next", TALKS[0])) == 28
    assert store.reading == 7


def test_blocks_are_read_as_they_come_before_their_request_does(engine: Engine, store: GatedDirectory) -> None:
    """Each once. A request that comes meanwhile waits for what is being read."""
    keys = engine.loop.prefix_keys(TALKS[0], salt="")
    paths = [store._path(key, is_state=False) for key in keys]
    for path in paths[3:]:
        path.rename(path.with_suffix(".later"))

    def read() -> bool:
        return engine.loop.read_early(TALKS[0], keys, salt="")

    store.gate.set()
    assert not read()
    until(lambda: engine.loop.statistics().scheduler.num_loaded_blocks == 3)  # type: ignore[union-attr]
    assert not read() and store.reading == 3
    store.gate.clear()
    for path in paths[3:]:
        path.with_suffix(".later").rename(path)
    until(lambda: not read() and store.reading > 3)
    waiting = engine.submit("waiting", TALKS[0])
    store.gate.set()
    assert hits(waiting) == 28 and read()
    assert store.reading == 7


@pytest.mark.parametrize("fails", [True, False])
def test_a_store_that_fails_costs_a_hit_and_no_request(engine: Engine, store: GatedDirectory, fails: bool) -> None:
    store.fails = fails
    stream = engine.submit("unlucky", TALKS[1])
    until(lambda: store.reading > 0)
    if not fails:  # the third page is damaged
        path = store._path(engine.loop.prefix_keys(TALKS[1], salt="")[2], is_state=False)
        path.write_bytes(path.read_bytes()[:-1])
    store.gate.set()
    assert hits(stream) == (0 if fails else 8)


def test_reading_is_left_where_computing_is_faster(engine: Engine, store: GatedDirectory) -> None:
    store.gate.set()
    assert hits(engine.submit("first", TALKS[0])) == 28
    transfers = engine.loop._transfers
    assert transfers is not None and engine.scheduler.prompt_rate is None, "of no step yet that computed a prompt"
    assert hits(engine.submit("prompt", TALKS[3])) == 0
    assert engine.scheduler.prompt_rate is not None and transfers._read_rate is not None
    transfers._read_rate = 1.0  # bytes per second
    assert hits(engine.submit("slow", TALKS[1])) == 0
    assert store.reading == 7 and transfers._read_rate > 1.0
    transfers._read_rate = 1e12
    assert hits(engine.submit("again", TALKS[1])) == 28, "which the engine has by now"


def test_prompt_log_probabilities_need_every_token(engine: Engine, store: GatedDirectory) -> None:
    sampling = SamplingParams(max_new_tokens=5, ignore_eos=True, prompt_logprobs=0)
    request = Request(request_id="scored", prompt_token_ids=tuple(TALKS[0]), sampling=sampling)
    assert hits(engine.loop.submit(request)) == 0 and store.reading == 0


def test_a_lost_device_takes_its_places_along(root: Path, store: GatedDirectory) -> None:
    """What was on its way goes to memory that nobody uses any more; the request is computed by the next executor."""
    engine = Engine(root, store)

    def reopened() -> AnyExecutor:
        return open_pair(PAIR, root, None, num_sequences=2, host_bytes=1 << 22)

    config = RuntimeConfig(overlap_scheduling=False)
    local = LocalEngine(engine.executor, config, engine.scheduler, open_executor=reopened)  # type: ignore[arg-type]
    local.keep_prefixes([engine.scheduler], store, root=b"pair", place_bytes=engine.executor.place_bytes)
    engine.loop = local
    local.start()
    store.write_gate.clear()
    for name in "ab":  # the second one begins with what the first has computed, which is saved therefore
        assert hits(engine.submit(name, TALKS[3])) == (0 if name == "a" else 28)
    until(lambda: bool(store.writing))
    waiting = engine.submit("waiting", TALKS[0])
    until(lambda: store.reading > 0)
    with (
        patch.object(type(engine.executor), "submit", side_effect=RuntimeError("an illegal access")),
        patch.object(type(engine.executor), "can_retry", new=False),
    ):
        lost = engine.submit("lost", TALKS[2]).result(timeout_s=WAIT_S)
    assert lost.error is not None and "an illegal access" in lost.error
    store.gate.set()
    store.write_gate.set()
    assert hits(waiting) == 0
    with patch.object(PrefixTransfers, "_is_faster", return_value=True):
        assert hits(engine.submit("next", TALKS[1])) == 28, "into the new places"
    until(lambda: local._transfers is not None and local._transfers._num_saving == 0)
    local.close()
    local.check_integrity()


def test_closing_ends_requests_that_wait_for_their_prefix(root: Path, store: GatedDirectory) -> None:
    engine = Engine(root, store)
    engine.loop.start()
    stream = engine.submit("waiting", TALKS[0])
    until(lambda: store.reading > 0)
    threading.Timer(0.1, store.gate.set).start()
    engine.loop.close()
    assert stream.result(timeout_s=WAIT_S).finish_reason == "cancelled"


def test_draining_serves_them(root: Path, store: GatedDirectory) -> None:
    engine = Engine(root, store)
    engine.loop.start()
    stream = engine.submit("waiting", TALKS[0])
    threading.Timer(0.1, store.gate.set).start()
    engine.loop.close(drains=True)
    assert hits(stream) == 28


def test_closing_waits_until_what_is_being_written_is_there(root: Path, store: GatedDirectory) -> None:
    engine = Engine(root, store)
    engine.loop.start()
    store.write_gate.clear()
    for _ in range(2):
        engine.submit("one", TALKS[3]).result(timeout_s=WAIT_S)
    until(lambda: bool(store.writing))
    threading.Timer(0.3, store.write_gate.set).start()
    engine.loop.close()
    assert all(map(store.knows, store.writing))


def test_blocks_that_the_store_has_are_not_written_again(engine: Engine, store: GatedDirectory) -> None:
    with patch.object(GatedDirectory, "find", return_value=[]):  # so that they are computed
        for _ in range(2):
            hits(engine.submit("again", TALKS[0]))
            hits(engine.submit("new", TALKS[3]))
    until(lambda: len(store.writing) > 6 and engine.loop.has_kept([]))
    blocks = {engine.loop.prefix_keys(TALKS[index], salt="")[0]: index for index in (0, 3)}
    assert {blocks.get(block.key) for block in store.writing} - {None} == {3}


def test_at_most_a_quarter_of_the_places_is_being_saved() -> None:
    asked: list[int] = []
    given: Any = SimpleNamespace(num_places=16, publishes_all=False, arrivals=asked.append)
    transfers = PrefixTransfers(given, given, given, place_bytes=lambda *place: [], wake=lambda: None)
    for num_saving in (0, 3, 4):
        transfers._num_saving = num_saving
        transfers.advance()
    assert asked == [4, 1]
    transfers.close()


def test_a_read_that_failed_tells_nothing_of_the_speed_of_others(engine: Engine, store: GatedDirectory) -> None:
    store.gate.set()
    assert hits(engine.submit("first", TALKS[0])) == 28
    transfers = engine.loop._transfers
    assert transfers is not None
    rate = transfers._read_rate
    path = store._path(engine.loop.prefix_keys(TALKS[1], salt="")[2], is_state=False)
    path.write_bytes(path.read_bytes()[:-1])
    assert hits(engine.submit("unlucky", TALKS[1])) == 8
    assert rate is not None and transfers._read_rate == rate
