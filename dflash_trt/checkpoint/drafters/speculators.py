"""The config.json of a Speculators drafter -> the fields of a DraftSpec.

Speculators numbers taps like Hugging Face's hidden_states (one higher than ours), and a reduced vocabulary comes with
its own head.
"""

from collections.abc import Collection, Mapping
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import (
    NOT_IMPLEMENTED,
    DecoderSizes,
    layers_of,
    read_rope,
    read_sizes,
    require_dense,
    require_plain_decoder,
)
from dflash_trt.checkpoint.drafters.attention import speculators_masks
from dflash_trt.checkpoint.drafters.base import LABEL, DraftFormat
from dflash_trt.checkpoint.drafters.chain import read_chain, read_chain_layer, read_taps
from dflash_trt.checkpoint.drafters.dflash2 import read_dflash2
from dflash_trt.checkpoint.drafters.dspark import read_heads
from dflash_trt.checkpoint.foreign_keys import HARMLESS_KEYS

SPECULATORS_KEY = "speculators_model_type"  # in every file of the format

# The format's own defaults.
_DEFAULT_DRAFT_VOCAB_SIZE = 32000
_DEFAULT_BLOCK_SIZE = 8
_DEFAULT_MARKOV_RANK = 256
_DFLASH2_DEFAULTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}

_HARMLESS = ("speculators_version", "tie_word_embeddings", "bos_token_id", "eos_token_id")
_HARMLESS_SECTION = ("proposal_methods", "default_proposal_method", "verifier")


def read(
    file_fields: Mapping[str, Any], tensor_names: Collection[str], problems: list[str], notes: list[str]
) -> dict[str, Any]:
    """Read the fields of a DraftSpec. Only the tensors show if the drafter has its own embedding."""
    reader = ConfigReader(file_fields, label=LABEL, problems=problems, notes=notes)
    reader.ignore(("architectures", "model_type"))
    algorithm = reader.value(SPECULATORS_KEY)
    if algorithm not in ("dflash", "dflash2", "dspark", "eagle3"):
        reader.refuse(SPECULATORS_KEY, expected='"dflash", "dflash2", "dspark" or "eagle3"', hint=NOT_IMPLEMENTED)
    reader.require("quantization_config", hint="Quantized drafters cannot be read yet: use the unquantized drafter.")
    if algorithm == "eagle3":
        return _read_chain(reader, tensor_names)
    heads = _read_heads(reader) if algorithm == "dspark" else {}
    if algorithm != "dspark":
        hint = (
            "Drafting from the anchor slot is implemented for DSpark alone: use a drafter that drafts from mask slots."
        )
        reader.require("sample_from_anchor", False, hint=hint)
    _read_algorithm(reader, algorithm)
    layer = reader.optional_section("transformer_layer_config")
    if layer is None:
        reader.refuse("transformer_layer_config", expected="a JSON object", hint="Use a complete checkpoint.")
        return {}
    is_non_causal = reader.flag("sliding_window_non_causal", default=algorithm == "dflash2")
    layer_fields, sizes = _read_layer(layer, is_non_causal=is_non_causal)
    spec_fields = {
        **layer_fields,
        **heads,
        "source_format": "speculators",
        "target_layer_ids": _read_target_layer_ids(reader),
        "target_hidden_size": reader.optional_integer("target_hidden_size") or sizes.hidden_size,
        "target_vocab_size": sizes.vocab_size,
        "draft_block_size": reader.optional_integer("block_size", minimum=2) or _DEFAULT_BLOCK_SIZE,
        "mask_token_id": reader.integer("mask_token_id", minimum=0),
        "draft_vocab_size": _read_draft_vocab_size(reader, sizes.vocab_size, tensor_names),
        "has_own_embedding": "embed_tokens.weight" in tensor_names,
    }
    if algorithm == "dflash2":
        reader.require("draft_vocab_size", sizes.vocab_size, hint="DFlash2 has codebooks of the whole vocabulary.")
        spec_fields |= read_dflash2(reader, sizes, defaults=_DFLASH2_DEFAULTS)
    reader.ignore((*HARMLESS_KEYS, *_HARMLESS))
    reader.finish()
    return spec_fields


def _read_heads(reader: ConfigReader) -> dict[str, Any]:
    from_anchor = reader.optional_flag("sample_from_anchor")
    if from_anchor is None:
        reader.note("sample_from_anchor", "true, as in Speculators; vLLM reads such a file as false")
    return read_heads(
        reader, drafts_from_anchor=from_anchor is not False, default_rank=_DEFAULT_MARKOV_RANK, has_confidence=True
    )


def _read_chain(reader: ConfigReader, tensor_names: Collection[str]) -> dict[str, Any]:
    """EAGLE-3: one layer, Llama's or Qwen3's."""
    speculative_tokens = _read_algorithm(reader, "eagle3")
    num_target_layers = reader.optional_integer("num_target_layers")
    layer = reader.optional_section("transformer_layer_config")
    if layer is None:
        reader.refuse("transformer_layer_config", expected="a JSON object", hint="Use a complete checkpoint.")
        return {}
    layer.require("model_type", "qwen3", "llama", default="qwen3", hint=NOT_IMPLEMENTED)
    require_plain_decoder(layer)
    require_dense(layer)
    sizes = read_sizes(layer)
    spec_fields = {
        **sizes.spec_fields(),
        **read_chain(reader, speculative_tokens=speculative_tokens),
        "source_format": "speculators",
        "layers": read_chain_layer(layer, sizes, tensor_names),
        "target_layer_ids": read_taps(reader, num_target_layers),
        "target_hidden_size": reader.optional_integer("target_hidden_size") or sizes.hidden_size,
        "target_vocab_size": sizes.vocab_size,
        "draft_vocab_size": _read_draft_vocab_size(reader, sizes.vocab_size, tensor_names),
        "has_own_embedding": "embed_tokens.weight" in tensor_names,
    }
    layer.ignore((*HARMLESS_KEYS, *_HARMLESS, "architectures"))
    layer.finish()
    reader.ignore((*HARMLESS_KEYS, *_HARMLESS, "embed_requires_grad"))
    reader.finish()
    return spec_fields


def _read_layer(layer: ConfigReader, *, is_non_causal: bool) -> tuple[dict[str, Any], DecoderSizes]:
    """Read the decoder. Its layers are Qwen3's, with q and k norms, whatever the model_type."""
    layer.require("model_type", "qwen3", "llama", default="qwen3", hint=NOT_IMPLEMENTED)
    require_plain_decoder(layer)
    require_dense(layer)
    layer.require("mlp_bias", False, hint=NOT_IMPLEMENTED)
    sizes = read_sizes(layer)
    mixer = sizes.mixer_fields(layer) | {"rope": read_rope(layer), "has_qk_norm": True}
    masks = speculators_masks(layer, sizes.num_layers, non_causal=is_non_causal)
    fields = {**sizes.spec_fields(), "layers": layers_of(mixer, sizes.dense_fields(), masks)}
    layer.ignore((*HARMLESS_KEYS, *_HARMLESS, "architectures"))
    layer.finish()
    return fields, sizes


def _read_algorithm(reader: ConfigReader, algorithm: Any) -> int | None:
    """The largest number of drafts that the file's proposal methods name, if any."""
    section = reader.optional_section("speculators_config")
    if section is None:
        return None
    section.require("algorithm", algorithm, hint=NOT_IMPLEMENTED)
    methods = section.value("proposal_methods") or []
    if not isinstance(methods, list):
        section.refuse("proposal_methods", expected="a list of objects")
        methods = []
    section.ignore(_HARMLESS_SECTION)
    section.finish()
    lengths = [method.get("speculative_tokens") for method in methods if isinstance(method, dict)]
    return max((length for length in lengths if isinstance(length, int)), default=None)


def _read_target_layer_ids(reader: ConfigReader) -> tuple[int, ...]:
    """Target layers of the taps: tap i is the residual sum after layer i - 1.

    For the last layer, transformers' hidden_states[i] is normed, but Speculators takes its states from vLLM, before the
    final norm.
    """
    ids = reader.optional_integers("aux_hidden_state_layer_ids", minimum=1)
    if not ids:
        expected = "a list of at least one layer, numbered from 1"
        reader.refuse(
            "aux_hidden_state_layer_ids", expected=expected, hint="Add the taps the drafter was trained with."
        )
        return ()
    return tuple(layer_id - 1 for layer_id in ids)


def _read_draft_vocab_size(reader: ConfigReader, vocab_size: int, tensor_names: Collection[str]) -> int | None:
    """None if the drafter uses the target's head: a full vocabulary, and no lm_head in the file."""
    size = reader.optional_integer("draft_vocab_size") or _DEFAULT_DRAFT_VOCAB_SIZE
    if size > vocab_size:
        expected = f"at most the target's vocab_size {vocab_size}"
        reader.refuse("draft_vocab_size", expected=expected)
    return None if size == vocab_size and "lm_head.weight" not in tensor_names else size


FORMAT = DraftFormat(
    name="speculators",
    recognizes=lambda fields: SPECULATORS_KEY in fields,
    read=read,
    ignorable_tensors=("t2d", "verifier_lm_head.weight", "verifier_norm.weight"),
    asks_for_target_layers=lambda fields: fields[SPECULATORS_KEY] == "eagle3",
)
