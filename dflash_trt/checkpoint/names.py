"""Foreign names of each canonical tensor.

Knows the names that Hugging Face's decoders share, and the names in z-lab's and Speculators' drafters; names of experts
are in the families' files.
"""

import re
from collections.abc import Collection, Iterable
from typing import Literal

from dflash_trt.checkpoint.drafters.base import draft_formats
from dflash_trt.checkpoint.families.base import Family, MixerNames, MtpTensors, all_families
from dflash_trt.checkpoint.foreign_names import ForeignNames, ForeignTable, mlp_names, one, plus_one
from dflash_trt.core.model.decoder import TargetSpec, is_offset_norm
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.dspark import DSparkHeads
from dflash_trt.core.model.feed_forward import Dense, Moe
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.model.mla import Mla

_LM_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_LANGUAGE_MODELS = ("model.language_model.", "language_model.model.")  # "model." in a model that also sees


def model_prefix(stored_names: Collection[str]) -> str:
    """Prefix of a target's tensors, except its head."""
    found = (prefix for prefix in _LANGUAGE_MODELS if any(name.startswith(prefix) for name in stored_names))
    return next(found, "model.")


_SELECTOR_NAMES: ForeignTable = {
    "draft.selector.predecessor.embedding": one("candidate_selector.predecessor_codebook"),
    "draft.selector.successor.embedding": one("candidate_selector.successor_codebook"),
    "draft.selector.hidden": one("candidate_selector.hidden_projection.weight"),
}


def _heads_names(heads: DSparkHeads, stored_names: Collection[str]) -> ForeignTable:
    """Names of DeepSpec and Speculators; TensorRT-LLM also reads files that have the matrices in no module."""
    has_modules = "markov_w1.weight" not in stored_names
    markov, confidence = ("markov_head.", "confidence_head.proj") if has_modules else ("", "confidence_proj")
    table = {
        "draft.markov.previous.embedding": one(f"{markov}markov_w1.weight"),
        "draft.markov.bias": one(f"{markov}markov_w2.weight"),
    }
    linears = {"draft.confidence": confidence} if heads.has_confidence else {}
    if heads.markov_type == "gated":
        linears["draft.markov.gate"] = f"{markov}gate_proj"
    elif heads.markov_type == "rnn":
        linears["draft.markov.cell"] = f"{markov}joint_proj"
    for canonical, foreign in linears.items():
        table |= {canonical: one(f"{foreign}.weight"), f"{canonical}_bias": one(f"{foreign}.bias")}
    return table


def embedding_name(stored_names: Collection[str]) -> str:
    """Name of a target's embedding."""
    return f"{model_prefix(stored_names)}{_EMBEDDING}"


def head_name(stored_names: Collection[str]) -> str:
    """Name of a target's head."""
    outer = model_prefix(stored_names).removesuffix("model.")
    return f"{outer if outer == 'language_model.' else ''}{_LM_HEAD}"


def target_names(spec: TargetSpec, stored_names: Collection[str] = ()) -> ForeignTable:
    """Canonical `target.*` -> tensors of a Hugging Face `*ForCausalLM` checkpoint.

    `stored_names` decide the layout of the experts (default: the published one). Either matrix of a tied pair may be
    the stored one.
    """
    embedding, head, model = embedding_name(stored_names), head_name(stored_names), model_prefix(stored_names)
    has_head_only = spec.is_embedding_tied and embedding not in stored_names and head in stored_names
    table: ForeignTable = {"target.embedding": one(head if has_head_only else embedding)}
    family = all_families()[spec.family]
    for i, layer in enumerate(spec.layers):
        canonical, foreign = f"target.layers.{i}", f"{model}layers.{i}"
        mixer_names = {**_MIXER_NAMES, **family.mixer_names}[layer.mixer.kind]
        table |= _norm_names(canonical, foreign) | mixer_names(canonical, foreign, layer.mixer, spec.hidden_size)
        table |= _feed_forward_names(canonical, foreign, layer.feed_forward, family, stored_names)
        if family.layer_names is not None:
            table |= family.layer_names(canonical, foreign, layer, spec.hidden_size)
    table["target.norm"] = one(f"{model}norm.weight")
    if not spec.is_embedding_tied:
        table["target.lm_head"] = one(head)
    if family.own_names is not None:
        table |= family.own_names(model, spec)
    if spec.has_offset_norms:
        table |= {name: plus_one(*names.parts) for name, names in table.items() if is_offset_norm(name)}
    return table


def draft_names(spec: DraftSpec, stored_names: Iterable[str]) -> ForeignTable:
    """Canonical `draft.*` -> tensors of a z-lab, DeepSpec, Speculators or SafeAILab checkpoint.

    A drafter with its own head and the target's full vocabulary may come without `d2t`.
    """
    stored_names = set(stored_names)
    prefixes = [f"layers.{i}" for i in range(spec.num_layers)]
    if spec.chain is not None:
        prefixes = [_chain_layer(spec, stored_names)]
    of_context = "" if spec.chain is None else f"{prefixes[0]}."
    table: ForeignTable = {
        "draft.fc": one("fc.weight"),
        "draft.context_norm": one(f"{of_context}hidden_norm.weight"),
        "draft.kv": _all_kv(prefixes, "weight"),
    }
    if any(gqa.has_qkv_bias for gqa in spec.attentions):
        table["draft.kv_bias"] = _all_kv(prefixes, "bias")
    for i, (foreign, layer, gqa) in enumerate(zip(prefixes, spec.layers, spec.attentions, strict=True)):
        canonical = f"draft.layers.{i}"
        table |= _norm_names(canonical, foreign)
        table |= _attention_names(canonical, foreign, gqa, spec.hidden_size, letters="q")
        table |= mlp_names(canonical, f"{foreign}.mlp", has_bias=layer.feed_forward.has_bias)
        if spec.conv is not None:
            table |= _conv_names(foreign)
    if spec.chain is not None:
        norms = spec.chain.fc_norms(len(spec.target_layer_ids), spec.target_hidden_size)
        joint = spec.chain.fc_norm == "joint"
        table |= {name: one("input_norm.weight" if joint else f"fc_norm.{i}.weight") for i, name in enumerate(norms)}
    table["draft.norm"] = one("norm.weight")
    if spec.selector is not None:
        table |= _SELECTOR_NAMES
    if spec.heads is not None:
        table |= _heads_names(spec.heads, stored_names)
    if spec.has_own_embedding:
        table["draft.embedding"] = one("embed_tokens.weight")
    if spec.draft_vocab_size is not None:
        table["draft.lm_head"] = one("lm_head.weight")
        is_full = spec.draft_vocab_size == spec.target_vocab_size and "d2t" not in stored_names
        parts: tuple[str, ...] = () if is_full else ("d2t",)
        table["draft.draft_to_target"] = ForeignNames(parts=parts, recipe="identity" if is_full else "offsets")
    return table


def mtp_names(
    spec: DraftSpec, target: TargetSpec, head: MtpTensors, stored_names: Collection[str] = ()
) -> ForeignTable:
    """Canonical `draft.*` -> tensors of an MTP head in the target's checkpoint."""
    [layer], [gqa], canonical = spec.layers, spec.attentions, "draft.layers.0"
    family = all_families()[target.family]
    modules = {
        "fc": head.fc,
        "context_norm": head.feature_norm,
        "embedding_norm": head.embedding_norm,
        "norm": head.norm,
    }
    table: ForeignTable = {f"draft.{name}": one(f"{module}.weight") for name, module in modules.items()}
    table["draft.kv"] = _all_kv([head.layer], "weight")
    if gqa.has_qkv_bias:
        table["draft.kv_bias"] = _all_kv([head.layer], "bias")
    table |= _norm_names(canonical, head.layer)
    table |= _attention_names(canonical, head.layer, gqa, spec.hidden_size, letters="q")
    table |= _feed_forward_names(canonical, head.layer, layer.feed_forward, family, stored_names)
    if target.has_offset_norms:
        table |= {name: plus_one(*names.parts) for name, names in table.items() if is_offset_norm(name)}
    return table


def is_ignorable_in_target(spec: TargetSpec, name: str) -> bool:
    """True for a tensor that follows from the config, is tied to another one, or is left out by the family."""
    family = all_families()[spec.family]
    is_left_out = name.startswith(family.left_out) or any(module in name for module in family.left_out_modules)
    is_left_out = is_left_out or (family.has_drafting_layers and _is_behind_last(name, spec)) or _is_frequencies(name)
    return is_left_out or (spec.is_embedding_tied and name in (_LM_HEAD, f"language_model.{_LM_HEAD}"))


def is_ignorable_in_drafter(spec: DraftSpec, name: str) -> bool:
    """True for a tensor that follows from the config, or is for training only."""
    return _is_frequencies(name) or name in draft_formats()[spec.source_format].ignorable_tensors


def is_ignorable_beside_mtp(head: MtpTensors, name: str) -> bool:
    """True for a tensor of the target, or a copy of one in its MTP head."""
    return not name.startswith(head.prefix) or name.startswith(tuple(f"{module}." for module in head.shared))


def _is_frequencies(name: str) -> bool:
    pattern = r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.(original_)?inv_freq"
    return re.fullmatch(pattern, name) is not None


def _is_behind_last(name: str, spec: TargetSpec) -> bool:
    layer = re.match(r"(?:[a-z_]+\.)*layers\.(\d{1,4})\.", name)
    return layer is not None and int(layer[1]) >= spec.num_layers


def _chain_layer(spec: DraftSpec, stored_names: Collection[str]) -> str:
    """The prefix of an EAGLE-3 layer: SafeAILab's, or the one of Speculators and vLLM."""
    if stored_names:
        return "midlayer" if any(name.startswith("midlayer.") for name in stored_names) else "layers.0"
    return "layers.0" if spec.source_format == "speculators" else "midlayer"


def _conv_names(foreign: str) -> ForeignTable:
    """Convolutions of both sublayers of a DFlash2 layer."""
    table: ForeignTable = {}
    for name in (f"{foreign}.attention_conv", f"{foreign}.mlp_conv"):
        table[f"draft.{name}.base"] = one(f"{name}.base_kernel")
        table[f"draft.{name}.filter"] = one(f"{name}.kernel_projection.weight")
    return table


def _norm_names(canonical: str, foreign: str) -> ForeignTable:
    return {
        f"{canonical}.attention_norm": one(f"{foreign}.input_layernorm.weight"),
        f"{canonical}.mlp_norm": one(f"{foreign}.post_attention_layernorm.weight"),
    }


def _attention_names(
    canonical: str, foreign: str, mixer: Gqa, hidden_size: int, *, letters: str | None = None
) -> ForeignTable:
    """`letters` are the projections fused in the layer's own matrix, by default all that it has."""
    letters = letters or mixer.projections
    table: ForeignTable = {
        f"{canonical}.{letters}": _projections(foreign, letters, "weight"),
        f"{canonical}.o": _projections(foreign, "o", "weight"),
    }
    if mixer.has_qkv_bias:
        table[f"{canonical}.{letters}_bias"] = _projections(foreign, letters, "bias")
    if mixer.has_o_bias:
        table[f"{canonical}.o_bias"] = _projections(foreign, "o", "bias")
    if mixer.has_sinks:
        table[f"{canonical}.sinks"] = one(f"{foreign}.self_attn.sinks")
    table |= {f"{canonical}.{norm}": one(f"{foreign}.self_attn.{norm}.weight") for norm in mixer.head_norms}
    return table


def _latent_names(canonical: str, foreign: str, mixer: Mla, hidden_size: int) -> ForeignTable:
    """Names of DeepSeek-V3."""
    words = {"kv_a": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "kv_b": "kv_b_proj", "o": "o_proj"}
    if mixer.q_rank is None:
        words["q_b"] = "q_proj"
    else:
        words |= {"q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj"}
    return {f"{canonical}.{name}": one(f"{foreign}.self_attn.{word}.weight") for name, word in words.items()}


# Kinds whose names most families share; others are in `Family.mixer_names`.
_MIXER_NAMES: dict[str, MixerNames] = {"gqa": _attention_names, "mla": _latent_names}


def _feed_forward_names(
    canonical: str, foreign: str, feed_forward: Dense | Moe, family: Family, stored_names: Collection[str]
) -> ForeignTable:
    if isinstance(feed_forward, Dense):
        return mlp_names(canonical, f"{foreign}.mlp", has_bias=feed_forward.has_bias)
    assert family.expert_names is not None, "the family names no experts"
    return family.expert_names(canonical, foreign, feed_forward, stored_names)


def _projections(foreign: str, letters: str, kind: Literal["weight", "bias"]) -> ForeignNames:
    return ForeignNames(parts=tuple(f"{foreign}.self_attn.{letter}_proj.{kind}" for letter in letters))


def _all_kv(prefixes: Iterable[str], kind: Literal["weight", "bias"]) -> ForeignNames:
    """[k_0, v_0, k_1, v_1, ...]: the order of `draft.kv`."""
    return ForeignNames(parts=tuple(name for foreign in prefixes for name in _projections(foreign, "kv", kind).parts))
