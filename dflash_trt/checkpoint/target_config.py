"""A target's config.json and generation_config.json -> TargetSpec.

Knows the keys that all families share; `families/` knows the others. Refuses other architectures and unknown keys.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from dflash_trt.checkpoint.config_reader import ConfigReader, read_json_object, shown
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, read_sizes, require_plain_decoder
from dflash_trt.checkpoint.drafters.base import draft_formats
from dflash_trt.checkpoint.families.base import Family, all_families, family_of
from dflash_trt.checkpoint.foreign_keys import HARMLESS_KEYS, MTP_KEYS, VISION_KEYS
from dflash_trt.checkpoint.producers.base import require_known_producer
from dflash_trt.core.frozen import checked
from dflash_trt.core.model.decoder import TargetSpec

_LABEL = "target config.json"


def parse_target(
    directory: Path,
    problems: list[str],
    *,
    notes: list[str],
    tensor_names: Collection[str] = (),
    drafts_itself: bool = False,
) -> TargetSpec | None:
    """Read the spec of the target in `directory`; None if `problems` has grown. `notes` get assumptions.

    They also say what the engine omits: an MTP head of the config or among `tensor_names`, unless the target
    `drafts_itself` with it.
    """
    num_problems = len(problems)
    fields = read_json_object(directory / "config.json", label=_LABEL, problems=problems)
    if fields is None:
        return None
    reader = ConfigReader(fields, label=_LABEL, problems=problems, notes=notes)
    missing = missing_feature(fields)
    family = _read_family(reader, fields, missing)
    if family is None:
        return None  # errors about the other keys would only be noise
    reader = ConfigReader(_with_defaults(fields, family, notes), label=_LABEL, problems=problems, notes=notes)
    model = _language_model(reader)
    reader.ignore(("architectures",))
    hint = f"{fields['architectures'][0]} is a {family} model" if missing is None else missing
    spellings = (family, *all_families()[family].other_model_types)
    model.require("model_type", *spellings, default=family, hint=f"{hint}.")
    spec_fields = _read_fields(model, family)
    spec_fields["is_embedding_tied"] = _is_embedding_tied(reader, model)
    spec_fields["eos_token_ids"] = _read_eos(directory, (model, reader), problems)
    for each in dict.fromkeys((reader, model)):
        each.ignore(HARMLESS_KEYS)
        each.finish()
    notes += _left_out(fields, None if drafts_itself else all_families()[family], tensor_names)
    if len(problems) > num_problems:
        return None
    return checked(TargetSpec, spec_fields, label=_LABEL, problems=problems)


def _read_family(reader: ConfigReader, fields: dict[str, Any], missing: str | None) -> str | None:
    """`missing` is what a known family lacks here."""
    architectures = reader.value("architectures")
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    family = family_of(name, reader.value("model_type"))
    if family is None:
        known = sorted({name for family in all_families().values() for name in family.architectures})
        hint = "Use a supported target." if missing is None else f"{missing}. Use another target."
        if any(known.recognizes(fields) for known in draft_formats().values()):
            hint = "This is a drafter: pass it as the drafter, and the model that it drafts for as the target."
        reader.refuse("architectures", expected=f"one of {', '.join(known)}", hint=hint)
        return None
    return family


def _with_defaults(fields: dict[str, Any], family: str, notes: list[str]) -> dict[str, Any]:
    """The file with transformers' defaults for the keys that its language model lacks."""
    nested = fields.get("text_config")
    model = nested if isinstance(nested, dict) else fields
    absent = {name: value for name, value in all_families()[family].defaults.items() if name not in model}
    if not absent:
        return fields
    values = ", ".join(f"{name} {shown(value)}" for name, value in absent.items())
    notes.append(f"{_LABEL} has no {', '.join(absent)}: as in transformers, {values}")
    return fields | ({"text_config": model | absent} if model is nested else absent)


def _language_model(reader: ConfigReader) -> ConfigReader:
    """The reader itself, or a reader of `text_config` for a multimodal model's checkpoint."""
    section = reader.optional_section("text_config")
    if section is None:
        return reader
    reader.ignore(("model_type", *VISION_KEYS))
    require_known_producer(reader)  # its section stands outside of `text_config`
    section.ignore(("architectures",))
    return section


def _left_out(fields: dict[str, Any], drafting: Family | None, tensor_names: Collection[str]) -> list[str]:
    """One line on the parts of a published model that an engine omits, or nothing. `drafting` layers may be some."""
    nested = fields.get("text_config")
    model = nested if isinstance(nested, dict) else fields
    parts, hint = ["images, video and audio"] * (model is nested), ""
    if drafting is not None:
        found = [f"{name} {shown(model[name])}" for name in MTP_KEYS if model.get(name)]
        head = drafting.mtp
        if head is not None and not found and f"{head.fc}.weight" in tensor_names:
            found = [f"{head.prefix}*"]
        parts += [f"its own drafting layers ({', '.join(found)})"] if found else []
        hint = "; --drafter mtp drafts with them" if found and head is not None else ""
    return [f"{_LABEL}: the engine runs the language model without {' and '.join(parts)}{hint}"] if parts else []


def _is_embedding_tied(*readers: ConfigReader) -> bool:
    """The outer file decides, where it has the key (transformers)."""
    flags = [reader.optional_flag("tie_word_embeddings") for reader in readers]
    return bool(next((flag for flag in flags if flag is not None), False))


def _read_fields(reader: ConfigReader, family: str) -> dict[str, Any]:
    """Read all fields but the end-of-sequence ids, which have their own file."""
    require_plain_decoder(reader, activation=all_families()[family].activation)
    read_model = all_families()[family].read_model
    if read_model is None:
        reader.require("final_logit_softcapping", hint=NOT_IMPLEMENTED)
    sizes = read_sizes(reader)
    layers = all_families()[family].read_layers(reader, sizes)
    most, trained = all_families()[family].max_positions, sizes.max_position_embeddings
    return {
        **sizes.spec_fields(),
        "max_position_embeddings": trained if most is None else most(reader, trained),
        "family": family,
        "vocab_size": sizes.vocab_size,
        "has_offset_norms": all_families()[family].has_offset_norms,
        "bos_token_id": reader.optional_integer("bos_token_id", minimum=0),
        "layers": layers,
        **({} if read_model is None else read_model(reader, sizes)),
    }


def _read_eos(directory: Path, readers: Iterable[ConfigReader], problems: list[str]) -> tuple[int, ...]:
    """Read the eos ids of generation_config.json if it has any, else of config.json, inner section first."""
    found = [reader.optional_integers("eos_token_id") for reader in readers]
    own = next((ids for ids in found if ids), ())
    path = directory / "generation_config.json"
    if not path.is_file():
        return own
    label = "target generation_config.json"
    fields = read_json_object(path, label=label, problems=problems)
    if fields is None:
        return own
    return ConfigReader(fields, label=label, problems=problems).optional_integers("eos_token_id") or own


_DEEPSEEK_V4 = "DeepSeek-V4 has hyper-connections and compressed caches: streams besides the residual, new states"
_MINIMAX_M3 = "MiniMax-M3 attends to blocks of its context that it chooses: an indexer besides the pages"
_QWEN3_VL = "Qwen3-VL's language model has a config and names of its own, which no family here reads"
_REASONS: Final = {
    "deepseek_ref": _DEEPSEEK_V4,
    "deepseek_v4": _DEEPSEEK_V4,
    "kimi_linear": "Kimi-K3 has delta attention whose decay is by channel: records of a recurrent state of that kind",
    "kimi_k3": "Kimi-K3 has delta attention whose decay is by channel: records of a recurrent state of that kind",
    "mimo": "MiMo-7B has a config of its own, which no family here reads",
    "mimo_v2_flash": "MiMo-V2 has heads whose V is narrower than K, and scales V: not implemented",
    "minimax_m3": _MINIMAX_M3,
    "minimax_m3_vl": _MINIMAX_M3,
    "ministral3": "Ministral 3 has a temperature of scores, as Llama 4, but in layers with RoPE: not implemented",
    "mixtral": "Mixtral's experts have keys and names of their own, which no family here reads",
    "muse_glimmer": "Muse has layers of a kind of its own, which no public code describes",
    "nemotron-nas": "Nemotron-NAS has other sizes in each layer, and layers without attention or MLP: not implemented",
    "nemotron_h": "Nemotron-H has Mamba-2 layers: recurrent states of another kind",
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen4_exp": "its layers have n-gram embeddings, hyper-connections and sparse attention: none is implemented",
    "step3p7": "Step-3.7 has a config and names of its own, which no family here reads",
}


def missing_feature(fields: Mapping[str, Any]) -> str | None:
    """The unimplemented feature that a config.json's family needs; None for an unknown family."""
    inner = fields.get("text_config")
    types = [fields.get("model_type"), inner.get("model_type") if isinstance(inner, dict) else None]
    return next((_REASONS[name] for name in types if isinstance(name, str) and name in _REASONS), None)
