"""Feed-forward kinds: a dense gated MLP, a mixture of experts."""

from dataclasses import dataclass
from typing import Generic

from dflash_trt.core.model.feed_forward import OWN_NORMS, Dense, Moe
from dflash_trt.network.ops import ExchangedRows, Experts, Linear, Ops, StackedExperts, T
from dflash_trt.network.rank_tensors import RankTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp(Generic[T]):
    """gate_up is [gate; up] rows."""

    activation: str  # see `Dense`
    gate_up: Linear[T]
    down: Linear[T]

    def run(self, ops: Ops[T], hidden: T, norm: T, eps: float, exchanged: ExchangedRows) -> T:
        """[N, H], which `norm` norms -> [N, H], summed over the ranks."""
        return self.summed(ops, ops.rms_norm(hidden, norm, eps), exchanged)

    def summed(self, ops: Ops[T], x: T, exchanged: ExchangedRows) -> T:
        """Normed [N, H] -> [N, H]."""
        part = self.part(ops, ops.all_gather_rows(x, exchanged))
        return ops.all_reduce(ops.reduce_scatter_rows(part, exchanged))

    def part(self, ops: Ops[T], x: T) -> T:
        """Normed [N, H] -> [N, H] of one rank: to be summed."""
        activate = ops.gelu_mul if self.activation == "gelu_tanh" else ops.silu_mul
        return ops.linear(activate(ops.linear(x, self.gate_up)), self.down)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedExperts(Generic[T]):
    """Experts, and an MLP that every token goes through in addition, if the model has one."""

    spec: Moe
    experts: Experts[T]
    shared: Mlp[T] | None
    shared_gate: Linear[T] | None

    def run(self, ops: Ops[T], hidden: T, norm: T, eps: float, exchanged: ExchangedRows) -> T:
        x = ops.rms_norm(hidden, norm, eps)
        if self.shared is None:
            return ops.all_reduce(ops.exchanged_moe(x, self.experts, self.spec, exchanged))
        part = self._part(ops, self.shared, ops.all_gather_rows(x, exchanged))
        return ops.all_reduce(ops.reduce_scatter_rows(part, exchanged))

    def _part(self, ops: Ops[T], shared: Mlp[T], x: T) -> T:
        """See `Mlp.part`."""
        part = shared.part(ops, x)
        if self.shared_gate is not None:
            part = ops.sigmoid_mul(part, ops.linear(x, self.shared_gate))
        return ops.add(ops.moe(x, self.experts, self.spec), part)


@dataclass(frozen=True, kw_only=True, slots=True)
class NormedExperts(Generic[T]):
    """Experts and an MLP for every token, see `Moe.has_own_norms`."""

    spec: Moe
    experts: Experts[T]
    shared: Mlp[T]
    router_norm: T
    experts_norm: T
    experts_post_norm: T
    shared_post_norm: T

    def run(self, ops: Ops[T], hidden: T, norm: T, eps: float, exchanged: ExchangedRows) -> T:
        shared = self.shared.run(ops, hidden, norm, eps, exchanged)
        routed = ops.scale(ops.rms_norm(hidden, self.router_norm, eps), self.spec.router_input_scale)
        x = ops.rms_norm(hidden, self.experts_norm, eps)
        chosen = ops.all_reduce(ops.exchanged_moe(x, self.experts, self.spec, exchanged, routed))
        normed = ops.rms_norm(shared, self.shared_post_norm, eps)
        return ops.add(normed, ops.rms_norm(chosen, self.experts_post_norm, eps))


FeedForward = Mlp[T] | RoutedExperts[T] | NormedExperts[T]


def bind_feed_forward(spec: Dense | Moe, tensors: RankTensors[T], prefix: str) -> FeedForward[T]:
    """Raises KeyError on a missing tensor."""
    if isinstance(spec, Dense):
        return _bind_mlp(spec, tensors, prefix)
    experts = _bind_experts(spec, tensors, prefix)
    shared = None if spec.shared is None else _bind_mlp(spec.shared, tensors, f"{prefix}.shared")
    if shared is not None and spec.has_own_norms:
        norms = {norm: tensors[f"{prefix}.{norm}"] for norm in OWN_NORMS}
        return NormedExperts(spec=spec, experts=experts, shared=shared, **norms)
    gate = tensors.linear(f"{prefix}.shared_gate") if spec.has_shared_gate else None
    return RoutedExperts(spec=spec, experts=experts, shared=shared, shared_gate=gate)


def _bind_mlp(spec: Dense, tensors: RankTensors[T], prefix: str) -> Mlp[T]:
    gate_up = tensors.linear(f"{prefix}.gate_up")
    down = tensors.summed_linear(f"{prefix}.down", rank=tensors.mapping.expert_rank)
    return Mlp(activation=spec.activation, gate_up=gate_up, down=down)


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
