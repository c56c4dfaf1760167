"""`quant_method: fp8`: 128 x 128 blocks (DeepSeek, Qwen, MiniMax), or a scale per tensor (AutoFP8).

`fbgemm_fp8` (Meta's Llama 3.1): a scale for each row, and activations that are quantized token by token.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.producers.base import (
    FLOATS,
    Producer,
    Scheme,
    StoredField,
    StoredFormat,
    name_matcher,
    pattern_problems,
    section_reader,
    spellings,
)
from dflash_trt.formats.fp8_block import BLOCK_SIZE

_CODES = StoredField(suffix="weight")
_BLOCKS = StoredFormat(
    format="fp8_block",
    fields={"codes": _CODES, "block_scale": StoredField(suffix="weight_scale_inv", dtypes=FLOATS)},  # it multiplies
)
_SCALE = StoredField(suffix="weight_scale", dtypes=FLOATS)
_DYNAMIC = StoredFormat(format="fp8_w8a16", fields={"codes": _CODES, "weight_scale": _SCALE})
_STATIC = StoredFormat(
    format="fp8",
    fields={"codes": _CODES, "weight_scale": _SCALE, "input_scale": StoredField(suffix="input_scale", dtypes=FLOATS)},
)
_ROWS = StoredFormat(
    format="fp8_w8a16",
    fields={"codes": _CODES, "weight_scale": _SCALE},
    ignored=("input_scale_ub",),  # a bound for scales of activations
)
_METHODS = ("fp8", "fbgemm_fp8")
_LISTS = ("modules_to_not_convert", "ignored_layers")


def recognizes(section: Mapping[str, Any]) -> bool:
    return section.get("quant_method") in _METHODS


def read(fields: Mapping[str, Any], subject: str, problems: list[str]) -> Scheme | None:
    num_problems = len(problems)
    reader = section_reader(fields, subject, problems)
    reader.ignore(("quant_method",))
    stored = _stored(reader)
    ignored = tuple(name for key in _LISTS for name in reader.optional_texts(key) or ())
    problems += pattern_problems(ignored, subject)
    reader.finish()
    if len(problems) > num_problems:
        return None
    names, is_named = frozenset(ignored), name_matcher(ignored)

    def format_of(module: str) -> StoredFormat | None:
        if not ignored:
            return stored
        is_ignored = any(end in names for known in spellings(module) for end in _ends(known))
        return None if is_ignored or is_named(module) else stored

    return Scheme(source=subject, format_of=format_of)


def _stored(reader: ConfigReader) -> StoredFormat:
    if reader.value("quant_method") == "fbgemm_fp8":
        reader.ignore(("activation_scale_ub",))
        return _ROWS
    hint = "Use a checkpoint with blocks of 128 x 128 or with a scale per tensor."
    reader.ignore(("dequantize",))
    reader.require("fmt", "e4m3", "float8_e4m3fn", hint=hint)
    reader.require("scale_fmt", "float", "ue8m0", hint=hint)  # powers of two, in float32 as well
    reader.require("activation_scheme", "dynamic", "static", hint=hint)
    reader.require("weight_block_size", [BLOCK_SIZE, BLOCK_SIZE], hint=hint)
    if reader.has("weight_block_size"):
        return _BLOCKS
    return _STATIC if reader.value("activation_scheme") == "static" else _DYNAMIC


def _ends(name: str) -> Iterator[str]:
    """Dotted beginnings and ends: a list may name a module, one that contains it, or the end of its name."""
    words = name.split(".")
    for length in range(1, len(words) + 1):
        yield ".".join(words[:length])
        yield ".".join(words[-length:])


PRODUCER = Producer(name="FP8 (quant_method fp8 or fbgemm_fp8)", recognizes=recognizes, read=read)
