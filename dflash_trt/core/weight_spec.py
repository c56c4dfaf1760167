"""The canonical weights: one name, shape and way of sharding for every tensor of an engine.

`checkpoint/` fills this table from foreign names, `engine_dir` stores it, `network/` consumes it. Nobody else
invents a tensor name.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dflash_trt.core.model_spec import DecoderSpec, DraftSpec, TargetSpec
from dflash_trt.core.quantization import QuantizationSpec

Sharding = Literal["replicated", "rows", "columns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpec:
    """A tensor of the whole model and how tensor parallelism cuts it.

    `rows` cuts axis 0 (output features), `columns` cuts axis 1 (input features; the partial results are summed by
    an all-reduce). `segments` are the row counts of parts fused along axis 0, each of which is cut on its own: a rank
    gets its share of q, of k and of v.
    """

    shape: tuple[int, ...]
    sharding: Sharding = "replicated"
    segments: tuple[int, ...] = ()
    is_integer: bool = False  # token ids: never cast to the engine's dtype


WeightTable = dict[str, WeightSpec]


def target_weights(spec: TargetSpec) -> WeightTable:
    """Canonical names of the target: `target.*`."""
    table: WeightTable = {"target.embedding": WeightSpec(shape=(spec.vocab_size, spec.hidden_size))}
    for i in range(spec.num_layers):
        prefix = f"target.layers.{i}"
        qkv = (spec.q_size, spec.kv_size, spec.kv_size)
        table[f"{prefix}.qkv"] = _rows((sum(qkv), spec.hidden_size), qkv)
        if spec.has_qkv_bias:
            table[f"{prefix}.qkv_bias"] = _rows((sum(qkv),), qkv)
        if spec.has_sinks:
            table[f"{prefix}.sinks"] = _rows((spec.num_heads,), (spec.num_heads,))
        mlp = _expert_weights(prefix, spec) if spec.has_experts(i) else _mlp_weights(prefix, spec)
        table |= _layer_weights(prefix, spec, mlp)
    table["target.norm"] = WeightSpec(shape=(spec.hidden_size,))
    if not spec.is_embedding_tied:
        table["target.lm_head"] = _rows((spec.vocab_size, spec.hidden_size), (spec.vocab_size,))
    return table


def draft_weights(spec: DraftSpec) -> WeightTable:
    """Canonical names of the drafter: `draft.*`.

    `draft.kv` stacks K and V of all layers, [k_0, v_0, k_1, v_1, ...], so that the context of every layer is one
    GEMM; the block's own K and V use slices of the same tensor.
    """
    hidden = spec.hidden_size
    table: WeightTable = {
        "draft.fc": WeightSpec(shape=(hidden, len(spec.target_layer_ids) * spec.target_hidden_size)),
        "draft.context_norm": WeightSpec(shape=(hidden,)),
        "draft.kv": _rows((2 * spec.num_layers * spec.kv_size, hidden), (spec.kv_size,) * (2 * spec.num_layers)),
    }
    if spec.has_qkv_bias:
        table["draft.kv_bias"] = _rows((2 * spec.num_layers * spec.kv_size,), (spec.kv_size,) * (2 * spec.num_layers))
    for i in range(spec.num_layers):
        prefix = f"draft.layers.{i}"
        table[f"{prefix}.q"] = _rows((spec.q_size, hidden), (spec.q_size,))
        if spec.has_qkv_bias:
            table[f"{prefix}.q_bias"] = _rows((spec.q_size,), (spec.q_size,))
        table |= _layer_weights(prefix, spec, _mlp_weights(prefix, spec))
    table["draft.norm"] = WeightSpec(shape=(hidden,))
    if spec.has_own_embedding:
        table["draft.embedding"] = WeightSpec(shape=(spec.target_vocab_size, hidden))
    if spec.draft_vocab_size is not None:
        table["draft.lm_head"] = _rows((spec.draft_vocab_size, hidden), (spec.draft_vocab_size,))
        table["draft.draft_to_target"] = WeightSpec(shape=(spec.draft_vocab_size,), is_integer=True)
    return table


def segments_of(spec: WeightSpec) -> tuple[int, ...]:
    """Rows per stacked linear; one segment for a linear that is not fused."""
    return spec.segments or (spec.shape[0],)


def engine_table(target: TargetSpec, draft: DraftSpec | None, quantization: QuantizationSpec | None) -> WeightTable:
    """The canonical weights of an engine, with the packed copies of the head that quantization adds."""
    table = target_weights(target)
    if draft is not None:
        table |= draft_weights(draft)
    for name in extra_heads(table, quantization.linears if quantization else ()):
        shape = (target.vocab_size, target.hidden_size)
        table[name] = WeightSpec(shape=shape, sharding="rows", segments=(target.vocab_size,))
    return table


def extra_heads(table: WeightTable, linears: Iterable[str]) -> tuple[str, ...]:
    """Heads among `linears` that the models themselves do not have: copies of the target's."""
    wanted = set(linears)
    return tuple(name for name in ("target.lm_head", "draft.lm_head") if name in wanted and name not in table)


def rank_share(spec: WeightSpec, tp_size: int) -> WeightSpec:
    """The part that every rank of `tp_size` holds, as a spec of its own."""
    rows, cut = spec.shape[0], tp_size if spec.sharding != "replicated" else 1
    if spec.sharding == "columns":
        return replace(spec, shape=(rows, spec.shape[1] // cut))
    shape = (rows // cut, *spec.shape[1:])
    return replace(spec, shape=shape, segments=tuple(segment // cut for segment in spec.segments))


def is_linear(spec: WeightSpec, name: str) -> bool:
    """Whether a canonical tensor is the weight of a GEMM: a matrix that is no embedding, and no biases of experts."""
    return len(spec.shape) == 2 and not name.endswith((".embedding", "_bias"))


def _layer_weights(prefix: str, spec: DecoderSpec, mlp: WeightTable) -> WeightTable:
    """What every layer has, whatever produces its q, k and v, with its MLP's weights in their place."""
    hidden = spec.hidden_size
    table: WeightTable = {
        f"{prefix}.attention_norm": WeightSpec(shape=(hidden,)),
        f"{prefix}.o": WeightSpec(shape=(hidden, spec.q_size), sharding="columns"),
        f"{prefix}.mlp_norm": WeightSpec(shape=(hidden,)),
        **mlp,
    }
    if spec.has_qk_norm:
        table[f"{prefix}.q_norm"] = WeightSpec(shape=(spec.head_dim,))
        table[f"{prefix}.k_norm"] = WeightSpec(shape=(spec.head_dim,))
    if spec.has_o_bias:
        table[f"{prefix}.o_bias"] = WeightSpec(shape=(hidden,))
    return table


def _mlp_weights(prefix: str, spec: DecoderSpec) -> WeightTable:
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    table: WeightTable = {
        f"{prefix}.gate_up": _rows((2 * ffn, hidden), (ffn, ffn)),
        f"{prefix}.down": WeightSpec(shape=(hidden, ffn), sharding="columns"),
    }
    if spec.has_mlp_bias:
        table[f"{prefix}.gate_up_bias"] = _rows((2 * ffn,), (ffn, ffn))
        table[f"{prefix}.down_bias"] = WeightSpec(shape=(hidden,))
    return table


def _expert_weights(prefix: str, spec: TargetSpec) -> WeightTable:
    """Experts lie one after the other along axis 0, gate rows above up rows. Nothing cuts them yet."""
    moe, hidden = spec.moe, spec.hidden_size
    assert moe is not None
    experts, ffn = moe.num_experts, moe.intermediate_size
    table: WeightTable = {f"{prefix}.router": WeightSpec(shape=(experts, hidden))}
    if moe.has_bias:
        table[f"{prefix}.router_bias"] = WeightSpec(shape=(experts,))
    table[f"{prefix}.experts.gate_up"] = WeightSpec(shape=(experts, 2 * ffn, hidden))
    table[f"{prefix}.experts.down"] = WeightSpec(shape=(experts, hidden, ffn))
    if moe.has_bias:
        table[f"{prefix}.experts.gate_up_bias"] = WeightSpec(shape=(experts, 2 * ffn))
        table[f"{prefix}.experts.down_bias"] = WeightSpec(shape=(experts, hidden))
    return table


def _rows(shape: tuple[int, ...], segments: tuple[int, ...]) -> WeightSpec:
    return WeightSpec(shape=shape, sharding="rows", segments=segments)
