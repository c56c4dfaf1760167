"""Which foreign tensors make up each canonical tensor of `core.weight_spec`.

Knows the names of Hugging Face's Llama and Qwen3, of z-lab's drafters and of Speculators' ones. It refuses to know
shapes: those follow from the canonical table.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dflash_trt.core.model_spec import DecoderSpec, DraftSpec, TargetSpec

Recipe = Literal["stacked", "offsets", "identity"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignNames:
    """How a canonical tensor is made of foreign ones.

    `stacked`: the parts one below the other, along axis 0. `offsets`: row i holds the distance from i to its value, so
    the canonical tensor is arange + part. `identity`: no part, arange.
    """

    parts: tuple[str, ...]
    recipe: Recipe = "stacked"


ForeignTable = dict[str, ForeignNames]


def target_names(spec: TargetSpec) -> ForeignTable:
    """Canonical `target.*` -> tensors of a Hugging Face `*ForCausalLM` checkpoint."""
    table: ForeignTable = {"target.embedding": _one("model.embed_tokens.weight")}
    for i in range(spec.num_layers):
        canonical, foreign = f"target.layers.{i}", f"model.layers.{i}"
        table[f"{canonical}.qkv"] = _projections(foreign, "qkv", "weight")
        if spec.has_qkv_bias:
            table[f"{canonical}.qkv_bias"] = _projections(foreign, "qkv", "bias")
        table |= _layer_names(canonical, foreign, spec)
    table["target.norm"] = _one("model.norm.weight")
    if not spec.is_embedding_tied:
        table["target.lm_head"] = _one("lm_head.weight")
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
        table |= _layer_names(canonical, foreign, spec)
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
        return spec.is_embedding_tied and name == "lm_head.weight"
    is_speculators = isinstance(spec, DraftSpec) and spec.source_format == "speculators"
    return is_speculators and name in ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")


def _layer_names(canonical: str, foreign: str, spec: DecoderSpec) -> ForeignTable:
    """What every layer has, whatever produces its q, k and v."""
    table: ForeignTable = {
        f"{canonical}.attention_norm": _one(f"{foreign}.input_layernorm.weight"),
        f"{canonical}.o": _projections(foreign, "o", "weight"),
        f"{canonical}.mlp_norm": _one(f"{foreign}.post_attention_layernorm.weight"),
        f"{canonical}.gate_up": _mlp(foreign, ("gate", "up"), "weight"),
        f"{canonical}.down": _mlp(foreign, ("down",), "weight"),
    }
    if spec.has_qk_norm:
        table[f"{canonical}.q_norm"] = _one(f"{foreign}.self_attn.q_norm.weight")
        table[f"{canonical}.k_norm"] = _one(f"{foreign}.self_attn.k_norm.weight")
    if spec.has_o_bias:
        table[f"{canonical}.o_bias"] = _projections(foreign, "o", "bias")
    if spec.has_mlp_bias:
        table[f"{canonical}.gate_up_bias"] = _mlp(foreign, ("gate", "up"), "bias")
        table[f"{canonical}.down_bias"] = _mlp(foreign, ("down",), "bias")
    return table


def _one(name: str) -> ForeignNames:
    return ForeignNames(parts=(name,))


def _projections(foreign: str, letters: str, kind: Literal["weight", "bias"]) -> ForeignNames:
    return ForeignNames(parts=tuple(f"{foreign}.self_attn.{letter}_proj.{kind}" for letter in letters))


def _all_kv(prefixes: Iterable[str], kind: Literal["weight", "bias"]) -> ForeignNames:
    """[k_0, v_0, k_1, v_1, ...]: the order of `draft.kv`."""
    return ForeignNames(parts=tuple(name for foreign in prefixes for name in _projections(foreign, "kv", kind).parts))


def _mlp(foreign: str, words: tuple[str, ...], kind: Literal["weight", "bias"]) -> ForeignNames:
    return ForeignNames(parts=tuple(f"{foreign}.mlp.{word}_proj.{kind}" for word in words))
