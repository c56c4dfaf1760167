"""DSpark as DeepSeek's DeepSpec, SGLang's SpecForge and NVIDIA publish it: z-lab's keys, and those of its heads.

DeepSpec (`deepspec/modeling/dspark/qwen3/config.py`) has all keys at the top level, SpecForge and NVIDIA in
`dflash_config`. All of them train slot j of a block on token j + 1: the anchor's slot makes the first draft.
"""

from collections.abc import Collection, Mapping
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED
from dflash_trt.checkpoint.drafters import zlab
from dflash_trt.checkpoint.drafters.base import LABEL, DraftFields, DraftFormat
from dflash_trt.checkpoint.drafters.dspark import read_heads
from dflash_trt.checkpoint.drafters.speculators import SPECULATORS_KEY

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")

_KEYS = (
    "attention_mode",
    "confidence_head_alpha",
    "confidence_head_with_markov",
    "enable_confidence_head",
    "final_logit_softcapping",
    "markov_head_type",
    "markov_rank",
    "output_multiplier",
    "projector_type",
    "sample_from_anchor",
    "shift_label",
    "use_confidence_head",
)


def recognizes(fields: Mapping[str, Any]) -> bool:
    names = fields.get("architectures")
    return SPECULATORS_KEY not in fields and isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES


def read(
    fields: Mapping[str, Any], tensor_names: Collection[str], problems: list[str], notes: list[str]
) -> DraftFields:
    """Read the fields of a DraftSpec. DeepSpec's files have copies of the target's embedding and head."""
    stated = zlab.merged(fields, problems)
    own = {name: stated.pop(name) for name in _KEYS if name in stated}
    reader = ConfigReader(own, label=LABEL, problems=problems, notes=notes)
    for name in ("final_logit_softcapping", "output_multiplier"):
        reader.require(name, hint=NOT_IMPLEMENTED)
    reader.require("projector_type", "dspark", hint=NOT_IMPLEMENTED)
    reader.require("attention_mode", "gqa", hint=NOT_IMPLEMENTED)
    reader.ignore(("confidence_head_alpha",))
    from_anchor = reader.flag("sample_from_anchor", default=True)
    reader.require("shift_label", from_anchor, hint="It is sample_from_anchor under another name.")
    heads = read_heads(
        reader, drafts_from_anchor=from_anchor, has_confidence=reader.flag("use_confidence_head", default=False)
    )
    reader.finish()
    found = zlab.read({**stated, "architectures": [zlab.ARCHITECTURE]}, tensor_names, problems, notes)
    has_own_head = "lm_head.weight" in tensor_names
    return {
        **found,
        **heads,
        "source_format": "deepspec",
        "has_own_embedding": "embed_tokens.weight" in tensor_names,
        "draft_vocab_size": found["target_vocab_size"] if has_own_head else None,
    }


FORMAT = DraftFormat(name="deepspec", recognizes=recognizes, read=read)
