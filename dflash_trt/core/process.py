"""This process: whether a forked child uses an object, garbage collection out of the way of imports, sleeping threads.

A forked child has a copy of an object but none of its threads. OpenMP threads by default spin for a while, on a core
that another process could use: two threads and one busy process on two cores then wait for each other's time slices. An
OpenMP runtime reads its settings when PyTorch loads it.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_trt.core.errors import ForkError


class OwnProcess:
    """The process that created an object. No other process may take its locks: they may be held forever."""

    def __init__(self) -> None:
        self.process_id = os.getpid()

    @property
    def is_this(self) -> bool:
        return os.getpid() == self.process_id

    def check(self) -> None:
        """Raises ForkError in a forked child."""
        if not self.is_this:
            found = f"its forked child {os.getpid()}"
            hint = 'Open the engine in the child, or start it with multiprocessing\'s "spawn".'
            raise ForkError.about("engine", expected=f"process {self.process_id}", found=found, hint=hint)


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the collector for a block that creates objects which stay, such as an import of PyTorch.

    It would look at each of them several times and free none: a sixth of the time in which an engine opens.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Each of them says how threads wait; GNU's runtime reads the first two, LLVM's and Intel's the first and the last.
_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def is_waiting_chosen() -> bool:
    """True if the user, or `let_threads_sleep`, has chosen how threads wait."""
    return any(name in os.environ for name in _SETTINGS)


def let_threads_sleep() -> None:
    """Set passive waiting for this process and its children, unless PyTorch is imported already."""
    if "torch" not in sys.modules and not is_waiting_chosen():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
