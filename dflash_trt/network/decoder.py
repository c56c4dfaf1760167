"""The target: one decoder described by data, for every family.

Pre-norm residual layers, GQA, optional per-head q/k norm, rotate-half RoPE, gated SiLU MLP or a mixture of experts.
Knows nothing of drafts, sampling or where K/V live.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model_spec import DecoderSpec, TargetSpec
from dflash_trt.network.ops import Cache, Experts, Ops, T
from dflash_trt.network.weights import LayerWeights, Mlp, TargetWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetHidden(Generic[T]):
    """`last` [T, H] is before the final norm; `taps` are layer outputs, in the order the drafter asked for."""

    last: T
    taps: Sequence[T]


def forward_target(
    ops: Ops[T],
    spec: TargetSpec,
    weights: TargetWeights[T],
    mapping: Mapping,
    *,
    token_ids: T,
    positions: T,
    caches: Sequence[Cache[T]],
    tap_layer_ids: Sequence[int],
) -> TargetHidden[T]:
    """Run all tokens of the step through all layers, causally over their pages."""
    rope = ops.rope_table(spec.rotary, positions)
    hidden = ops.embedding(weights.embedding, token_ids)
    outputs: list[T] = []
    for i, layer in enumerate(weights.layers):
        x = ops.rms_norm(hidden, layer.attention_norm, spec.rms_norm_eps)
        q_size, kv_size = spec.q_size // mapping.tp_size, spec.kv_size // mapping.tp_size
        q, k, v = ops.split(ops.linear(x, weights.qkv[i]), (q_size, kv_size, kv_size))
        attended = ops.attend_pages(
            rotated_heads(ops, spec, layer.q_norm, q, rope),
            rotated_heads(ops, spec, layer.k_norm, k, rope),
            ops.split_heads(v, spec.head_dim),
            caches[i],
            spec.attention[i],
            weights.sinks[i],
        )
        hidden = finish_layer(ops, spec, layer, hidden, attended)
        outputs.append(hidden)
    return TargetHidden(last=hidden, taps=[outputs[layer_id] for layer_id in tap_layer_ids])


def logits_of(ops: Ops[T], weights: TargetWeights[T], spec: TargetSpec, hidden: T) -> T:
    """Final norm and lm_head: [N, H] -> [N, V]."""
    normed = ops.rms_norm(hidden, weights.norm, spec.rms_norm_eps)
    return ops.all_gather_vocab(ops.linear(normed, weights.lm_head))


def rotated_heads(ops: Ops[T], spec: DecoderSpec, norm: T | None, x: T, rope: Any) -> T:
    """Queries or keys, [N, heads * D] -> normed (where the model does) and rotated [N, heads, D]."""
    heads = ops.split_heads(x, spec.head_dim)
    if norm is not None:
        heads = ops.rms_norm(heads, norm, spec.rms_norm_eps)
    return ops.rope(heads, rope)


def finish_layer(ops: Ops[T], spec: DecoderSpec, layer: LayerWeights[T], hidden: T, attended: T) -> T:
    """Output projection, residual, MLP or experts, residual."""
    hidden = ops.add(hidden, ops.all_reduce(ops.linear(attended, layer.o)))
    x = ops.rms_norm(hidden, layer.mlp_norm, spec.rms_norm_eps)
    return ops.add(hidden, ops.all_reduce(_feed_forward(ops, spec, layer.mlp, x)))


def _feed_forward(ops: Ops[T], spec: DecoderSpec, mlp: Mlp[T] | Experts[T], x: T) -> T:
    if isinstance(mlp, Experts):
        assert isinstance(spec, TargetSpec) and spec.moe is not None, "drafters are dense"
        return ops.moe(x, mlp, spec.moe)
    return ops.linear(ops.silu_mul(ops.linear(x, mlp.gate_up)), mlp.down)
