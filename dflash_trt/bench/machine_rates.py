"""Peak rates of this machine: copies by working set, and matrix products by rows and operands."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from dflash_trt.backends.torch.linear import apply_linear, pack_for_cpu
from dflash_trt.backends.torch.native.library import CpuKernels, NoKernels, cpu_kernels
from dflash_trt.backends.torch.quantized_linear import apply_quantized, prepare_linear
from dflash_trt.formats.int8 import Int8, Int8Weight
from dflash_trt.network.ops import Linear

_NUM_TIMES: Final = 5
_MIB: Final = 1 << 20
_CPU_SETS: Final = tuple(size * _MIB for size in (2, 8, 16, 24, 32, 64, 256))
_GPU_SETS: Final = (2048 * _MIB,)  # beyond any cache: no GPU keeps a model in one
_ROWS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256)
_FIRST_FP8: Final = (8, 9)


def seconds_of(run: Callable[[], object], device: torch.device, *, num_times: int = _NUM_TIMES) -> float:
    """Median of some calls after one to warm up: CPU time of this thread, or time on the device.

    On a CPU, other processes and threads do not count, whatever they do to caches and clocks.
    """
    run()
    times = []
    for _ in range(num_times):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        else:
            started_s = clock_of_cpu()
            run()
            times.append(clock_of_cpu() - started_s)
    return float(statistics.median(times))


def clock_of_cpu() -> float:
    """Seconds. With one thread, those that it computed; several share the work, so that the wall's count."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def copy_rates(device: torch.device) -> dict[int, float]:
    """Bytes read and written per second, by the bytes of source and target together."""
    rates = {}
    for working_set in _GPU_SETS if device.type == "cuda" else _CPU_SETS:
        source = torch.ones(working_set // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        times = max(1, 64 * _MIB // working_set)

        def copy(source: Tensor = source, target: Tensor = target, times: int = times) -> None:
            for _ in range(times):
                target.copy_(source)

        rates[working_set] = times * working_set / seconds_of(copy, device)
    return rates


class MatrixRates:
    """Rates of the linear layers that an engine runs here, in the layout that it gives them."""

    def __init__(self, device: torch.device, *, is_int8: bool = False) -> None:
        """Layers as a decoder has them, enough to be beyond a GPU's cache and within the last one of a CPU."""
        self.device, self._is_int8 = device, is_int8
        hidden = 512 if device.type == "cpu" else 4096
        self._shapes = [
            (hidden * 3 // 2, hidden),
            (hidden, hidden),
            (5 * hidden, hidden),
            (hidden, 5 * hidden // 2),
        ] * 4
        self.num_elements = sum(out * inner for out, inner in self._shapes)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._linears = [self._linear(out, inner, dtype) for out, inner in self._shapes]
        self._dtype = dtype

    def by_rows(self) -> dict[int, float]:
        """FLOPs per second. Never less for more rows: another shape would be chosen."""
        rates = {rows: self.flops_per_s(rows) for rows in _ROWS}
        return {rows: max(rate for smaller, rate in rates.items() if smaller <= rows) for rows in rates}

    def flops_per_s(self, rows: int) -> float:
        """FLOPs per second of all layers on `rows` rows."""
        inputs = [torch.randn(rows, inner, dtype=self._dtype, device=self.device) for _, inner in self._shapes]

        @torch.inference_mode()
        def run() -> None:
            for x, linear in zip(inputs, self._linears, strict=True):
                apply_quantized(x, linear) if isinstance(linear.weight, Int8Weight) else apply_linear(x, linear)

        return 2 * rows * self.num_elements / seconds_of(run, self.device)

    def peaks(self) -> dict[int, float]:
        """Peak rate by bits of the operands: of a CPU's float32 and INT8, of a GPU's bfloat16, and FP8 if it can."""
        if self.device.type == "cpu":
            integers = MatrixRates(self.device, is_int8=True)
            return {bits: max(rates.by_rows().values()) for bits, rates in ((32, self), (8, integers))}
        size = 8192
        a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        peaks = {16: 2.0 * size**3 / seconds_of(lambda: a @ b, self.device)}
        if torch.cuda.get_device_capability(self.device) >= _FIRST_FP8:
            x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
            one = torch.ones(1, device=self.device)
            took_s = seconds_of(
                lambda: torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), self.device
            )
            peaks[8] = 2.0 * size**3 / took_s
        return peaks

    def _linear(self, out: int, inner: int, dtype: torch.dtype) -> Linear[Tensor]:
        weight = torch.randn(out, inner, device=self.device).bfloat16().to(dtype)  # as from a checkpoint in bfloat16
        linear = Linear(weight=weight, bias=None, name="probe")
        if self._is_int8:
            codes = Int8().quantize_matrix(weight, segments=(out,), weight_amax=weight, input_amax=None)
            return prepare_linear(replace(linear, weight=codes), dtype, kernels=cpu_library())
        return pack_for_cpu(linear, cpu_library()) if self.device.type == "cpu" else linear


def cpu_library() -> CpuKernels | None:
    """The CPU kernels of this machine, where it has them."""
    kernels = cpu_kernels()
    return None if isinstance(kernels, NoKernels) else kernels
