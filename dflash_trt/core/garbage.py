"""Python's cyclic garbage collector, out of the way of imports."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
