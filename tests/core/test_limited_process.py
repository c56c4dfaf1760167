"""Processes that answer within their limits, or end and are replaced."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.core.limited_process import LimitedProcesses, ProcessEndedError
from dflash_trt.core.limited_worker import MAX_MEMORY_BYTES

PROGRAM = """
import os, resource, sys, time
from dflash_trt.core.limited_worker import serve

def answer(request):
    word, _, number = request.partition(b" ")
    if word == b"sleep":
        time.sleep(float(number))
    if word == b"exit":
        os._exit(int(number))
    if word == b"kill":
        os.kill(os.getpid(), int(number))
    if word == b"allocate":
        return str(len(bytearray(int(number)))).encode()
    if word == b"core":
        return str(resource.getrlimit(resource.RLIMIT_CORE)).encode()
    if word == b"arguments":
        return " ".join(sys.argv[3:]).encode()
    print("of nobody's result")
    return str(os.getpid()).encode()

serve(answer)
"""
LIMIT_S = 1.0


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[LimitedProcesses]:
    (tmp_path / "program.py").write_text(PROGRAM)
    found = LimitedProcesses(str(tmp_path / "program.py"), "one", "two", time_limit_s=LIMIT_S)
    yield found
    found._close()


def test_a_process_stays_and_has_its_arguments(processes: LimitedProcesses) -> None:
    processes.start()
    first = processes.ask(b"id")
    processes.start()
    assert processes.ask(b"id") == first and int(first) != os.getpid()
    assert processes.ask(b"arguments") == b"one two"
    assert processes.ask(b"core") == b"(0, 0)", "a crash fills no disk"
    time.sleep(1.2 * LIMIT_S)  # the limit is one of requests
    assert processes.ask(b"id") == first


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (b"sleep 30", "one that takes longer"),
        (b"exit 3", "a process that exited with 3"),
        (b"kill 9", "a process ended by SIGKILL"),
        (b"allocate %d" % (2 * MAX_MEMORY_BYTES), "a process that exited with 1"),
    ],
)
def test_a_request_that_breaks_a_limit_ends_its_process_alone(
    processes: LimitedProcesses, request_: bytes, said: str
) -> None:
    before, started_s = processes.ask(b"id"), time.monotonic()
    with pytest.raises(ProcessEndedError, match=said):
        processes.ask(request_)
    assert time.monotonic() - started_s < 10
    assert processes.ask(b"id") != before
    assert processes.ask(b"allocate %d" % (MAX_MEMORY_BYTES // 4)) == b"%d" % (MAX_MEMORY_BYTES // 4)


def test_a_stopped_process_is_given_up(processes: LimitedProcesses) -> None:
    started_s = time.monotonic()
    with pytest.raises(ProcessEndedError, match="nothing of it"):
        processes.ask(b"kill 19")
    assert LIMIT_S < time.monotonic() - started_s < 15
    processes.ask(b"id")


def test_a_request_does_not_wait_for_one_that_takes_long(processes: LimitedProcesses) -> None:
    processes.ask(b"id")
    processes.ask(b"id")
    slow = threading.Thread(target=processes.ask, args=(b"sleep 0.9",))
    slow.start()
    time.sleep(0.2)
    ids = {processes.ask(b"id") for _ in range(3)}
    assert slow.is_alive() and len(ids) == 1
    slow.join()


@pytest.mark.timeout(30)
def test_a_process_that_cannot_start_leaves_room_for_the_next(
    processes: LimitedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*given: object, **named: object) -> None:
        raise OSError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", failing)
        for call in (processes.start, processes.start, lambda: processes.ask(b"id"), processes.start):
            with pytest.raises(OSError, match="no more processes"):
                call()
    assert processes.ask(b"arguments") == b"one two"


def test_processes_end_with_their_owner(processes: LimitedProcesses) -> None:
    process_id = int(processes.ask(b"id"))
    processes._close()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
