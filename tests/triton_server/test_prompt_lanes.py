"""Prompts that wait to be read: by which thread, how many, and what is given back."""

import threading
from collections.abc import Iterator

import pytest

from dflash_trt.core.errors import QueueFullError
from dflash_trt.servers.triton.prompt_lanes import _OVERHEAD_BYTES, SHORT_BYTES, PromptLanes

LIMIT = 10_000
ALL = LIMIT - _OVERHEAD_BYTES


@pytest.fixture
def lanes() -> Iterator[PromptLanes]:
    lanes = PromptLanes(max_waiting_bytes=LIMIT)
    yield lanes
    lanes.close()


def nothing() -> None: ...


@pytest.mark.parametrize(
    ("num_bytes", "is_slow", "lane"),
    [
        (SHORT_BYTES - _OVERHEAD_BYTES, False, "short"),
        (SHORT_BYTES - _OVERHEAD_BYTES, True, "slow"),
        (SHORT_BYTES - _OVERHEAD_BYTES + 1, False, "long"),
        (SHORT_BYTES - _OVERHEAD_BYTES + 1, True, "long"),
    ],
)
def test_a_prompt_is_read_with_others_of_its_kind(num_bytes: int, is_slow: bool, lane: str) -> None:
    lanes, names = PromptLanes(), list[str]()
    read = lanes.put(lambda: names.append(threading.current_thread().name), num_bytes, is_slow=is_slow)
    read.result(30)
    assert names[0].startswith(f"dflash-{lane}-prompts")
    lanes.close()


def test_what_waits_is_bounded_and_a_prompt_alone_is_taken(lanes: PromptLanes) -> None:
    lanes.put(nothing, 5 * LIMIT).result(30)
    gate = threading.Event()
    running = lanes.put(lambda: gate.wait(30) and None, 0)
    waiting = lanes.put(nothing, ALL - _OVERHEAD_BYTES)  # exactly as many as may wait
    with pytest.raises(QueueFullError, match=f"at most {LIMIT} bytes waiting to be tokenized, found {LIMIT + 1024}"):
        lanes.put(nothing, 0)
    assert waiting.cancel()  # gives back what it took, and what was refused took nothing
    again = lanes.put(nothing, ALL - _OVERHEAD_BYTES)
    gate.set()
    running.result(30)
    again.result(30)


def test_a_prompt_whose_reading_fails_gives_back_its_bytes(lanes: PromptLanes) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            lanes.put(fail, ALL).result(30)


def test_prompts_that_wait_when_all_ends_are_never_read() -> None:
    lanes, gate, read = PromptLanes(), threading.Event(), list[int]()
    running = lanes.put(lambda: gate.wait(30) and None, 0)
    waiting = lanes.put(lambda: read.append(1), 0)
    lanes.close()
    gate.set()
    running.result(30)
    assert waiting.cancelled() and read == []
