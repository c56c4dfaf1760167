"""Blocks that one agent of NIXL sends and another reads, over UCX on host memory."""

import os
import signal
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("nixl_cu13", reason="needs the extra 'nixl'")
os.environ.setdefault("UCX_NET_DEVICES", "lo")  # before the first agent: no port beyond loopback

from dflash_trt.scheduler.stored_prefixes import Block
from dflash_trt.serving import nixl_blocks
from dflash_trt.serving.nixl_blocks import BlockReceiver, BlockSender, RemoteBlock, _Ring

SIZE = 3000  # of a block, in two parts
ROOM = 4 * SIZE + 100  # for four
SENDER = """
import sys, time
from base64 import b64encode
from dflash_trt.scheduler.stored_prefixes import Block
from dflash_trt.serving.nixl_blocks import BlockSender

sender, told = BlockSender(100_000_000), []
sender.watch([b"key"], told.extend)
assert sender.write(Block(key=b"key", is_state=False, groups=1), [bytes(90_000_000)])
print(b64encode(sender.metadata).decode(), *told[0][3:], flush=True)
time.sleep(60)
"""


def block(number: int, *, is_state: bool = False, groups: int = 1) -> Block:
    return Block(key=sha256(b"%d" % number).digest(), is_state=is_state, groups=0 if is_state else groups)


def content(number: int) -> list[bytes]:
    return [bytes([number]) * 1000, bytes([100 + number]) * (SIZE - 1000)]


class Pair:
    def __init__(self, num_bytes: int = ROOM) -> None:
        self.sender, self.receiver = BlockSender(num_bytes), BlockReceiver(SIZE)

    def learn(self, blocks: list[RemoteBlock]) -> None:
        self.receiver.learn(self.sender.metadata, blocks)

    def read(self, wanted: Block, *, sizes: tuple[int, ...] = (1000, SIZE - 1000)) -> list[bytes] | None:
        parts = [bytearray(size) for size in sizes]
        return [bytes(part) for part in parts] if self.receiver.read(wanted, [*map(memoryview, parts)]) else None


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.receiver.close()
    made.sender.close()


def test_who_waits_for_a_prompt_is_told_of_its_blocks_and_reads_them(pair: Pair) -> None:
    """Those that are there already, those that come, and no others."""
    pages, state, other = block(1, groups=3), block(1, is_state=True), block(3)
    assert pair.sender.write(pages, content(1)) and pair.sender.write(other, content(3))
    told: list[RemoteBlock] = []
    end = pair.sender.watch([pages.key, block(2).key], told.extend)
    assert [remote.block for remote in told] == [pages]
    assert pair.sender.write(state, content(2)) and pair.sender.write(block(2), content(4))
    assert [remote.block for remote in told] == [pages, state, block(2)]
    end()
    pair.learn(told)
    assert pair.receiver.find(pages.key) == [pages, state] and pair.receiver.find(other.key) == []
    assert pair.read(pages) == content(1)
    assert pair.read(state) == content(2)
    assert pair.read(block(2)) == content(4)
    assert pair.read(other) is None
    assert pair.read(pages, sizes=(SIZE - 1,)) is None, "a place of another size"
    assert pair.sender.write(block(4), content(5)) and len(told) == 3


def test_a_sender_knows_what_it_has_and_a_receiver_keeps_nothing(pair: Pair) -> None:
    assert not pair.sender.knows(block(1))
    assert pair.sender.write(block(1), content(1))
    assert pair.sender.knows(block(1)) and not pair.sender.knows(block(1, groups=3))
    assert pair.sender.write(block(1, groups=3), content(2)) and pair.sender.knows(block(1, groups=3))
    assert not pair.sender.knows(block(1, is_state=True)) and pair.sender.find(block(1).key) == []
    assert pair.receiver.knows(block(1)) and not pair.receiver.write(block(1), content(1))


def test_what_somebody_waits_for_is_not_overwritten(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes waits for room, and gives up after a while; the same block with more pages needs none of it."""
    told: list[RemoteBlock] = []
    end = pair.sender.watch([block(number).key for number in range(4)], told.extend)
    assert all(pair.sender.write(block(number), content(number)) for number in range(4))
    monkeypatch.setattr(nixl_blocks, "_ROOM_S", 0.2)
    assert not pair.sender.write(block(4), content(4)) and not pair.sender.knows(block(4))
    assert pair.sender.write(block(0, groups=3), content(9))
    monkeypatch.setattr(nixl_blocks, "_ROOM_S", 20.0)
    threading.Timer(0.3, end).start()
    started_s = time.monotonic()
    assert pair.sender.write(block(4), content(4))
    assert 0.2 < time.monotonic() - started_s < 10
    pair.learn(told)
    assert pair.read(block(2)) == content(2)
    assert pair.read(block(0, groups=3)) == content(9)


def test_a_block_that_was_overwritten_is_a_miss(pair: Pair) -> None:
    told: list[RemoteBlock] = []
    pair.sender.watch([block(0).key], told.extend)()
    end = pair.sender.watch([block(0).key], told.extend)
    assert pair.sender.write(block(0), content(0))
    end()
    pair.learn(told)
    assert all(pair.sender.write(block(number), content(number)) for number in range(1, 5))
    assert pair.receiver.find(block(0).key) == [block(0)] and pair.read(block(0)) is None


def test_blocks_that_came_and_those_that_were_overwritten_leave_room_for_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[RemoteBlock] = []
    pair.sender.watch([block(0).key, block(1).key], told.extend)
    assert pair.sender.write(block(0), content(0)) and pair.sender.write(block(1), content(1))
    assert pair.sender.write(block(2), content(2)) and len(told) == 2
    pair.learn([told[0], told[1]._replace(checksum=0)])
    monkeypatch.setattr(nixl_blocks, "_READ_S", 0.1)  # of a read that waits for a place
    for _ in range(nixl_blocks._NUM_LANDINGS + 1):
        assert pair.read(block(0)) == content(0) and pair.read(block(1)) is None
    assert pair.receiver._landings.qsize() == nixl_blocks._NUM_LANDINGS


def test_a_sender_that_did_not_answer_is_met_anew_when_it_tells_of_its_blocks_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent is removed, and its other blocks are forgotten, but not those of another sender."""
    other, told, told_by_other = BlockSender(ROOM), list[RemoteBlock](), list[RemoteBlock]()
    pair.sender.watch([block(0).key, block(1).key], told.extend)
    other.watch([block(2).key], told_by_other.extend)
    assert all(pair.sender.write(block(number), content(number)) for number in (0, 1))
    assert other.write(block(2), content(2))
    pair.learn(told)
    pair.receiver.learn(other.metadata, told_by_other)
    with monkeypatch.context() as patch:
        patch.setattr(pair.receiver._memory, "read", lambda *_: False)
        assert pair.read(block(0)) is None
    assert [*pair.receiver._known] == [block(2).name] and [*pair.receiver._memory._senders] == [other.metadata]
    assert pair.read(block(2)) == content(2)
    pair.learn(told)
    assert pair.read(block(0)) == content(0) and pair.read(block(1)) == content(1)
    other.close()


def test_what_an_agent_takes_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory and transfers, those too that took too long; and a sender is met once."""
    from nixl_cu13 import _api

    calls: Counter[str] = Counter()

    class Counting(_api.nixl_agent):
        def __getattribute__(self, name: str) -> object:
            calls[name] += 1
            return super().__getattribute__(name)

    monkeypatch.setattr(_api, "nixl_agent", Counting)
    pair, told = Pair(), list[RemoteBlock]()
    pair.sender.watch([block(0).key], told.extend)
    assert pair.sender.write(block(0), content(0))
    for _ in range(2):
        pair.learn(told)
        assert pair.read(block(0)) == content(0)
    assert calls["add_remote_agent"] == 1
    monkeypatch.setattr(Counting, "check_xfer_state", lambda *_: "PROC")
    monkeypatch.setattr(Counting, "transfer", lambda *_: "PROC")
    monkeypatch.setattr(nixl_blocks, "_READ_S", 0.05)
    assert pair.read(block(0)) is None and calls["remove_remote_agent"] == 1
    assert calls["initialize_xfer"] == calls["release_xfer_handle"] == 3
    pair.receiver.close()
    pair.sender.close()
    assert calls["register_memory"] == calls["deregister_memory"] == 2


def test_a_sender_that_closes_lets_go_of_who_waits_for_room() -> None:
    sender, done = BlockSender(SIZE), list[tuple[bool, float]]()
    sender.watch([block(0).key], lambda blocks: None)
    assert sender.write(block(0), content(0))
    writer = threading.Thread(target=lambda: done.append((sender.write(block(1), content(1)), time.monotonic())))
    writer.start()
    time.sleep(0.1)
    assert not done
    started_s = time.monotonic()
    sender.close()
    writer.join()
    [(was_written, ended_s)] = done
    assert not was_written and ended_s - started_s < nixl_blocks._ROOM_S / 2


def test_what_a_sender_may_hold_no_longer_is_forgotten(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RemoteBlock] = []
    pair.sender.watch([block(0).key, block(1).key], told.extend)
    assert pair.sender.write(block(0), content(0)) and pair.sender.write(block(1), content(1))
    monkeypatch.setattr(nixl_blocks, "_LINGER_S", 0.05)
    pair.learn(told[:1])
    time.sleep(0.1)
    assert pair.receiver.find(block(0).key) == []
    pair.learn(told[1:])
    assert [*pair.receiver._known] == [block(1).name]


def test_a_block_that_is_told_again_is_known_from_then_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps none of those that were told after its first time."""
    told: list[RemoteBlock] = []
    pair.sender.watch([block(number).key for number in range(3)], told.extend)
    assert all(pair.sender.write(block(number), content(number)) for number in range(3))
    monkeypatch.setattr(nixl_blocks, "_LINGER_S", 0.05)
    pair.learn(told[:2])
    monkeypatch.setattr(nixl_blocks, "_LINGER_S", 60.0)
    pair.learn(told[:1])
    time.sleep(0.1)
    pair.learn(told[2:])
    assert [*pair.receiver._known] == [block(0).name, block(2).name]
    assert pair.receiver.find(block(0).key) == [block(0)]


def test_a_sender_that_dies_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before or while a block is read, which takes no longer than its time; nobody asks for its other blocks again."""
    monkeypatch.setattr(nixl_blocks, "_READ_S", 3.0)
    receiver = BlockReceiver(90_000_000)
    wanted = Block(key=b"key", is_state=False, groups=1)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "UCX_TLS": "tcp,self"}
    command = [sys.executable, "-c", SENDER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        metadata, *place = process.stdout.readline().split()
        receiver.learn(b64decode(metadata), [RemoteBlock(b"key".hex(), False, 1, *map(int, place))])
        part = bytearray(90_000_000)
        assert receiver.read(wanted, [memoryview(part)])
        threading.Timer(0.01, process.send_signal, [signal.SIGKILL]).start()
        for _ in range(50):  # until it is gone
            started_s = time.monotonic()
            has_come = receiver.read(wanted, [memoryview(part)])
            assert time.monotonic() - started_s < 20
            if not has_come:
                break
    assert not has_come and receiver.find(b"key") == []
    receiver.close()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=60))
def test_ranges_of_a_ring_never_overlap(asked: list[tuple[int, int]]) -> None:
    """All that are there after each request, whatever it is; and the oldest go first."""
    ring, there, order = _Ring(32), dict[tuple[bytes, bool], range](), list[tuple[bytes, bool]]()
    for number, size in asked:
        name = bytes([number]), False
        gone = ring.in_the_way(name, size)
        if gone is None:
            assert size > 32
            continue
        others = [other for other in gone if other != name]
        assert others == [other for other in order if other != name][: len(others)]
        for other in gone:
            del there[other]
            order.remove(other)
        start = ring.take(name, size, gone)
        there[name] = range(start, start + size)
        order.append(name)
        places = [place for each in there.values() for place in each]
        assert len(places) == len({*places}) and max(places) < 32
