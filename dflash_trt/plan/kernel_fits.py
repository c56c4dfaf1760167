"""Times of kernels by GPU, fitted to what NVIDIA measured: for plans without the extra `silicon`.

`scripts/kernel_fits.py` writes kernel_fits.json from the tables of `kernel_tables`.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dflash_trt.plan.attention_work import MixingWork
from dflash_trt.plan.exchanges import Exchange
from dflash_trt.plan.gpus import PLAIN_BITS, Gpu
from dflash_trt.plan.step_work import Product


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Seconds, and where they come from: an engine with its version, whose kernels were measured, or a fit."""

    seconds: float
    source: str


class Kernels(Protocol):
    """Times of kernels on one GPU; None where they are not known."""

    def product(self, item: Product) -> KernelTime | None: ...

    def mixing(self, item: MixingWork) -> KernelTime | None: ...

    def exchange(self, item: Exchange, num_ranks: int) -> KernelTime | None: ...


class KernelFit(NamedTuple):
    """A call takes latency_s + max(bytes / (bandwidth x memory_fraction), FLOPs / (peak x peak_fraction)).

    Of `num_points` measured times, half are within a factor of `median_ratio`.
    """

    latency_s: float
    memory_fraction: float
    peak_fraction: float
    median_ratio: float
    num_points: int


@cache
def kernel_fits(gpu: str) -> dict[str, KernelFit]:
    """By kind: "attention", "exchanges", "products FORMAT" and "experts FORMAT"; those of `like` without tables."""
    return {kind: KernelFit(**fields) for kind, fields in _stored()[like(gpu)].items()}


def like(gpu: str) -> str:
    """The GPU whose fits stand for another's: its own, or an H200's."""
    return gpu if gpu in _stored() else "h200"


@cache
def _stored() -> dict[str, dict[str, dict[str, Any]]]:
    fields: dict[str, dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return fields


class FittedKernels:
    """Kernels of a GPU by its fits. A format without one takes the fit of unquantized weights."""

    def __init__(self, gpu: Gpu) -> None:
        assert gpu.bytes_per_s is not None
        self._gpu, self._fits, self._bandwidth = gpu, kernel_fits(gpu.name), gpu.bytes_per_s
        self._source = f"fits to measured kernels of {like(gpu.name)}"

    def product(self, item: Product) -> KernelTime:
        kind = "products" if item.experts is None else "experts"
        fit = self._fits.get(f"{kind} {item.format}") or self._fits[f"{kind} None"]
        peak = self._gpu.flops_of(self._gpu.operand_bits(item.format))
        return self._time(fit, item.count, item.num_bytes, item.flops, peak)

    def mixing(self, item: MixingWork) -> KernelTime:
        times = item.times if item.mixer is not None else 0  # rows of features: bytes, and no kernel of their own
        peak = self._gpu.flops_of(PLAIN_BITS)
        return self._time(self._fits["attention"], times, item.num_bytes, item.flops, peak)

    def exchange(self, item: Exchange, num_ranks: int) -> KernelTime:
        del num_ranks
        fit = self._fits["exchanges"]
        seconds = item.count * fit.latency_s + item.num_bytes / (self._gpu.link_rate * fit.memory_fraction)
        return KernelTime(seconds, self._source)

    def _time(self, fit: KernelFit, count: float, num_bytes: float, flops: float, peak: float) -> KernelTime:
        longer_s = max(num_bytes / (self._bandwidth * fit.memory_fraction), flops / (peak * fit.peak_fraction))
        return KernelTime(count * fit.latency_s + longer_s, self._source)
