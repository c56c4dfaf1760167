"""ModelOpt: hf_quant_config.json, or `quantization_config` of config.json.

Reads both schemas of ModelOpt 0.47, the nested one and the flat one of config.json. Refuses unknown algorithms by name.
Experts are a matrix each, or, in Llama 4, [experts, in, out] in one tensor, packed along `in`, with one number for all
of them where a matrix has one; FP8_PER_CHANNEL_PER_TOKEN has one scale for each of these experts.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dflash_trt.checkpoint.config_reader import shown
from dflash_trt.checkpoint.producers.base import Producer, Scheme, StoredField, StoredFormat, spellings
from dflash_trt.core.errors import problem
from dflash_trt.formats.registry import weight_format

QUANT_CONFIG_FILE = "hf_quant_config.json"

_CODES, _INPUT_SCALE = StoredField(suffix="weight"), StoredField(suffix="input_scale")
_SCALE = StoredField(suffix="weight_scale")
_NVFP4 = {"codes": _CODES, "block_scale": _SCALE, "weight_scale": StoredField(suffix="weight_scale_2")}
_BLOCKS = StoredFormat(format="fp8_block", fields={"codes": _CODES, "block_scale": _SCALE})
_ALGORITHMS = {
    "FP8": StoredFormat(format="fp8", fields={"codes": _CODES, "weight_scale": _SCALE, "input_scale": _INPUT_SCALE}),
    "NVFP4": StoredFormat(format="nvfp4", fields=_NVFP4 | {"input_scale": _INPUT_SCALE}),
    "W4A16_NVFP4": StoredFormat(format="nvfp4_w4a16", fields=_NVFP4),
    "FP8_PB_WO": _BLOCKS,
    "fp8_pb_wo": _BLOCKS,  # as its exporter spells it
    "FP8_PER_CHANNEL_PER_TOKEN": StoredFormat(format="fp8_w8a16", fields={"codes": _CODES, "weight_scale": _SCALE}),
}
_MIXED = "MIXED_PRECISION"
_WILD = re.compile(r"[*?[]")
_OTHER_EXPORT = f"Export it from ModelOpt with one of {', '.join(_ALGORITHMS)}, or use the unquantized checkpoint."


def stored_as(format_name: str) -> tuple[str, StoredFormat]:
    """The algorithm and the tensors that ModelOpt has for a format; it must have one."""
    return next((name, stored) for name, stored in _ALGORITHMS.items() if stored.format == format_name)


def recognizes(section: Mapping[str, Any]) -> bool:
    producer = section.get("producer")
    return section.get("quant_method") == "modelopt" or (
        isinstance(producer, dict) and producer.get("name") == "modelopt"
    )


def read(fields: Mapping[str, Any], subject: str, problems: list[str]) -> Scheme | None:
    """`quantized_layers` list the modules of mixed precision.

    Else `quant_algo` covers all but some modules.
    """
    section = fields.get("quantization", fields)
    if not isinstance(section, dict):
        problems.append(problem(subject, expected="a JSON object", found=shown(section), hint=_OTHER_EXPORT))
        return None
    found = list(_problems_of(section, subject))
    problems += found
    if found:
        return None
    algorithm = section.get("quant_algo")
    default = None if algorithm in (None, _MIXED) else _ALGORITHMS[algorithm]
    excluded = [_plain_name(name) for name in section.get("exclude_modules", section.get("ignore")) or []]
    layers = {
        _plain_name(name): _ALGORITHMS[entry["quant_algo"]]
        for name, entry in (section.get("quantized_layers") or {}).items()
    }

    is_excluded = _matcher(excluded)

    def format_of(module: str) -> StoredFormat | None:
        names = _names_in_lists(module)
        if layers:
            return next((layers[name] for name in names if name in layers), None)
        return None if any(map(is_excluded, names)) else default

    has_fp8_kv = _kv_algorithm(section) == "FP8"
    return Scheme(
        source=subject, format_of=format_of, has_fp8_kv=has_fp8_kv, quantizes_transposed=True, names_scales_in_full=True
    )


def _problems_of(section: Mapping[str, Any], subject: str) -> Iterator[str]:
    algorithm, layers = section.get("quant_algo"), section.get("quantized_layers")
    expected = f"one of {', '.join((*_ALGORITHMS, _MIXED))}"
    if algorithm is not None and algorithm not in (*_ALGORITHMS, _MIXED):
        yield problem(f"{subject}: quant_algo", expected=expected, found=shown(algorithm), hint=_OTHER_EXPORT)
    if algorithm == _MIXED and not layers:
        yield problem(f"{subject}: quantized_layers", expected="the modules", found="none", hint=_OTHER_EXPORT)
    excluded = section.get("exclude_modules", section.get("ignore")) or []
    if not isinstance(excluded, list) or not all(isinstance(name, str) for name in excluded):
        yield problem(f"{subject}: exclude_modules", expected="a list of names", found=shown(excluded))
    yield from _group_size_problems(section, subject)
    if layers is not None and not isinstance(layers, dict):
        found = shown(layers)
        yield problem(f"{subject}: quantized_layers", expected="a JSON object", found=found, hint=_OTHER_EXPORT)
    for name, entry in (layers if isinstance(layers, dict) else {}).items():
        where = f"{subject}: quantized_layers '{name}'"
        entry_algorithm = entry.get("quant_algo") if isinstance(entry, dict) else entry
        if not isinstance(entry, dict) or entry_algorithm not in tuple(_ALGORITHMS):
            known = f"one of {', '.join(_ALGORITHMS)}"
            yield problem(f"{where} quant_algo", expected=known, found=shown(entry_algorithm), hint=_OTHER_EXPORT)
        else:
            yield from _group_size_problems(entry, where)
    kv_algorithm = _kv_algorithm(section)
    if kv_algorithm not in (None, "FP8"):
        hint = "Export it with FP8 K/V, or without K/V quantization."
        yield problem(f"{subject}: kv_cache_quant_algo", expected="FP8 or null", found=shown(kv_algorithm), hint=hint)


def _group_size_problems(section: Mapping[str, Any], subject: str) -> Iterator[str]:
    algorithm, group_size = section.get("quant_algo"), section.get("group_size")
    stored = _ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    block = 1 if stored is None else weight_format(stored.format).columns_per_block
    if block > 1 and group_size not in (None, block):
        hint = f"{algorithm} has blocks of {block} columns: export the checkpoint again."
        yield problem(f"{subject}: group_size of {algorithm}", expected=str(block), found=shown(group_size), hint=hint)


def _kv_algorithm(section: Mapping[str, Any]) -> Any:
    """`kv_cache_quant_algo`, or its equivalent in the flat schema's `kv_cache_scheme`."""
    scheme = section.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        is_fp8 = scheme.get("num_bits") == 8 and scheme.get("type") == "float" and not scheme.get("dynamic")
        return "FP8" if is_fp8 else scheme
    return section.get("kv_cache_quant_algo", scheme)


def _names_in_lists(module: str) -> tuple[str, ...]:
    """Names of a module in lists; stacked experts are listed as the module that holds both their tensors."""
    owner, _, _ = module.rpartition(".")
    return (*spellings(module), *(spellings(owner) if owner.endswith(".experts") else ()))


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """True for names that an fnmatch pattern matches. One regex for all: there are thousands of both."""
    whole = frozenset(patterns)
    wild = re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns if _WILD.search(pattern)) or r"(?!)")
    return lambda name: name in whole or wild.match(name) is not None


def _plain_name(name: str) -> str:
    """Remove the prefix that a drafter's modules had in training."""
    return name.removeprefix("dflash_module.")


PRODUCER = Producer(name="ModelOpt", recognizes=recognizes, read=read, own_file=QUANT_CONFIG_FILE)
