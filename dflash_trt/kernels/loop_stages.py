"""How many blocks ahead a loop may load, where compilers are known to be wrong about it."""

from functools import cache
from typing import Final

import triton

_HAS_FENCES_SINCE: Final = (3, 9)
_TCGEN05: Final = range(100, 120)  # architectures whose tensor core reads shared memory through the asynchronous proxy


def fenced_stages(num_stages: int, architecture: int) -> int:
    """`num_stages`; 1 where Triton leaves a fence out: SM100 and SM103, before Triton 3.9.

    Of loops that load latents ahead it has no fence.proxy.async between cp.async and tcgen05.mma, which then may read
    what was there before (PTX ISA, "Async Proxy"; pytorch/pytorch#181248).
    """
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return 1 if architecture in _TCGEN05 and version < _HAS_FENCES_SINCE else num_stages


@cache
def active_architecture() -> int:
    """What kernels are compiled for in this process: 90 is SM90; 0 where they are interpreted."""
    if triton.knobs.runtime.interpret:
        return 0
    return int(triton.runtime.driver.active.get_current_target().arch)
