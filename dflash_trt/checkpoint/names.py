"""Which foreign tensors make up each canonical tensor of `core.weight_spec`.

Knows the names of Hugging Face's Llama, Qwen3 and gpt-oss, of z-lab's drafters and of Speculators' ones. It refuses to
know shapes: those follow from the canonical table.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from dflash_trt.checkpoint.expert_tensors import ExpertLayout
from dflash_trt.core.model_spec import DecoderSpec, DraftSpec, TargetSpec

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"  # of a target

Recipe = Literal["stacked", "experts", "offsets", "identity"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignNames:
    """How a canonical tensor is made of foreign ones.

    `stacked`: the parts one below the other, along axis 0. `experts`: as `layout` says. `offsets`: row i holds the
    distance from i to its value, so the canonical tensor is arange + part. `identity`: no part, arange.
    """

    parts: tuple[str, ...]
    recipe: Recipe = "stacked"
    layout: ExpertLayout | None = None


ForeignTable = dict[str, ForeignNames]


def target_names(spec: TargetSpec, stored_names: Collection[str] = ()) -> ForeignTable:
    """Canonical `target.*` -> tensors of a Hugging Face `*ForCausalLM` checkpoint.

    `stored_names` decide in which of a family's layouts the experts are; without them, in the published one. Of a tied
    pair of matrices either may be the stored one.
    """
    has_head_only = spec.is_embedding_tied and EMBEDDING not in stored_names and LM_HEAD in stored_names
    table: ForeignTable = {"target.embedding": _one(LM_HEAD if has_head_only else EMBEDDING)}
    for i in range(spec.num_layers):
        canonical, foreign = f"target.layers.{i}", f"model.layers.{i}"
        table[f"{canonical}.qkv"] = _projections(foreign, "qkv", "weight")
        if spec.has_qkv_bias:
            table[f"{canonical}.qkv_bias"] = _projections(foreign, "qkv", "bias")
        if spec.has_sinks:
            table[f"{canonical}.sinks"] = _one(f"{foreign}.self_attn.sinks")
        table |= _layer_names(canonical, foreign, spec)
        if not spec.has_experts(i):
            table |= _mlp_names(canonical, foreign, spec)
        elif spec.family == "gpt_oss":
            table |= _gpt_oss_expert_names(canonical, foreign, stored_names)
        else:
            table |= _qwen3_expert_names(canonical, foreign, spec, stored_names)
    table["target.norm"] = _one("model.norm.weight")
    if not spec.is_embedding_tied:
        table["target.lm_head"] = _one(LM_HEAD)
    return table


def draft_names(spec: DraftSpec, stored_names: Iterable[str]) -> ForeignTable:
    """Canonical `draft.*` -> tensors of a z-lab or Speculators checkpoint.

    `stored_names` decides whether a drafter with a head of its own maps its vocabulary: one with the target's full
    vocabulary may come without `d2t`.
    """
    prefixes = [f"layers.{i}" for i in range(spec.num_layers)]
    table: ForeignTable = {
        "draft.fc": _one("fc.weight"),
        "draft.context_norm": _one("hidden_norm.weight"),
        "draft.kv": _all_kv(prefixes, "weight"),
    }
    if spec.has_qkv_bias:
        table["draft.kv_bias"] = _all_kv(prefixes, "bias")
    for foreign in prefixes:
        canonical = f"draft.{foreign}"
        table[f"{canonical}.q"] = _projections(foreign, "q", "weight")
        if spec.has_qkv_bias:
            table[f"{canonical}.q_bias"] = _projections(foreign, "q", "bias")
        table |= _layer_names(canonical, foreign, spec) | _mlp_names(canonical, foreign, spec)
    table["draft.norm"] = _one("norm.weight")
    if spec.has_own_embedding:
        table["draft.embedding"] = _one("embed_tokens.weight")
    if spec.draft_vocab_size is not None:
        table["draft.lm_head"] = _one("lm_head.weight")
        is_full = spec.draft_vocab_size == spec.target_vocab_size and "d2t" not in set(stored_names)
        parts: tuple[str, ...] = () if is_full else ("d2t",)
        table["draft.draft_to_target"] = ForeignNames(parts=parts, recipe="identity" if is_full else "offsets")
    return table


def is_ignorable(name: str, spec: DecoderSpec) -> bool:
    """Stored, but derived from the config, a second name of a tied tensor, or needed in training only."""
    if re.fullmatch(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.(original_)?inv_freq", name):
        return True
    if isinstance(spec, TargetSpec):
        return spec.is_embedding_tied and name == LM_HEAD
    is_speculators = isinstance(spec, DraftSpec) and spec.source_format == "speculators"
    return is_speculators and name in ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")


def _layer_names(canonical: str, foreign: str, spec: DecoderSpec) -> ForeignTable:
    """What every layer has, whatever produces its q, k and v, and whatever its MLP is."""
    table: ForeignTable = {
        f"{canonical}.attention_norm": _one(f"{foreign}.input_layernorm.weight"),
        f"{canonical}.o": _projections(foreign, "o", "weight"),
        f"{canonical}.mlp_norm": _one(f"{foreign}.post_attention_layernorm.weight"),
    }
    if spec.has_qk_norm:
        table[f"{canonical}.q_norm"] = _one(f"{foreign}.self_attn.q_norm.weight")
        table[f"{canonical}.k_norm"] = _one(f"{foreign}.self_attn.k_norm.weight")
    if spec.has_o_bias:
        table[f"{canonical}.o_bias"] = _projections(foreign, "o", "bias")
    return table


def _mlp_names(canonical: str, foreign: str, spec: DecoderSpec) -> ForeignTable:
    table: ForeignTable = {
        f"{canonical}.gate_up": _mlp(foreign, ("gate", "up"), "weight"),
        f"{canonical}.down": _mlp(foreign, ("down",), "weight"),
    }
    if spec.has_mlp_bias:
        table[f"{canonical}.gate_up_bias"] = _mlp(foreign, ("gate", "up"), "bias")
        table[f"{canonical}.down_bias"] = _mlp(foreign, ("down",), "bias")
    return table


def _qwen3_expert_names(canonical: str, foreign: str, spec: TargetSpec, stored_names: Collection[str]) -> ForeignTable:
    """Published: a matrix per expert and projection. transformers 5 may also save what it computes with."""
    assert spec.moe is not None
    table: ForeignTable = {f"{canonical}.router": _one(f"{foreign}.mlp.gate.weight")}
    experts = f"{foreign}.mlp.experts"
    if f"{experts}.gate_up_proj" in stored_names:
        return table | {
            f"{canonical}.experts.gate_up": _experts(f"{experts}.gate_up_proj"),
            f"{canonical}.experts.down": _experts(f"{experts}.down_proj"),
        }
    one_by_one = ExpertLayout(is_one_by_one=True)
    for name, words in (("gate_up", ("gate", "up")), ("down", ("down",))):
        parts = [f"{experts}.{e}.{word}_proj.weight" for e in range(spec.moe.num_experts) for word in words]
        table[f"{canonical}.experts.{name}"] = _experts(*parts, layout=one_by_one)
    return table


def _gpt_oss_expert_names(canonical: str, foreign: str, stored_names: Collection[str]) -> ForeignTable:
    """Published: MXFP4 blocks and scales. The bfloat16 conversions hold transposed matrices."""
    experts = f"{foreign}.mlp.experts"
    table: ForeignTable = {
        f"{canonical}.router": _one(f"{foreign}.mlp.router.weight"),
        f"{canonical}.router_bias": _one(f"{foreign}.mlp.router.bias"),
    }
    for name, is_interleaved in (("gate_up", True), ("down", False)):
        weight = f"{experts}.{name}_proj"
        bias_layout = ExpertLayout(is_interleaved=is_interleaved)
        table[f"{canonical}.experts.{name}_bias"] = _experts(f"{weight}_bias", layout=bias_layout)
        if weight in stored_names:
            layout = ExpertLayout(is_transposed=True, is_interleaved=is_interleaved)
            table[f"{canonical}.experts.{name}"] = _experts(weight, layout=layout)
        else:
            layout = ExpertLayout(is_mxfp4=True, is_interleaved=is_interleaved)
            table[f"{canonical}.experts.{name}"] = _experts(f"{weight}_blocks", f"{weight}_scales", layout=layout)
    return table


def _experts(*parts: str, layout: ExpertLayout | None = None) -> ForeignNames:
    return ForeignNames(parts=parts, recipe="experts", layout=layout or ExpertLayout())


def _one(name: str) -> ForeignNames:
    return ForeignNames(parts=(name,))


def _projections(foreign: str, letters: str, kind: Literal["weight", "bias"]) -> ForeignNames:
    return ForeignNames(parts=tuple(f"{foreign}.self_attn.{letter}_proj.{kind}" for letter in letters))


def _all_kv(prefixes: Iterable[str], kind: Literal["weight", "bias"]) -> ForeignNames:
    """[k_0, v_0, k_1, v_1, ...]: the order of `draft.kv`."""
    return ForeignNames(parts=tuple(name for foreign in prefixes for name in _projections(foreign, "kv", kind).parts))


def _mlp(foreign: str, words: tuple[str, ...], kind: Literal["weight", "bias"]) -> ForeignNames:
    return ForeignNames(parts=tuple(f"{foreign}.mlp.{word}_proj.{kind}" for word in words))
