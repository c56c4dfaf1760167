"""Roofline lower bound of a step: bytes over bandwidth, FLOPs over peak, and exchanges over links.

No kernel is faster, and none reaches it. Activations are not counted: they fit into the caches.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.engine_dir import PretrainedConfig
from dflash_trt.plan.computed_rows import ComputedRows
from dflash_trt.plan.gpus import PLAIN_BITS, Gpu
from dflash_trt.plan.step_work import EngineWork, StepWork
from dflash_trt.plan.step_work import chosen_fraction as chosen_fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Decoding requests, each one's tokens before the step, and the drafts it verifies and gets anew."""

    num_requests: int
    context_len: int
    num_draft_tokens: int

    @property
    def rows(self) -> ComputedRows:
        return ComputedRows.decode(
            num_requests=self.num_requests, context_len=self.context_len, num_draft_tokens=self.num_draft_tokens
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFloor:
    """Lower bounds of a step, per rank."""

    weights_bytes: int
    kv_bytes: int
    exchange_bytes: int
    flops: float
    memory_s: float
    compute_s: float
    exchange_s: float

    @property
    def total_s(self) -> float:
        return max(self.memory_s, self.compute_s) + self.exchange_s


def step_floor(config: PretrainedConfig, gpu: Gpu, step: Step, *, has_drafter: bool) -> StepFloor:
    """The floor of a decode step on a GPU whose bandwidth is known; see `floor_of` for more than one step."""
    return floor_of(EngineWork(config, has_drafter=has_drafter).of(step.rows), gpu)


def floor_of(work: StepWork, gpu: Gpu) -> StepFloor:
    """The floor of this work.

    A machine that keeps weights in its caches reads them at cache speed; unmeasured links cost nothing.
    """
    weights_bytes = work.vector_bytes + sum(
        gpu.kept_bytes(product.num_bytes, product.elements, product.format) for product in work.products
    )
    moved_bytes = weights_bytes + work.kv_bytes
    compute_s = sum(product.flops / gpu.flops_of(gpu.operand_bits(product.format)) for product in work.products)
    return StepFloor(
        weights_bytes=round(weights_bytes),
        kv_bytes=round(work.kv_bytes),
        exchange_bytes=round(work.exchange_bytes),
        flops=work.mixing_flops + sum(product.flops for product in work.products),
        memory_s=moved_bytes / gpu.read_rate(moved_bytes),
        compute_s=compute_s + work.mixing_flops / gpu.flops_of(PLAIN_BITS),
        exchange_s=work.exchange_bytes / gpu.link_bytes_per_s if gpu.link_bytes_per_s else 0.0,
    )
