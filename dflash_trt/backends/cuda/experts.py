"""Experts on a GPU: packed weights, four launches after the router's GEMM, no host synchronization."""

from dataclasses import dataclass, replace

from torch import Tensor

from dflash_trt.backends.cuda.packed import expert_matrices, router_kind
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.kernels.experts_launch import PackedExperts, run_experts, widens_weights
from dflash_trt.kernels.packed_matrix import PackedMatrix
from dflash_trt.kernels.routing_launch import Router, new_ticket, route
from dflash_trt.network.ops import Experts, StackedExperts


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceExperts(Experts[Tensor]):
    """Experts of one rank."""

    gate_up: PackedMatrix  # [E, 2F, H]
    down: PackedMatrix  # [E, H, F]
    ticket: Tensor  # int32 [1]
    has_fixed_tiles: bool = False


def prepare_device_experts(experts: StackedExperts[Tensor], *, has_fixed_tiles: bool = False) -> DeviceExperts:
    """The experts of a layer as `run_device_experts` wants them; once, at load.

    With fixed tiles the bits of a row depend on the row alone.
    """
    gate_up, down = expert_matrices(experts)
    return DeviceExperts(
        router=experts.router,
        num_experts=experts.num_experts,
        first_expert=experts.first_expert,
        choice_bias=experts.choice_bias,
        gate_up=gate_up,
        down=down,
        ticket=new_ticket(down.codes.device),
        has_fixed_tiles=has_fixed_tiles,
    )


def run_device_experts(x: Tensor, logits: Tensor, experts: DeviceExperts, moe: Moe) -> Tensor:
    """x [N, H] and the router's logits [N, moe.num_experts] -> [N, H]; experts of other ranks add nothing."""
    num_here = None if experts.num_experts == moe.num_experts else experts.num_experts
    router = replace(_router(experts, moe), first_expert=experts.first_expert, num_here=num_here)
    packed = PackedExperts(
        gate_up=experts.gate_up,
        down=experts.down,
        activation=moe.activation,
        limit=moe.limit or 0.0,
        alpha=moe.alpha or 0.0,
        scales_inputs=moe.scales_inputs,
    )
    routing = route(
        logits,
        router,
        experts.ticket,
        has_fixed_tiles=experts.has_fixed_tiles,
        widens_weights=widens_weights(packed, logits.dtype),
    )
    return run_experts(x.contiguous(), packed, routing)


def chosen_of_all(logits: Tensor, experts: DeviceExperts, moe: Moe) -> Tensor:
    """The experts of all ranks that rows with these logits go through, int32 [N, chosen]."""
    return route(logits, _router(experts, moe), experts.ticket).expert_ids


def _router(experts: DeviceExperts, moe: Moe) -> Router:
    """The choice among the experts of all ranks."""
    return Router(
        kind=router_kind(moe),
        num_chosen=moe.num_experts_per_token,
        normalizes=moe.normalizes_top_k,
        factor=moe.routing_scale,
        choice_bias=experts.choice_bias,
        num_groups=moe.num_groups,
        num_chosen_groups=moe.num_chosen_groups,
    )
