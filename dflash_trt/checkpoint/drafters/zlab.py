"""z-lab's drafters: DFlash in both schemas, and DFlash2.

Refuses unknown keys that change the algorithm.
"""

from collections.abc import Collection, Mapping
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader, shown
from dflash_trt.checkpoint.decoder_config import (
    NOT_IMPLEMENTED,
    layers_of,
    read_rope,
    read_sizes,
    require_dense,
    require_plain_decoder,
)
from dflash_trt.checkpoint.drafters.attention import with_gpt_oss_defaults, zlab_masks
from dflash_trt.checkpoint.drafters.base import LABEL, DraftFormat
from dflash_trt.checkpoint.drafters.dflash2 import KEYS, read_dflash2
from dflash_trt.checkpoint.drafters.speculators import SPECULATORS_KEY
from dflash_trt.checkpoint.foreign_keys import HARMLESS_KEYS
from dflash_trt.checkpoint.producers.base import require_known_producer
from dflash_trt.core.errors import problem
from dflash_trt.core.json_object import printable

ARCHITECTURE = "DFlashDraftModel"
_SECOND = "DFlash2DraftModel"

# Keys that change the algorithm, and the values at which they change nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "backbone_rotary_base": (),
    "has_embed_tokens": (False,),
    "has_lm_head": (False,),
    "is_neox_style": (True,),
    "markov_head": (),
    "markov_head_type": (),
    "markov_rank": (),
    "mask_token": (),
    "mlp_bias": (False,),
    "projector_type": (),
    "pure_draft_prefix_len": (),
    "sample_from_anchor": (False,),
    "shift_label": (False,),
    "use_gemma_norm": (False,),
    "use_qk_norm": (True,),
}

# Not used: special tokens and the head come from the target, the other keys are for training.
_HARMLESS = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "num_anchors", "loss_decay_gamma")


def recognizes(fields: Mapping[str, Any]) -> bool:
    """True for z-lab's architecture, which files of Speculators may also have."""
    names = fields.get("architectures")
    return SPECULATORS_KEY not in fields and isinstance(names, list) and names in ([ARCHITECTURE], [_SECOND])


def read(
    fields: Mapping[str, Any], tensor_names: Collection[str], problems: list[str], notes: list[str]
) -> dict[str, Any]:
    """Read the fields of a DraftSpec, in either schema."""
    stated = with_gpt_oss_defaults(merged(fields, problems), notes)
    reader = ConfigReader(stated, label=LABEL, problems=problems, notes=notes)
    is_second = reader.value("architectures") == [_SECOND]
    require_known_producer(reader)
    require_plain_decoder(reader)
    require_dense(reader)
    for name, allowed in (_NEUTRAL_VALUES | ({} if is_second else dict.fromkeys(KEYS, ()))).items():
        reader.require(name, *allowed, hint=NOT_IMPLEMENTED)
    sizes = read_sizes(reader)
    reader.require("v_head_dim", sizes.head_dim, hint=NOT_IMPLEMENTED)
    reader.require("model_type", "qwen3", "gpt_oss", default="qwen3", hint=NOT_IMPLEMENTED)
    if reader.value("model_type") == "gpt_oss":
        reader.ignore(("initial_context_length",))
    mixer = sizes.mixer_fields(reader) | {"rope": read_rope(reader), "has_qk_norm": True}
    num_target_layers = reader.optional_integer("num_target_layers")
    # A multiplier is monotonic in the logits: it cannot change a greedy draft of DFlash.
    multiplier, softcap = (reader.optional_number(name) for name in ("output_multiplier", "final_logit_softcapping"))
    spec_fields = {
        **sizes.spec_fields(),
        "source_format": "z-lab",
        "layers": layers_of(mixer, sizes.dense_fields(), zlab_masks(reader, sizes.num_layers)),
        "target_layer_ids": _read_target_layer_ids(reader, num_target_layers, sizes.num_layers),
        "target_hidden_size": reader.optional_integer("target_hidden_size") or sizes.hidden_size,
        "target_vocab_size": sizes.vocab_size,
        "num_target_layers": num_target_layers,
        "draft_block_size": reader.integer("block_size", minimum=2),
        "mask_token_id": reader.integer("mask_token_id", minimum=0),
        "input_embedding_scale": reader.optional_number("input_embedding_scale") or 1.0,
        "logit_softcap": softcap,
    }
    if is_second:
        spec_fields |= read_dflash2(reader, sizes, output_multiplier=multiplier or 1.0, logit_softcap=softcap)
    reader.ignore((*HARMLESS_KEYS, *_HARMLESS))
    reader.finish()
    return spec_fields


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """z-lab's rule for a file without target_layer_ids: evenly spread from layer 1 to the third from last."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))


def merged(fields: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Merge top-level keys with those in `dflash_config`: checkpoints have the same keys in either place."""
    nested = fields.get("dflash_config")
    top = {name: value for name, value in fields.items() if name != "dflash_config"}
    if nested is None:
        return top
    if not isinstance(nested, dict):
        subject = f"{LABEL} key 'dflash_config'"
        problems.append(problem(subject, expected="a JSON object", found=shown(nested)))
        return top
    for name in sorted(set(top) & set(nested)):
        if top[name] != nested[name]:
            found = f"{shown(top[name])} at the top level and {shown(nested[name])} in dflash_config"
            hint = "Keep the one that the drafter was trained with."
            problems.append(problem(f"{LABEL} key '{printable(name)}'", expected="one value", found=found, hint=hint))
    return top | nested


def _read_target_layer_ids(reader: ConfigReader, num_target_layers: int | None, num_layers: int) -> tuple[int, ...]:
    ids = reader.optional_integers("target_layer_ids")
    if ids is None and num_target_layers is None:
        expected = "a list, or num_target_layers to derive it from"
        reader.refuse("target_layer_ids", expected=expected, hint="Add either key.")
    if ids is None:
        ids = default_target_layer_ids(num_target_layers or 4, num_layers)
    if not ids:
        reader.refuse("target_layer_ids", expected="at least one layer")
    mirrored = [layer_id + 1 for layer_id in ids]  # the same taps in Hugging Face's hidden_states numbering
    reader.require(
        "eagle_aux_hidden_state_layer_ids", mirrored, hint="Keep the taps that the drafter was trained with."
    )
    return ids


FORMAT = DraftFormat(name="z-lab", recognizes=recognizes, read=read)
