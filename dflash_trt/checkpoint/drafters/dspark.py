"""Keys of DSpark's heads, which DeepSpec, SpecForge, NVIDIA and Speculators name alike -> fields of a DraftSpec."""

from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED

_TYPES = ("vanilla", "gated", "rnn")


def read_heads(
    reader: ConfigReader,
    *,
    drafts_from_anchor: bool,
    default_rank: int | None = None,
    has_confidence: bool,  # unless the file says otherwise
) -> dict[str, Any]:
    """Fields of a DraftSpec. A Markov head is required: a drafter without one is DFlash."""
    rank = reader.optional_integer("markov_rank") or default_rank
    if rank is None:
        reader.refuse("markov_rank", expected="the rank of its Markov head", hint="Use a complete checkpoint.")
    reader.require("markov_head_type", *_TYPES, hint=NOT_IMPLEMENTED)
    has_confidence = reader.flag("enable_confidence_head", default=has_confidence)
    reads_token = reader.optional_flag("confidence_head_with_markov")
    if has_confidence and reads_token is None:
        reader.note(
            "confidence_head_with_markov", "the confidence head reads the previous draft, as in DeepSpec's files"
        )
    heads = {
        "rank": rank or 1,
        "markov_type": reader.value("markov_head_type") or _TYPES[0],
        "drafts_from_anchor": drafts_from_anchor,
        "has_confidence": has_confidence,
        "confidence_reads_token": reads_token is not False,
    }
    return {"algorithm": "dspark", "heads": heads}
