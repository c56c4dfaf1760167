"""A kernel that is timed alone: its time, its floor, and what else does the same work."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from gpu_visit_parts.results import Row
from gpu_visit_parts.setting import Case, LeftOutError
from gpu_visit_parts.timing import device_us, machine_roofs, num_copies

Call = Callable[[], object]


@dataclass(kw_only=True)
class Kernel:
    """`make` gives one call on data of its own; `torch_kernels` the same work by PyTorch, by name, where it can."""

    kernel: str
    shape: str
    num_bytes: float
    make: Callable[[], Call]
    flops: float = 0.0
    is_fp8: bool = False
    torch_kernels: dict[str, Callable[[], Call]] = field(default_factory=dict)


def cases_of(kernels: Iterable[Kernel]) -> Iterator[Case]:
    for kernel in kernels:
        yield Case(name=f"{kernel.kernel}, {kernel.shape}", run=partial(_tables, kernel))


def _tables(kernel: Kernel) -> dict[str, list[Row]]:
    if kernel.is_fp8 and not machine_roofs().fp8_flops_per_s:
        raise LeftOutError("this GPU has no FP8 product")
    return {"kernels": [measured(kernel)]}


def measured(kernel: Kernel) -> Row:
    """Our own number first: whatever the comparison does, it stays."""
    copies = num_copies(kernel.num_bytes)
    took_us = device_us([kernel.make() for _ in range(copies)])
    floor_us = machine_roofs().floor_us(num_bytes=kernel.num_bytes, flops=kernel.flops, is_fp8=kernel.is_fp8)
    row: Row = {
        "kernel": kernel.kernel,
        "shape": kernel.shape,
        "time_us": took_us,
        "floor_us": floor_us,
        "floor_fraction": floor_us / took_us,
        "gb_per_s": kernel.num_bytes / took_us / 1e3,
        "tflop_per_s": kernel.flops / took_us / 1e6,
    }
    for name, make in kernel.torch_kernels.items():
        try:
            row[f"{name}_us"] = device_us([make() for _ in range(copies)])
        except Exception as error:  # noqa: BLE001 - PyTorch has no such kernel here, or it broke: not our number
            row[f"{name}_us"] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return row
