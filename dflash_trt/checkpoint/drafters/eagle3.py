"""EAGLE-3 heads as SafeAILab and SGLang's SpecForge publish them: a flat config.json of Llama's keys."""

from collections.abc import Collection, Mapping
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, read_sizes, require_dense, require_plain_decoder
from dflash_trt.checkpoint.drafters.base import LABEL, DraftFormat
from dflash_trt.checkpoint.drafters.chain import read_chain, read_chain_layer, read_taps
from dflash_trt.checkpoint.foreign_keys import HARMLESS_KEYS
from dflash_trt.checkpoint.producers.base import require_known_producer

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")

_FC_NORM = "norm_before_fc"
_HARMLESS = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "target_model_type")
# Other keys of `eagle_config`, with the values that EAGLE-3 has.
_EAGLE_VALUES = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


def recognizes(fields: Mapping[str, Any]) -> bool:
    names = fields.get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES


def read(
    fields: Mapping[str, Any], tensor_names: Collection[str], problems: list[str], notes: list[str]
) -> dict[str, Any]:
    """Read the fields of a DraftSpec. `num_target_layers` gives the taps where the file names none.

    NVIDIA's files have `norm_before_fc` in `eagle_config`, which wins over one outside (vLLM pull request 42143).
    """
    eagle = fields.get("eagle_config")
    if isinstance(eagle, dict) and _FC_NORM in eagle:
        fields = {**fields, _FC_NORM: eagle[_FC_NORM]}
    reader = ConfigReader(fields, label=LABEL, problems=problems, notes=notes)
    reader.ignore(("architectures",))
    require_known_producer(reader)
    require_plain_decoder(reader)
    require_dense(reader)
    reader.require("model_type", "llama", "qwen3", default="llama", hint=NOT_IMPLEMENTED)
    sizes = read_sizes(reader)
    layers = read_chain_layer(reader, sizes, tensor_names)
    num_target_layers = reader.optional_integer("num_target_layers")
    section = reader.optional_section("eagle_config") or reader.nested("eagle_config", {})
    for name, value in _EAGLE_VALUES.items():
        section.require(name, value, hint=NOT_IMPLEMENTED)
    taps = read_taps(section if section.has("eagle_aux_hidden_state_layer_ids") else reader, num_target_layers)
    section.ignore(("eagle_aux_hidden_state_layer_ids", _FC_NORM))
    section.finish()
    draft_vocab_size = reader.optional_integer("draft_vocab_size", maximum=sizes.vocab_size) or sizes.vocab_size
    has_own_head = draft_vocab_size != sizes.vocab_size or "lm_head.weight" in tensor_names
    spec_fields = {
        **sizes.spec_fields(),
        **read_chain(reader, speculative_tokens=reader.optional_integer("speculative_tokens")),
        "source_format": "eagle3",
        "layers": layers,
        "target_layer_ids": taps,
        "target_hidden_size": reader.optional_integer("target_hidden_size") or sizes.hidden_size,
        "target_vocab_size": sizes.vocab_size,
        "draft_vocab_size": draft_vocab_size if has_own_head else None,
        "has_own_embedding": "embed_tokens.weight" in tensor_names,
    }
    reader.ignore((*HARMLESS_KEYS, *_HARMLESS))
    reader.finish()
    return spec_fields


FORMAT = DraftFormat(
    name="eagle3", recognizes=recognizes, read=read, ignorable_tensors=("t2d",), asks_for_target_layers=recognizes
)
