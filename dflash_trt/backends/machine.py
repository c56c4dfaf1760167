"""The devices of this machine that an engine's ranks may use."""

from dataclasses import dataclass

import torch

from dflash_trt.core.host_resources import available_memory_bytes

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs, or the host without one, which has no `capability`. `memory_bytes` is per device."""

    name: str
    memory_bytes: int
    num_devices: int
    capability: tuple[int, int] | None

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / _GIB:.1f} GiB"
        if self.capability is None:
            return f"{self.name}, {memory} of memory available"
        return f"{self.num_devices} x {self.name}, {memory} each"


def this_machine() -> Machine:
    """The GPUs that this process sees, all taken for the first; or the memory that it can allocate now."""
    if not torch.cuda.is_available():
        return Machine(name="no GPU", memory_bytes=available_memory_bytes(), num_devices=1, capability=None)
    first = torch.cuda.get_device_properties(0)
    return Machine(
        name=first.name,
        memory_bytes=first.total_memory,
        num_devices=torch.cuda.device_count(),
        capability=(first.major, first.minor),
    )
