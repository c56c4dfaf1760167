"""Threads of a rank: PyTorch's number of threads, and the thread that opens an executor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from dflash_trt.core.host_resources import available_cores
from dflash_trt.core.process import is_waiting_chosen

_Result = TypeVar("_Result")

_PARALLEL_ELEMENTS = 2**20  # PyTorch computes at least this many in parallel

_has_idle_team = False


def default_num_threads(num_ranks: int = 1) -> int:
    """The available cores divided by the ranks, but at most PyTorch's own setting (OMP_NUM_THREADS)."""
    return max(1, min(torch.get_num_threads(), available_cores() // num_ranks))


def keep_waits_short(num_threads: int | None) -> None:
    """Let OpenMP threads sleep soon between regions if PyTorch was imported before that was configured.

    GNU's runtime spins for 300,000 rounds, but for 100 once it has more threads than there are cores (GOMP_SPINCOUNT in
    its manual). So an idle thread keeps a team, of as many threads as PyTorch computes with, while the process lives.
    """
    global _has_idle_team  # a property of the process, as the runtime's threads are
    if num_threads == 1 or is_waiting_chosen() or _has_idle_team:
        return
    _has_idle_team = True
    has_team = threading.Event()

    def idle() -> None:
        torch.ones(_PARALLEL_ELEMENTS).add_(1.0)
        has_team.set()
        threading.Event().wait()

    threading.Thread(target=idle, name="dflash-idle-team", daemon=True).start()
    has_team.wait()


def run_in_thread(function: Callable[[], _Result]) -> _Result:
    """Call `function` in a thread that ends with it.

    OpenMP keeps a team of threads for every thread that ever computed something. Once they outnumber the cores, they
    sleep between two regions instead of spinning, and a small step takes twice as long. So weights are prepared in a
    thread that ends, and its team with it; see docs/benchmarks.md. An interrupt does not wait for it.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            future.set_exception(error)

    thread = threading.Thread(target=run, name="dflash-opening", daemon=True)
    thread.start()
    thread.join()
    return future.result()
