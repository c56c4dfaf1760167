"""Unreported constraints of TensorRT-LLM's DFlash and EAGLE-3: a drafter that violates one drafts badly.

Sources: `_torch/models/modeling_dflash.py`, `_torch/speculative/dflash.py`, `_torch/models/modeling_speculative.py`
(Eagle3DraftModel), `_torch/speculative/eagle3.py` and `llmapi/llm_args.py` of TensorRT-LLM 1.4.0rc1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from dflash_trt.backends.base import unsupported_formats
from dflash_trt.core.errors import problem
from dflash_trt.core.frozen import Frozen
from dflash_trt.core.model.decoder import LayerSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.eagle3 import EagleChain
from dflash_trt.core.model.feed_forward import Dense
from dflash_trt.core.model.gqa import AttentionMask, Gqa
from dflash_trt.core.quantization import QuantizationSpec

if TYPE_CHECKING:
    from dflash_trt.core.config import BuildConfig
    from dflash_trt.engine_dir import EngineLimits

FORMATS: Final = ("fp8", "fp8_block", "mxfp4", "nvfp4")  # formats of checkpoints
OUR_FORMATS: Final = ("fp8", "nvfp4")  # that a build writes; the others are passed on as published
_PARTS: Final = ("mixer", "feed_forward", "mask", "chain")
_OTHER = "Use another drafter, or build with --backend torch or tensorrt."
_RAW = ("draft.fc", "draft.kv", "draft.layers.*.q")  # TensorRT-LLM concatenates these weights as they are

# Fields of a drafter that TensorRT-LLM reads from the exported checkpoint, or that have a rule below. It ignores every
# other field, which must therefore have its default.
EXPORTED: Final[dict[type[Frozen], frozenset[str]]] = {
    DraftSpec: frozenset(
        {
            "hidden_size",
            "rms_norm_eps",
            "layers",
            "max_position_embeddings",
            "source_format",
            "target_layer_ids",
            "target_hidden_size",
            "target_vocab_size",
            "num_target_layers",
            "draft_block_size",
            "mask_token_id",
            "draft_vocab_size",
            "has_own_embedding",
            "input_embedding_scale",
            "logit_softcap",  # monotonic, and drafts are the most likely tokens
        }
    ),
    LayerSpec: frozenset({"mixer", "feed_forward"}),
    Gqa: frozenset(
        {"kind", "num_heads", "num_kv_heads", "head_dim", "rope", "mask", "has_qk_norm", "has_qkv_bias", "has_o_bias"}
    ),
    AttentionMask: frozenset({"window", "is_causal", "is_window_anchored"}),
    Dense: frozenset({"kind", "intermediate_size"}),
}
# The same of an EAGLE-3 head, which is Llama's layer: causal, without norms of q and k.
EXPORTED_OF_EAGLE3: Final[dict[type[Frozen], frozenset[str]]] = {
    DraftSpec: EXPORTED[DraftSpec] - {"mask_token_id", "input_embedding_scale"} | {"algorithm", "chain"},
    LayerSpec: EXPORTED[LayerSpec],
    Gqa: EXPORTED[Gqa] - {"has_qk_norm"},
    AttentionMask: frozenset({"first_key"}),  # the first token has no row there, either
    EagleChain: frozenset({"fc_norm", "has_normed_features"}),
    Dense: EXPORTED[Dense],
}


def drafter_problems(draft: DraftSpec) -> Iterator[str]:
    """Problems of a drafter that TensorRT-LLM would load, and draft badly with."""
    is_eagle3 = draft.algorithm == "eagle3"
    exported = EXPORTED_OF_EAGLE3 if is_eagle3 else EXPORTED
    yield from _ignored(draft, "drafter", exported)
    for i, layer in enumerate(draft.layers):
        yield from _ignored(layer, f"drafter layer {i}", exported)
    formats = {"eagle3": "SafeAILab's", "speculators": "Speculators'"} if is_eagle3 else {"z-lab": "z-lab's"}
    if draft.source_format not in formats:
        expected = " or ".join(formats.values())
        yield problem("drafter format", expected=expected, found=draft.source_format, hint=_OTHER)
    ids = draft.target_layer_ids
    if len(set(ids)) < len(ids):
        found = ", ".join(map(str, ids))
        yield problem("drafter target_layer_ids", expected="layers that are named once", found=found, hint=_OTHER)
    yield from _eagle3_problems(draft) if is_eagle3 else _dflash_problems(draft)


def _eagle3_problems(draft: DraftSpec) -> Iterator[str]:
    ids, width = draft.target_layer_ids, draft.target_hidden_size
    found = ", ".join(map(str, ids))
    if len(ids) == 1 or len(ids) * width == draft.hidden_size:
        expected = f"several layers, wider together than hidden_size {draft.hidden_size} (TensorRT-LLM leaves fc out)"
        yield problem("drafter target_layer_ids", expected=expected, found=found, hint=_OTHER)
    if width != draft.hidden_size and not draft.has_own_embedding:
        expected = f"its own, of hidden_size {draft.hidden_size}"
        yield problem("drafter embedding", expected=expected, found=f"the target's, of {width}", hint=_OTHER)


def _dflash_problems(draft: DraftSpec) -> Iterator[str]:
    if draft.has_own_embedding or draft.draft_vocab_size is not None:
        found = "its own embedding" if draft.has_own_embedding else f"its own head of {draft.draft_vocab_size} tokens"
        yield problem("drafter vocabulary", expected="the target's embedding and head", found=found, hint=_OTHER)
    if draft.input_embedding_scale != 1.0:
        found = f"{draft.input_embedding_scale:g}"
        yield problem("drafter input_embedding_scale", expected="1", found=found, hint=_OTHER)
    layers = draft.attentions
    kinds = {(gqa.num_heads, gqa.num_kv_heads, gqa.head_dim, gqa.rope, gqa.has_qk_norm) for gqa in layers}
    if len(kinds) > 1:
        expected = "the same heads, RoPE and norms in every layer"
        yield problem("drafter attention", expected=expected, found=f"{len(kinds)} kinds", hint=_OTHER)
    for i, gqa in enumerate(layers):
        mask = gqa.mask
        if mask.is_causal != (mask.window is not None) or mask.is_window_anchored:
            kind = "a causal" if mask.is_causal else "a non-causal"
            window = "no window" if mask.window is None else f"a window of {mask.window}"
            found = f"{kind} one with {window}{' before the anchor' if mask.is_window_anchored else ''}"
            expected = "a non-causal mask without a window, or a causal one with a window"
            yield problem(f"drafter layer {i} mask", expected=expected, found=found, hint=_OTHER)


def _ignored(spec: Frozen, subject: str, table: Mapping[type[Frozen], frozenset[str]]) -> Iterator[str]:
    """Fields that TensorRT-LLM would ignore, of `spec` and of the exported specs in it."""
    exported = table.get(type(spec))
    if exported is None:
        kinds = ", ".join(sorted(kind.__name__ for kind in table))
        yield problem(subject, expected=f"one of {kinds}", found=type(spec).__name__, hint=_OTHER)
        return
    for name, field in type(spec).model_fields.items():
        value = getattr(spec, name)
        if name not in exported and value != field.default:
            expected = f"{field.default}, for TensorRT-LLM would ignore it"
            yield problem(f"{subject} {name}", expected=expected, found=f"{value!s:.80}", hint=_OTHER)
        elif name in _PARTS and isinstance(value, Frozen):
            yield from _ignored(value, f"{subject} {name}", table)


def quantization_problems(quantization: QuantizationSpec, *, is_eagle3: bool) -> Iterator[str]:
    """Problems of formats that TensorRT-LLM does not read, or not in this place."""
    yield from unsupported_formats(
        quantization, lambda known: known.name in FORMATS, hint="Build with fp8, nvfp4 or none."
    )
    raw = ("draft.*",) if is_eagle3 else _RAW
    drafter = [name for name in quantization.linears if any(fnmatchcase(name, pattern) for pattern in raw)]
    if drafter:
        expected = "unquantized weights of the drafter's q, k, v and fc (TensorRT-LLM fuses them as they are)"
        if is_eagle3:
            expected = "an unquantized EAGLE-3 head (no other has been exported)"
        found = f"{quantization.linears[drafter[0]]} in {drafter[0]} and {len(drafter) - 1} more"
        hint = f"Add the overrides {', '.join(repr(f'{pattern}: none') for pattern in raw)}, or leave drafter out."
        yield problem("quantization", expected=expected, found=found, hint=hint)
    if quantization.draft_kv is not None:
        hint = "Leave draft_kv_cache out."
        yield problem("draft_kv_cache", expected="none (its context has the dtype of fc)", found="fp8", hint=hint)
    if "draft.lm_head" in quantization.linears and not is_eagle3:
        found, hint = quantization.linears["draft.lm_head"], "Leave draft_lm_head out."
        yield problem("draft_lm_head", expected="none (the drafter takes the target's head)", found=found, hint=hint)


def config_problems(config: BuildConfig) -> Iterator[str]:
    """Problems of a build's options, before any checkpoint is looked at."""
    if config.dtype == "float32":
        hint = "Pass --dtype bfloat16."
        expected = "bfloat16 or float16 (the drafter's attention is FlashAttention)"
        yield problem("dtype", expected=expected, found="float32", hint=hint)
    if config.page_size & (config.page_size - 1):
        yield problem("page_size", expected="a power of two", found=str(config.page_size), hint="32 is the default.")
    for name in ("plugin_library", "collectives"):
        if getattr(config, name) != type(config).model_fields[name].default:
            found, hint = repr(getattr(config, name)), "Leave it out: it is for backend tensorrt."
            yield problem(name, expected="nothing with backend tensorrt_llm", found=found, hint=hint)


def limits_problems(limits: EngineLimits, *, has_drafter: bool) -> Iterator[str]:
    if has_drafter and limits.max_draft_len == 0:
        hint = "Pass --drafter none for autoregressive decoding."
        yield problem("max_draft_len", expected="1 or more with a drafter", found="0", hint=hint)
    if limits.max_num_tokens < limits.max_seq_len:
        expected = f"at least max_seq_len {limits.max_seq_len} (chunked prefill is off, so that a prompt is one step)"
        hint = "Raise it or leave it out, or lower max_seq_len."
        yield problem("max_num_tokens", expected=expected, found=str(limits.max_num_tokens), hint=hint)
