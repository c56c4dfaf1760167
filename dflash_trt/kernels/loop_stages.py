"""How many blocks ahead a loop may load, where compilers are known to be wrong about it."""

from functools import cache
from typing import Final

import triton

_HAS_FENCES_SINCE: Final = (3, 9)
_TCGEN05: Final = range(100, 120)  # architectures whose tensor core reads shared memory through the asynchronous proxy


def fenced_stages(num_stages: int, architecture: int) -> int:
    """`num_stages`, but 1 where Triton omits a fence: SM100 and SM103, before Triton 3.9.

    In loops that load latents ahead there is no fence.proxy.async between cp.async and tcgen05.mma, which then may read
    stale data (PTX ISA, "Async Proxy"; pytorch/pytorch#181248).
    """
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return 1 if architecture in _TCGEN05 and version < _HAS_FENCES_SINCE else num_stages


@cache
def active_architecture() -> int:
    """The architecture that this process compiles kernels for: 90 is SM90; 0 if they are interpreted."""
    if triton.knobs.runtime.interpret:
        return 0
    return int(triton.runtime.driver.active.get_current_target().arch)
