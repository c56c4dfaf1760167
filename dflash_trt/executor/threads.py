"""Threads of a rank: how many PyTorch computes with, and the one in which an executor is opened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from dflash_trt.core.host_resources import available_cores

_Result = TypeVar("_Result")


def default_num_threads(num_ranks: int = 1) -> int:
    """An even share of the cores this process may use, but no more than PyTorch was set to (OMP_NUM_THREADS)."""
    return max(1, min(torch.get_num_threads(), available_cores() // num_ranks))


def run_in_thread(function: Callable[[], _Result]) -> _Result:
    """Call `function` in a thread that ends with it.

    OpenMP keeps a team of threads for every thread that ever computed something, and lets all teams sleep between two
    regions, instead of waiting awake, once they are more threads than cores: a small step then takes twice as long. So
    weights are prepared in a thread that ends and takes its team along; see docs/benchmarks.md. An interrupt of the
    caller waits neither here nor at the end of the program.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)

    threading.Thread(target=run, name="dflash-opening", daemon=True).start()
    return future.result()
