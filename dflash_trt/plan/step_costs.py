"""How long a step takes: the terms of its floor at the rates that a machine reaches, and what a floor leaves out.

    products    max(bytes / (bandwidth x product_memory_fraction), FLOPs / rate at so many rows), GEMM by GEMM
    attention   K/V bytes x kv_s_per_byte + FLOPs x mixing_s_per_flop
    operators   activation bytes, elements of logits, tokens, requests, calls of layers, passes of the drafter, the step
    exchanges   bytes / link bandwidth + exchanges x exchange_latency_s
    host        planning and committing; hidden behind the device where the loop is chained, as far as it is shorter

`dflash-trt bench machine` measures them; for GPUs of the table they are assumed, and `ASSUMPTIONS` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
from pydantic import Field

from dflash_trt.core.frozen import Frozen
from dflash_trt.plan.gpus import PLAIN_BITS, Gpu
from dflash_trt.plan.step_work import Product, StepWork

Cost = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(gt=0.0, le=4.0)]


class StepCosts(Frozen):
    """Seconds beside the floor. `product_rates` has for numbers of rows the FLOPs per second of unquantized GEMMs whose
    weights need not come from memory; other widths are as much faster as their peaks are.
    """

    product_rates: Annotated[dict[int, Annotated[float, Field(gt=0.0)]], Field(min_length=1)]
    product_memory_fraction: Fraction  # of the bandwidth, that GEMMs of few rows reach
    kv_s_per_byte: Cost
    mixing_s_per_flop: Cost
    activation_s_per_byte: Cost
    logit_s: Cost  # an element
    token_s: Cost
    request_s: Cost
    layer_s: Cost  # a call of a layer
    pass_s: Cost  # of the drafter
    step_s: Cost
    exchange_latency_s: Cost
    host_step_s: Cost
    host_request_s: Cost
    is_host_hidden: bool  # behind a device with a queue


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step, part by part."""

    products_s: float
    mixing_s: float
    operators_s: float
    exchange_s: float
    host_s: float
    is_host_hidden: bool

    @property
    def device_s(self) -> float:
        return self.products_s + self.mixing_s + self.operators_s + self.exchange_s

    @property
    def total_s(self) -> float:
        return max(self.device_s, self.host_s) if self.is_host_hidden else self.device_s + self.host_s


class StepClock:
    """Times of steps on a machine: the arithmetic of the table above."""

    def __init__(self, gpu: Gpu, costs: StepCosts) -> None:
        self._gpu, self._costs = gpu, costs
        self._plain_peak = gpu.flops_of(PLAIN_BITS)
        known = sorted(costs.product_rates.items())
        self._rows = np.log([rows for rows, _ in known])
        self._rates = np.array([rate for _, rate in known])

    def time(self, work: StepWork) -> StepTime:
        costs, gpu = self._costs, self._gpu
        kept = [gpu.kept_bytes(item.num_bytes, item.elements, item.format) for item in work.products]
        moved = sum(kept) + work.vector_bytes + work.kv_bytes
        bandwidth = gpu.read_rate(moved) * costs.product_memory_fraction
        products = zip(work.products, kept, strict=True)
        return StepTime(
            products_s=sum(max(n / bandwidth, item.flops / self._rate(item)) for item, n in products),
            mixing_s=work.kv_bytes * costs.kv_s_per_byte + work.mixing_flops * costs.mixing_s_per_flop,
            operators_s=operators_s(work, costs),
            exchange_s=(work.exchange_bytes / gpu.link_rate if work.exchange_bytes else 0.0)
            + work.num_exchanges * costs.exchange_latency_s,
            host_s=costs.host_step_s + work.num_requests * costs.host_request_s,
            is_host_hidden=costs.is_host_hidden,
        )

    def _rate(self, item: Product) -> float:
        plain = float(np.interp(np.log(max(item.rows, 1.0)), self._rows, self._rates))
        return plain * self._gpu.flops_of(self._gpu.operand_bits(item.format)) / self._plain_peak


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
    """Of a GPU of the table, whose bandwidth is known: `ASSUMPTIONS`."""
    assert gpu.bytes_per_s is not None
    return StepCosts(
        product_rates={1: _COMPUTE * gpu.flops_of(PLAIN_BITS)},
        product_memory_fraction=_MEMORY,
        kv_s_per_byte=1 / (_MEMORY * gpu.bytes_per_s),
        mixing_s_per_flop=1 / (_MIXING * gpu.flops_of(PLAIN_BITS)),
        activation_s_per_byte=0.0,
        logit_s=_LOGIT_BYTES / gpu.bytes_per_s,
        token_s=0.0,
        request_s=0.0,
        layer_s=_LAYER_KERNELS * _KERNEL_S,
        pass_s=_PASS_KERNELS * _KERNEL_S,
        step_s=_STEP_KERNELS * _KERNEL_S,
        exchange_latency_s=_EXCHANGE_S,
        host_step_s=_HOST_STEP_S,
        host_request_s=_HOST_REQUEST_S,
        is_host_hidden=True,
    )


_MEMORY: Final = 0.8
_COMPUTE: Final = 0.6
_MIXING: Final = 0.4
_KERNEL_S: Final = 2.5e-6
_LAYER_KERNELS: Final = 11  # `tests/kernels/test_step_counts.py` and the counts of docs/benchmarks.md
_PASS_KERNELS: Final = 6
_STEP_KERNELS: Final = 16
_EXCHANGE_S: Final = 6e-6
_LOGIT_BYTES: Final = 6  # a logit is written once and read twice, in 16 bits
_HOST_STEP_S: Final = 55e-6  # docs/benchmarks.md, "The host beside a device": 0.058 ms at 1 request, 0.99 ms at 256
_HOST_REQUEST_S: Final = 3.7e-6

ASSUMPTIONS: Final = (
    f"GEMMs and attention reach {_MEMORY:.0%} of the datasheet's bandwidth, GEMMs {_COMPUTE:.0%} and attention "
    f"{_MIXING:.0%} of its peak",
    f"a kernel of a CUDA graph takes {1e6 * _KERNEL_S:g} us beside its bytes and FLOPs: {_LAYER_KERNELS} a layer, "
    f"{_PASS_KERNELS} a pass of the drafter, {_STEP_KERNELS} a step",
    f"an exchange between ranks takes {1e6 * _EXCHANGE_S:g} us beside its bytes; nothing overlaps with it",
    f"the host takes {1e6 * _HOST_STEP_S:g} us a step and {1e6 * _HOST_REQUEST_S:g} us a request, hidden behind the "
    "device where that is longer",
)
