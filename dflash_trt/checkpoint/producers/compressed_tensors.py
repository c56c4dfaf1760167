"""`quant_method: compressed-tensors`: FP8, NVFP4, INT8 and INT4 of llm-compressor, and the experts of Kimi.

A group of `config_groups` quantizes the modules that its `targets` name. A name goes before an expression, an
expression before the class `Linear`. The global scales of NVFP4 divide.
"""

from collections.abc import Mapping
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader, shown
from dflash_trt.checkpoint.producers.base import (
    FLOATS,
    WORDS,
    Producer,
    Scheme,
    StoredField,
    StoredFormat,
    is_named,
    name_matcher,
    pattern_problems,
    section_reader,
)
from dflash_trt.core.errors import problem
from dflash_trt.formats import fp8_block, int4
from dflash_trt.formats.registry import weight_format

_FP8_FILES = ("float-quantized", "naive-quantized")
_INT8_FILES = ("int-quantized", "naive-quantized")
_LINEAR_CLASS = "Linear"
_HINT = "Use an unquantized checkpoint, or one with FP8, NVFP4, INT8 or INT4 weights."
_WEIGHTS = (
    "float 8 per tensor, per channel or in blocks of 128 x 128, float 4 in groups of 16, symmetric int 8 per tensor or "
    "per channel, or symmetric int 4 in groups of a multiple of 32"
)

_CODES = StoredField(suffix="weight")
_PACKED = StoredField(suffix="weight_packed")
_SCALE = StoredField(suffix="weight_scale", dtypes=FLOATS)
_SCALED = {"codes": _CODES, "weight_scale": _SCALE}
_NVFP4 = {
    "codes": _PACKED,
    "block_scale": StoredField(suffix="weight_scale"),
    "weight_scale": StoredField(suffix="weight_global_scale", is_reciprocal=True),
}


def recognizes(section: Mapping[str, Any]) -> bool:
    return section.get("quant_method") == "compressed-tensors"


def read(fields: Mapping[str, Any], subject: str, problems: list[str]) -> Scheme | None:
    num_problems = len(problems)
    reader = section_reader(fields, subject, problems)
    reader.ignore(("quant_method", "version", "global_compression_ratio"))
    for name in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        reader.require(name, {}, hint="Sparsity and rotations are not implemented.")
    reader.require("quantization_status", "compressed", "frozen", hint="Save the checkpoint compressed.")
    ignored = reader.optional_texts("ignore") or ()
    groups = _read_groups(reader)
    has_fp8_kv = _read_kv_scheme(reader)
    patterns = tuple(pattern for targets, _ in groups for pattern in targets)
    problems += pattern_problems((*ignored, *patterns), subject)
    reader.finish()
    if len(problems) > num_problems:
        return None

    is_ignored = name_matcher(ignored)

    def format_of(module: str) -> StoredFormat | None:
        return None if _LINEAR_CLASS in ignored or is_ignored(module) else _of_targets(module, groups)

    return Scheme(source=subject, format_of=format_of, has_fp8_kv=has_fp8_kv, kv_scale="self_attn.{x}_scale")


_Groups = list[tuple[tuple[str, ...], StoredFormat]]


def _of_targets(module: str, groups: _Groups) -> StoredFormat | None:
    """The group with the most specific target."""
    found: dict[int, StoredFormat] = {}
    for targets, stored in groups:
        for target in targets:
            if target == _LINEAR_CLASS:
                found.setdefault(2, stored)
            elif is_named(module, target):
                found.setdefault(1 if target.startswith("re:") else 0, stored)
    return found[min(found)] if found else None


def _read_groups(reader: ConfigReader) -> _Groups:
    """Targets and layout of each group; what is not implemented goes to the reader's problems."""
    section = reader.optional_section("config_groups")
    groups = reader.value("config_groups")
    if section is None or not isinstance(groups, dict) or not groups:
        reader.refuse("config_groups", expected="at least one group of quantized modules", hint=_HINT)
        return []
    file_format, found = reader.optional_text("format"), []
    for name in groups:
        group = section.optional_section(name)
        if group is None:
            section.refuse(name, expected="a JSON object", hint=_HINT)
            continue
        targets = group.optional_texts("targets") or ()
        group.require("output_activations", hint="Quantized outputs are not implemented.")
        stored = _stored_format(group, group.optional_text("format") or file_format)
        group.finish()
        if stored is not None:
            found.append((targets, stored))
    return found


def _stored_format(group: ConfigReader, file_format: str | None) -> StoredFormat | None:
    weights, inputs = group.value("weights"), group.value("input_activations")
    if not isinstance(weights, dict) or not isinstance(inputs, dict | None):
        group.refuse("weights", expected=_WEIGHTS, hint=_HINT)
        return None
    # Static scales of the activations are stored; "local" is NVFP4's way to say that block scales are dynamic.
    is_static = inputs is not None and inputs.get("dynamic") in (False, None, "local")
    stored, files = _layout(weights, is_static=is_static)
    if stored is None or not _is_plain(weights):
        group.refuse("weights", expected=_WEIGHTS, hint=_HINT)
    elif file_format not in files:
        expected, found = " or ".join(files), shown(file_format)
        group.problems.append(problem(f"{group.subject('weights')} format", expected=expected, found=found, hint=_HINT))
    elif weight_format(stored.format).has_token_scales:
        if is_static or not _are_tokens_of_int8(inputs or {}):
            expected = f"symmetric int 8 with a dynamic scale per token for {stored.format} weights"
            group.refuse("input_activations", expected=expected, hint=_HINT)
    elif is_static and not _fits(stored, inputs or {}):
        expected = f"activations as {stored.format} has them, dynamic ones, or none"
        group.refuse("input_activations", expected=expected, hint=_HINT)
    return stored


def _layout(weights: Mapping[str, Any], *, is_static: bool) -> tuple[StoredFormat | None, tuple[str, ...]]:
    """Layout of the weights, and the file formats that have it."""
    kind, strategy = (weights.get("type"), weights.get("num_bits")), weights.get("strategy")
    group_size = weights.get("group_size")
    if kind == ("float", 8):
        return _fp8_layout(weights, is_static=is_static), _FP8_FILES
    if kind == ("float", 4) and strategy == "tensor_group" and group_size == 16:
        scale = {"input_scale": StoredField(suffix="input_global_scale", is_reciprocal=True)} if is_static else {}
        name = "nvfp4" if is_static else "nvfp4_w4a16"
        return StoredFormat(format=name, fields=_NVFP4 | scale), ("nvfp4-pack-quantized",)
    if kind == ("int", 8) and strategy in ("tensor", "channel"):
        return StoredFormat(format="int8", fields=_SCALED), _INT8_FILES
    if kind == ("int", 4) and strategy == "group" and isinstance(group_size, int) and not is_static:
        repeats, rest = divmod(group_size, int4.BLOCK_SIZE)
        if repeats > 0 and rest == 0:
            scale = {"block_scale": StoredField(suffix="weight_scale", dtypes=FLOATS, repeats=repeats)}
            codes = {"codes": StoredField(suffix="weight_packed", dtypes=WORDS)}
            stored = StoredFormat(format="int4", fields=codes | scale, ignored=("weight_shape",))
            return stored, ("pack-quantized",)
    return None, ()


def _fp8_layout(weights: Mapping[str, Any], *, is_static: bool) -> StoredFormat | None:
    strategy = weights.get("strategy")
    if strategy == "block" and weights.get("block_structure") == [fp8_block.BLOCK_SIZE] * 2 and not is_static:
        return StoredFormat(format="fp8_block", fields={"codes": _CODES, "block_scale": _SCALE})
    if strategy == "tensor" and is_static:
        scale = {"input_scale": StoredField(suffix="input_scale", dtypes=FLOATS)}
        return StoredFormat(format="fp8", fields=_SCALED | scale)
    if strategy in ("tensor", "channel") and not is_static:
        return StoredFormat(format="fp8_w8a16", fields=_SCALED)
    return None


def _is_plain(weights: Mapping[str, Any]) -> bool:
    """No zero points, and no order of columns that has to be looked up."""
    return weights.get("symmetric", True) is True and weights.get("actorder") in (None, False, "weight", "static")


def _fits(stored: StoredFormat, inputs: Mapping[str, Any]) -> bool:
    """True if static activations have the weight format."""
    kind = (inputs.get("type"), inputs.get("num_bits"), inputs.get("strategy"))
    wanted = {"fp8": ("float", 8, "tensor"), "nvfp4": ("float", 4, "tensor_group")}
    return inputs.get("symmetric", True) is True and kind == wanted.get(stored.format)


def _are_tokens_of_int8(inputs: Mapping[str, Any]) -> bool:
    kind = (inputs.get("type"), inputs.get("num_bits"), inputs.get("strategy"))
    return inputs.get("symmetric", True) is True and kind == ("int", 8, "token")


def _read_kv_scheme(reader: ConfigReader) -> bool:
    """True for FP8 K/V with static scales, one per tensor."""
    section = reader.value("kv_cache_scheme")
    if section is None:
        return False
    wanted = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}
    if (
        not isinstance(section, dict)
        or any(section.get(key, value) != value for key, value in wanted.items())
        or section.get("dynamic")
    ):
        hint = "Use a checkpoint with FP8 K/V, or without K/V quantization."
        reader.refuse("kv_cache_scheme", expected="FP8 per tensor, static, or null", hint=hint)
    return True


PRODUCER = Producer(name="compressed-tensors", recognizes=recognizes, read=read)
