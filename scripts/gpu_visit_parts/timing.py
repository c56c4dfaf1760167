"""Times on the device, and what the machine itself can do: the roofs every measurement is held against."""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from gpu_visit_parts.setting import SETTING

NUM_REPLAYS = 12


@dataclass(frozen=True, kw_only=True)
class Roofs:
    """Measured, not looked up. Copies count bytes read and written; 0: this GPU or PyTorch cannot.

    An operator copies: in a graph cudaMemcpy reached two thirds of what kernels do on an H200.
    """

    copy_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float

    def floor_us(self, *, num_bytes: float, flops: float = 0.0, is_fp8: bool = False) -> float:
        """The larger of moving the bytes at copy speed and doing the sums at matrix-product speed."""
        rate = self.fp8_flops_per_s if is_fp8 and self.fp8_flops_per_s else self.bf16_flops_per_s
        return 1e6 * max(num_bytes / self.copy_bytes_per_s, flops / rate)


def device_us(calls: Sequence[Callable[[], object]], *, num_replays: int = NUM_REPLAYS) -> float:
    """Median device time of one call. The calls do the same work on data of their own, so that no cache serves two.

    All of them are captured in one CUDA graph: launch overhead of the host is not in it. A dry run calls them once.
    """
    if SETTING.device.type != "cuda":
        return _host_us(calls)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()  # compile, allocate
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        for _ in range(2):
            graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        stream.synchronize()
    times = [1e3 * start.elapsed_time(stop) for start, stop in itertools.pairwise(events)]
    return statistics.median(times) / len(calls)


def elapsed_ms(run: Callable[[], object], stream: AbstractContextManager[object]) -> float:
    """Of what `run` puts on the stream, between two events there; median of three."""
    if SETTING.device.type != "cuda":
        return _host_us([run]) / 1e3
    times = []
    with stream:
        for _ in range(3):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


def _host_us(calls: Sequence[Callable[[], object]]) -> float:
    started_s = time.perf_counter()
    for call in calls:
        call()
    return 1e6 * (time.perf_counter() - started_s) / len(calls)


def num_copies(num_bytes: float) -> int:
    """How many sets of data of this size pass a cache of 256 MiB, within reason."""
    if SETTING.is_dry_run:
        return 1
    return max(2, min(16, int(2**28 // max(num_bytes, 1)) + 1))


@functools.cache
def machine_roofs() -> Roofs:
    num_bytes, size = (1 << 12, 32) if SETTING.is_dry_run else (1 << 30, 8192)
    return Roofs(
        copy_bytes_per_s=_copy_rate(num_bytes), bf16_flops_per_s=_bf16_rate(size), fp8_flops_per_s=_fp8_rate(size)
    )


def _copy_rate(num_bytes: int) -> float:
    source = torch.randn(num_bytes // 4, device=SETTING.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / (device_us([lambda: torch.neg(source, out=target)]) * 1e-6)


def _bf16_rate(size: int) -> float:
    a, b = (torch.randn(size, size, device=SETTING.device, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * size**3 / (device_us([lambda: a @ b]) * 1e-6)


def _fp8_rate(size: int) -> float:
    if SETTING.device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        return 0.0
    a, b = (torch.randn(size, size, device=SETTING.device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(1, device=SETTING.device)
    took_us = device_us([lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)])
    return 2.0 * size**3 / (took_us * 1e-6)
