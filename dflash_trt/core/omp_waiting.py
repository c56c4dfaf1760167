"""Passive waiting for OpenMP threads: they sleep until their next region.

By default they spin for a while, on a core that another process could use: two threads and one busy process on two
cores then wait for each other's time slices. An OpenMP runtime reads its settings when PyTorch loads it.
"""

import os
import sys

# Each of them says how threads wait; GNU's runtime reads the first two, LLVM's and Intel's the first and the last.
_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def is_waiting_chosen() -> bool:
    """True if the user, or `let_threads_sleep`, has chosen how threads wait."""
    return any(name in os.environ for name in _SETTINGS)


def let_threads_sleep() -> None:
    """Set passive waiting for this process and its children, unless PyTorch is imported already."""
    if "torch" not in sys.modules and not is_waiting_chosen():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
