"""Threads of a rank: the number that PyTorch computes with, and the one in which an executor is opened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from dflash_trt.core.host_resources import available_cores

_Result = TypeVar("_Result")


def default_num_threads(num_ranks: int = 1) -> int:
    """The available cores divided by the ranks, but at most PyTorch's own setting (OMP_NUM_THREADS)."""
    return max(1, min(torch.get_num_threads(), available_cores() // num_ranks))


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

    threading.Thread(target=run, name="dflash-opening", daemon=True).start()
    return future.result()
