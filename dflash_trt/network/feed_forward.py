"""Feed-forward kinds: a dense gated MLP, a mixture of experts."""

from dataclasses import dataclass
from typing import Generic

from dflash_trt.core.model.feed_forward import OWN_NORMS, Dense, Moe
from dflash_trt.network.ops import Experts, Linear, Ops, StackedExperts, T
from dflash_trt.network.rank_tensors import RankTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp(Generic[T]):
    """gate_up is [gate; up] rows."""

    gate_up: Linear[T]
    down: Linear[T]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExperts(Generic[T]):
    """Experts, and an MLP for every token beside them."""

    experts: Experts[T]
    shared: Mlp[T]
    gate: Linear[T] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NormedExperts(Generic[T]):
    """Experts and an MLP for every token, see `Moe.has_own_norms`."""

    experts: Experts[T]
    shared: Mlp[T]
    router_norm: T
    experts_norm: T
    experts_post_norm: T
    shared_post_norm: T


FeedForward = Mlp[T] | Experts[T] | SharedExperts[T] | NormedExperts[T]


def bind_feed_forward(spec: Dense | Moe, tensors: RankTensors[T], prefix: str) -> FeedForward[T]:
    if isinstance(spec, Dense):
        return _bind_mlp(tensors, prefix)
    experts = _bind_experts(spec, tensors, prefix)
    if spec.shared_size is None:
        return experts
    if spec.has_own_norms:
        norms = {norm: tensors[f"{prefix}.{norm}"] for norm in OWN_NORMS}
        return NormedExperts(experts=experts, shared=_bind_mlp(tensors, f"{prefix}.shared"), **norms)
    gate = tensors.linear(f"{prefix}.shared_gate") if spec.has_shared_gate else None
    return SharedExperts(experts=experts, shared=_bind_mlp(tensors, f"{prefix}.shared"), gate=gate)


def _bind_mlp(tensors: RankTensors[T], prefix: str) -> Mlp[T]:
    return Mlp(gate_up=tensors.linear(f"{prefix}.gate_up"), down=tensors.summed_linear(f"{prefix}.down"))


def _bind_experts(spec: Moe, tensors: RankTensors[T], prefix: str) -> Experts[T]:
    mapping = tensors.mapping
    num_experts = spec.num_experts // mapping.ep_size
    return StackedExperts(
        router=tensors.linear(f"{prefix}.router"),
        gate_up=tensors.linear(f"{prefix}.experts.gate_up"),
        down=tensors.summed_linear(f"{prefix}.experts.down", rank=mapping.moe_tp_rank),
        num_experts=num_experts,
        first_expert=num_experts * mapping.ep_rank,
        choice_bias=tensors.find(f"{prefix}.router_choice_bias"),
        expert_scales=tensors.find(f"{prefix}.expert_scales"),
    )


def run_feed_forward(
    ops: Ops[T],
    spec: Dense | Moe,
    weights: FeedForward[T],
    hidden: T,  # [N, H]
    norm: T,
    eps: float,
) -> T:  # [N, H], summed over the ranks
    x = ops.rms_norm(hidden, norm, eps)
    if isinstance(weights, NormedExperts):
        assert isinstance(spec, Moe)
        return _run_normed_experts(ops, spec, weights, hidden, x, eps)
    return ops.all_reduce(_run_part(ops, spec, weights, x))


def _run_normed_experts(
    ops: Ops[T], spec: Moe, weights: NormedExperts[T], hidden: T, x: T, eps: float
) -> T:  # [N, H], summed over the ranks
    shared = ops.all_reduce(run_mlp(ops, weights.shared, x, spec.activation))
    routed = ops.scale(ops.rms_norm(hidden, weights.router_norm, eps), spec.router_input_scale)
    chosen = ops.all_reduce(ops.moe(ops.rms_norm(hidden, weights.experts_norm, eps), weights.experts, spec, routed))
    normed = ops.rms_norm(shared, weights.shared_post_norm, eps)
    return ops.add(normed, ops.rms_norm(chosen, weights.experts_post_norm, eps))


def _run_part(
    ops: Ops[T],
    spec: Dense | Moe,
    weights: Mlp[T] | Experts[T] | SharedExperts[T],
    x: T,  # [N, H], normed
) -> T:  # [N, H], of one rank: to be summed
    if isinstance(weights, SharedExperts):
        assert isinstance(spec, Moe)
        shared = run_mlp(ops, weights.shared, x)
        if weights.gate is not None:
            shared = ops.sigmoid_mul(shared, ops.linear(x, weights.gate))
        return ops.add(ops.moe(x, weights.experts, spec), shared)
    if isinstance(weights, Experts):
        assert isinstance(spec, Moe)
        return ops.moe(x, weights, spec)
    assert isinstance(spec, Dense)
    return run_mlp(ops, weights, x, spec.activation)


def run_mlp(ops: Ops[T], weights: Mlp[T], x: T, activation: str = "silu") -> T:
    activate = ops.gelu_mul if activation == "gelu_tanh" else ops.silu_mul
    return ops.linear(activate(ops.linear(x, weights.gate_up)), weights.down)
