"""Calls in threads: results in order, errors in their places, and calls that are late."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dflash_trt.serving import mask_threads
from dflash_trt.serving.mask_threads import LateError, MaskThreads


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MaskThreads:
    monkeypatch.setattr(mask_threads, "_NUM_THREADS", request.param)
    monkeypatch.setattr(mask_threads, "TIME_LIMIT_S", 0.2)
    return MaskThreads()


def giving(value: Any) -> Callable[[], Any]:
    return lambda: value


@pytest.mark.parametrize("num_calls", [1, 2, 3, 5, 8])
def test_results_come_in_the_order_of_the_calls(threads: MaskThreads, num_calls: int) -> None:
    for _ in range(2):
        assert threads.call_all([giving(i) for i in range(num_calls)]) == list(range(num_calls))


def test_threads_share_the_calls_evenly(threads: MaskThreads) -> None:
    found = threads.call_all([threading.get_ident] * 11)
    counts = [found.count(ident) for ident in {*found}]
    assert len(counts) == mask_threads._NUM_THREADS and max(counts) - min(counts) <= 1


def test_an_exception_is_the_result_of_its_call(threads: MaskThreads) -> None:
    first, error, last = threads.call_all([giving(1), lambda: 1 // 0, giving(3)])
    assert (first, type(error), last) == (1, ZeroDivisionError, 3)


@pytest.mark.parametrize("late", [(0,), (2,), (4,), (1, 2), (0, 4)])
def test_a_late_call_costs_its_own_result_alone(
    threads: MaskThreads, release: threading.Event, late: tuple[int, ...]
) -> None:
    def wait() -> str:
        release.wait(30)
        return "too late"

    found = threads.call_all([wait if i in late else giving(i) for i in range(5)])
    assert [i for i, result in enumerate(found) if isinstance(result, LateError)] == list(late)
    assert [result for result in found if not isinstance(result, LateError)] == [i for i in range(5) if i not in late]
    release.set()
    assert threads.call_all([giving(i) for i in range(5)]) == list(range(5))


@pytest.mark.usefixtures("threads")  # for its limits
def test_what_stands_behind_a_late_call_runs_once(release: threading.Event) -> None:
    """In its new thread: the late one must not touch it when it goes on."""
    before, ran = set(threading.enumerate()), list[int]()
    own = MaskThreads()
    own.call_all([lambda: release.wait(30), *(partial(ran.append, i) for i in range(5))])
    started = set(threading.enumerate()) - before
    release.set()
    del own
    for thread in started:
        thread.join(10)
    assert sorted(ran) == list(range(5))


@pytest.mark.usefixtures("threads")  # for its limits
def test_threads_end_with_their_owner_and_those_of_late_calls_after_them(release: threading.Event) -> None:
    before = set(threading.enumerate())
    own = MaskThreads()
    own.call_all([lambda: release.wait(30)])
    started = set(threading.enumerate()) - before
    release.set()
    del own
    for thread in started:
        thread.join(10)
    assert started and not any(thread.is_alive() for thread in started)
