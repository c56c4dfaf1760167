"""Duration of a step: the time of each kernel, and the overheads that a floor omits.

    kernels     products, attention and exchanges: as NVIDIA measured them (`kernel_tables`), or else by costs that were
                fitted to those measurements (`kernel_fits`), or else by the rates of the machine:
      products    max(bytes / (bandwidth x product_memory_fraction), FLOPs / rate at this number of rows), per GEMM
      attention   K/V bytes x kv_s_per_byte + FLOPs x mixing_s_per_flop
      exchanges   bytes / link bandwidth + exchanges x exchange_latency_s
    operators   activation bytes, elements of logits, tokens, requests, calls of layers, passes of the drafter, the step
    host        planning and committing; with the chained loop hidden by the device, as far as it is shorter

`dflash-trt bench machine` measures the rates and overheads of a machine. For GPUs of the table the overheads are
assumed, and `assumptions_of` says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import numpy as np
from pydantic import Field

from dflash_trt.core.frozen import Frozen
from dflash_trt.plan.attention_work import MixingWork
from dflash_trt.plan.exchanges import Exchange
from dflash_trt.plan.gpus import PLAIN_BITS, Gpu
from dflash_trt.plan.kernel_fits import FittedKernels, Kernels, KernelTime, kernel_fits
from dflash_trt.plan.kernel_tables import EXTRA_HINT, KernelTables, kernel_tables, package
from dflash_trt.plan.step_work import Product, StepWork

Cost = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(gt=0.0, le=4.0)]


class StepCosts(Frozen):
    """Seconds in addition to the floor.

    `product_rates` has, by number of rows, the FLOPs per second of unquantized GEMMs whose weights need not come from
    memory; other widths are faster by the ratio of their peaks.
    """

    product_rates: Annotated[dict[int, Annotated[float, Field(gt=0.0)]], Field(min_length=1)]
    product_memory_fraction: Fraction  # share of the bandwidth that GEMMs of few rows reach
    kv_s_per_byte: Cost
    mixing_s_per_flop: Cost
    activation_s_per_byte: Cost
    logit_s: Cost  # an element
    token_s: Cost
    request_s: Cost
    layer_s: Cost  # a call of a layer
    pass_s: Cost  # per pass of the drafter
    step_s: Cost
    exchange_latency_s: Cost
    host_step_s: Cost
    host_request_s: Cost
    is_host_hidden: bool  # by a device with a queue


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step, part by part. `known_s` has those of the device, by where they come from."""

    products_s: float
    mixing_s: float
    operators_s: float
    exchange_s: float
    host_s: float
    is_host_hidden: bool
    known_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def device_s(self) -> float:
        return self.products_s + self.mixing_s + self.operators_s + self.exchange_s

    @property
    def total_s(self) -> float:
        return max(self.device_s, self.host_s) if self.is_host_hidden else self.device_s + self.host_s


class RatedKernels:
    """Times by the rates of a machine, in a step that moves `moved_bytes`."""

    def __init__(self, gpu: Gpu, costs: StepCosts, moved_bytes: float) -> None:
        self._gpu, self._costs = gpu, costs
        self._bandwidth = gpu.read_rate(moved_bytes) * costs.product_memory_fraction
        self.source = f"rates of {gpu.name}"

    def product(self, item: Product) -> KernelTime:
        gpu, (rows, rates) = self._gpu, zip(*sorted(self._costs.product_rates.items()), strict=True)
        plain = float(np.interp(np.log(max(item.rows, 1.0)), np.log(rows), rates))
        rate = plain * gpu.flops_of(gpu.operand_bits(item.format)) / gpu.flops_of(PLAIN_BITS)
        num_bytes = gpu.kept_bytes(item.num_bytes, item.elements, item.format)
        return KernelTime(max(num_bytes / self._bandwidth, item.flops / rate), self.source)

    def mixing(self, item: MixingWork) -> KernelTime:
        costs = self._costs
        return KernelTime(item.num_bytes * costs.kv_s_per_byte + item.flops * costs.mixing_s_per_flop, self.source)

    def exchange(self, item: Exchange, num_ranks: int) -> KernelTime:
        del num_ranks
        latency_s = item.count * self._costs.exchange_latency_s
        return KernelTime(item.num_bytes / self._gpu.link_rate + latency_s, self.source)


class StepClock:
    """Times of steps on a machine. `kernels` are asked in turn, then its rates."""

    def __init__(self, gpu: Gpu, costs: StepCosts, kernels: Sequence[Kernels] = ()) -> None:
        self.gpu, self.costs = gpu, costs
        self._kernels = tuple(kernels)

    @property
    def is_of_a_machine_file(self) -> bool:
        """Its rates were measured: no kernels are asked."""
        return not self._kernels

    @property
    def has_measured_kernels(self) -> bool:
        return any(isinstance(kernels, KernelTables) for kernels in self._kernels)

    def time(self, work: StepWork) -> StepTime:
        costs, gpu = self.costs, self.gpu
        kept = sum(gpu.kept_bytes(item.num_bytes, item.elements, item.format) for item in work.products)
        rated = RatedKernels(gpu, costs, kept + work.vector_bytes + work.kv_bytes)
        asked: tuple[Kernels, ...] = (*self._kernels, rated)
        products = [_first(kernels.product(item) for kernels in asked) for item in work.products]
        mixings = [_first(kernels.mixing(item) for kernels in asked) for item in work.mixings]
        exchanges = [_first(kernels.exchange(item, work.num_ranks) for kernels in asked) for item in work.exchanges]
        known_s: defaultdict[str, float] = defaultdict(float)
        for found in (*products, *mixings, *exchanges):
            known_s[found.source] += found.seconds
        others_s = operators_s(work, costs)
        known_s["operators, as on an H200" if self._kernels else rated.source] += others_s
        return StepTime(
            products_s=sum(found.seconds for found in products),
            mixing_s=sum(found.seconds for found in mixings),
            operators_s=others_s,
            exchange_s=sum(found.seconds for found in exchanges)
            + sum(item.count * item.host_s for item in work.exchanges),
            host_s=costs.host_step_s + work.num_requests * costs.host_request_s,
            is_host_hidden=costs.is_host_hidden,
            known_s=known_s,
        )


def _first(times: Iterator[KernelTime | None]) -> KernelTime:
    return next(found for found in times if found is not None)


OPERATORS: Final = {  # cost: what it multiplies
    "activation_s_per_byte": "activation_bytes",
    "logit_s": "num_logits",
    "token_s": "num_tokens",
    "request_s": "num_requests",
    "layer_s": "num_layers",
    "pass_s": "num_passes",
}


def operators_s(work: StepWork, costs: StepCosts) -> float:
    """Everything of a step that is neither a product nor attention."""
    total: float = costs.step_s + sum(getattr(costs, cost) * getattr(work, count) for cost, count in OPERATORS.items())
    return total


def assumed_costs(gpu: Gpu) -> StepCosts:
    """Costs of a GPU of the table besides its kernels: see `assumptions_of`."""
    assert gpu.bytes_per_s is not None
    fits, peak = kernel_fits(gpu.name), gpu.flops_of(PLAIN_BITS)
    products, attention = fits["products None"], fits["attention"]
    return StepCosts(
        product_rates={1: products.peak_fraction * peak},
        product_memory_fraction=products.memory_fraction,
        kv_s_per_byte=1 / (attention.memory_fraction * gpu.bytes_per_s),
        mixing_s_per_flop=1 / (attention.peak_fraction * peak),
        activation_s_per_byte=_ACTIVATION_TRIPS / gpu.bytes_per_s,
        logit_s=_LOGIT_BYTES / gpu.bytes_per_s,
        token_s=0.0,
        request_s=0.0,
        layer_s=_LAYER_S,
        pass_s=0.0,
        step_s=0.0,
        exchange_latency_s=fits["exchanges"].latency_s,
        host_step_s=_HOST_STEP_S,
        host_request_s=_HOST_REQUEST_S,
        is_host_hidden=True,
    )


def clock_of(gpu: Gpu, costs: StepCosts | None) -> StepClock:
    """The clock of a measured machine, whose costs are given, or of a GPU of the table."""
    if costs is not None:
        return StepClock(gpu, costs)
    measured = kernel_tables(gpu.name)
    return StepClock(gpu, assumed_costs(gpu), ([] if measured is None else [measured]) + [FittedKernels(gpu)])


# Fitted to 17 steps of this engine on an H200 (docs/benchmarks.md, "On an H200"); tests/plan/test_measured_steps.py
# holds each against it.
_LAYER_S: Final = 4.4e-6
_ACTIVATION_TRIPS: Final = 2.5  # times that the bytes between operators go to memory
_LOGIT_BYTES: Final = 6  # a logit is written once and read twice, in 16 bits
_HOST_STEP_S: Final = 55e-6  # docs/benchmarks.md, "Host time of a step": 0.058 ms at 1 request, 0.99 ms at 256
_HOST_REQUEST_S: Final = 3.7e-6


def assumptions_of(clock: StepClock) -> tuple[str, ...]:
    """What its times rest on."""
    gpu, measured = clock.gpu, clock.has_measured_kernels
    if clock.is_of_a_machine_file:
        return ("step times are from the machine file, one device a rank",)
    kernels = (
        f"as NVIDIA measured them ({package()})" if measured else f"by fits to NVIDIA's measurements. {EXTRA_HINT}"
    )
    return (
        f"GEMMs, experts, attention and exchanges on {gpu.name} take times {kernels}",
        f"operators between them take {1e6 * _LAYER_S:g} us a layer, move their bytes {_ACTIVATION_TRIPS:g} times and "
        f"{_LOGIT_BYTES} bytes a logit, at the whole bandwidth: fitted to steps of this engine on an H200",
        f"the host takes {1e6 * _HOST_STEP_S:g} us a step and {1e6 * _HOST_REQUEST_S:g} us a request, hidden by the "
        "device where that is longer",
    )
