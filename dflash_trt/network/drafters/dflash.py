"""The DFlash drafter: one pass over a block of masked tokens, conditioned on the target's hidden states through K/V.

Definition: arXiv 2602.06036 and z-lab's reference implementation (PyPI `dflash`). Context K/V depend only on the
taps, so they are computed once per token, for all layers in one GEMM, and live in pages beside the target's.
"""

from collections.abc import Sequence
from typing import Any

from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model_spec import DraftSpec
from dflash_trt.network.decoder import finish_layer, rotated_heads
from dflash_trt.network.ops import Acceptance, Cache, Ops, T
from dflash_trt.network.weights import DraftWeights


def draft_context(
    ops: Ops[T], spec: DraftSpec, weights: DraftWeights[T], *, taps: Sequence[T], positions: T
) -> Sequence[Any]:
    """Taps of all T tokens -> the context of each layer, as `attend_draft` takes it. No input layernorm."""
    fused = ops.rms_norm(ops.linear(ops.concat(taps), weights.fc), weights.context_norm, spec.rms_norm_eps)
    kv = ops.linear(fused, weights.context_kv)
    return ops.draft_context(
        kv, spec, [layer.k_norm for layer in weights.layers], ops.rope_table(spec.rotary, positions)
    )


def context_of_layers(
    ops: Ops[T], kv: T, spec: DraftSpec, k_norms: Sequence[T | None], rope: Any, *, kv_size: int
) -> list[tuple[T, T]]:
    """`Ops.draft_context` in terms of other ops: per layer (k, v), each [T, kv_heads, D]."""
    parts = ops.split(kv, (kv_size,) * (2 * len(k_norms)))
    return [
        (rotated_heads(ops, spec, norm, k, rope), ops.split_heads(v, spec.head_dim))
        for norm, k, v in zip(k_norms, parts[::2], parts[1::2], strict=True)
    ]


def draft_tokens(
    ops: Ops[T],
    spec: DraftSpec,
    weights: DraftWeights[T],
    mapping: Mapping,
    *,
    context: Sequence[Any],
    caches: Sequence[Cache[T]],
    acceptance: Acceptance[T],
) -> T:
    """Write the accepted context, run the block [bonus, MASK x K], return its greedy tokens int32 [R, K].

    Slot j predicts the token at its own position: there is no logit shift. Slot 0, the anchor, needs no logits.
    A positive output multiplier and a final softcap, which some drafters carry, keep the order of the logits, so a
    greedy draft does not need them.
    """
    block = ops.draft_block(acceptance, mask_token_id=spec.mask_token_id)
    hidden = ops.scale(ops.embedding(weights.embedding, block.token_ids), spec.input_embedding_scale)
    rope = ops.rope_table(spec.rotary, block.positions)
    kv_size = spec.kv_size // mapping.tp_size
    for i, layer in enumerate(weights.layers):
        x = ops.rms_norm(hidden, layer.attention_norm, spec.rms_norm_eps)
        k, v = ops.split(ops.linear(x, weights.block_kv[i]), (kv_size, kv_size))
        attended = ops.attend_draft(
            context[i],
            rotated_heads(ops, spec, layer.q_norm, ops.linear(x, weights.q[i]), rope),
            (rotated_heads(ops, spec, layer.k_norm, k, rope), ops.split_heads(v, spec.head_dim)),
            caches[i],
            acceptance,
            spec.attention[i],
        )
        hidden = finish_layer(ops, spec, layer, hidden, attended)
    hidden = ops.rms_norm(ops.draft_slots(hidden), weights.norm, spec.rms_norm_eps)
    tokens = ops.argmax_tokens(ops.all_gather_vocab(ops.linear(hidden, weights.lm_head)))
    return tokens if weights.draft_to_target is None else ops.map_tokens(weights.draft_to_target, tokens)
