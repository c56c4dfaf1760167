"""`quant_method: fp8`: blocks of 128 x 128 (DeepSeek, Qwen, MiniMax), or one scale per tensor (AutoFP8)."""

from collections.abc import Mapping
from typing import Any

from dflash_trt.checkpoint.producers.base import (
    FLOATS,
    Producer,
    Scheme,
    StoredField,
    StoredFormat,
    is_named,
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
_LISTS = ("modules_to_not_convert", "ignored_layers")


def recognizes(section: Mapping[str, Any]) -> bool:
    return section.get("quant_method") == "fp8"


def read(fields: Mapping[str, Any], subject: str, problems: list[str]) -> Scheme | None:
    num_problems = len(problems)
    reader = section_reader(fields, subject, problems)
    hint = "Use a checkpoint with blocks of 128 x 128 or with a scale per tensor."
    reader.ignore(("quant_method", "dequantize"))
    reader.require("fmt", "e4m3", "float8_e4m3fn", hint=hint)
    reader.require("scale_fmt", "float", "ue8m0", hint=hint)  # powers of two, in float32 as well
    reader.require("activation_scheme", "dynamic", "static", hint=hint)
    reader.require("weight_block_size", [BLOCK_SIZE, BLOCK_SIZE], hint=hint)
    stored = _STATIC if reader.value("activation_scheme") == "static" else _DYNAMIC
    if reader.has("weight_block_size"):
        stored = _BLOCKS
    ignored = tuple(name for key in _LISTS for name in reader.optional_texts(key) or ())
    problems += pattern_problems(ignored, subject)
    reader.finish()
    if len(problems) > num_problems:
        return None
    return Scheme(
        source=subject, format_of=lambda module: None if any(_is_within(module, name) for name in ignored) else stored
    )


def _is_within(module: str, name: str) -> bool:
    """True if a list names a module, one that contains it, or the end of its name."""
    if is_named(module, name):
        return True
    return any(known.startswith(f"{name}.") or known.endswith(f".{name}") for known in spellings(module))


PRODUCER = Producer(name="FP8 (quant_method fp8)", recognizes=recognizes, read=read)
