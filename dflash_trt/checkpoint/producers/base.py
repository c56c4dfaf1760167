"""The quantization of a checkpoint, as its producer describes and stores it, and all producers.

Knows no format and no producer by name. `quantized_weights` finds and reads the tensors.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from dflash_trt.checkpoint import producers
from dflash_trt.checkpoint.config_reader import ConfigReader, read_json_object
from dflash_trt.core.errors import problem

CONFIG_FILE, SECTION = "config.json", "quantization_config"
FLOATS = ("F32", "BF16", "F16")
WORDS = ("I32",)  # four bytes of codes each, little-endian
_WRAPPER = "language_model."  # prefix of the decoder in multimodal checkpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredField:
    """The tensor `MODULE.SUFFIX` that holds one field of a weight.

    `dtypes` are in safetensors' spelling (default: the dtype that the engine keeps). A number that `is_reciprocal`
    divides. Each block scale stands for `repeats` of the engine's.
    """

    suffix: str
    dtypes: tuple[str, ...] = ()
    is_reciprocal: bool = False
    repeats: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFormat:
    """A weight format in a producer's layout, with the format's `fields`.

    `ignored` suffixes are redundant.
    """

    format: str
    fields: Mapping[str, StoredField]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The quantization of one checkpoint. `format_of` takes a module, e.g. `model.layers.0.mlp.down_proj`.

    `source` is where it is described, for messages. `kv_scale` is the K/V scale of a layer, `{x}` for k or v.
    `quantizes_transposed`: experts in one tensor [experts, in, out] may be quantized, too. `names_scales_in_full`: a
    scale of experts in one tensor is `gate_up_proj_weight_scale`, not `gate_up_proj_scale`.
    """

    source: str
    format_of: Callable[[str], StoredFormat | None]
    has_fp8_kv: bool = False
    kv_scale: str = "self_attn.{x}_proj.{x}_scale"
    quantizes_transposed: bool = False
    names_scales_in_full: bool = False


@dataclass(frozen=True, kw_only=True)
class Producer:
    """`recognizes` a `quantization_config`.

    `read(fields, subject, problems)` is None if `problems` has grown. `subject` names the description for messages;
    `own_file` may have it instead of config.json.
    """

    name: str
    recognizes: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any], str, list[str]], Scheme | None]
    own_file: str | None = None


@cache
def all_producers() -> tuple[Producer, ...]:
    modules: list[Any] = [
        import_module(f"{producers.__name__}.{module.name}") for module in iter_modules(producers.__path__)
    ]
    return tuple(module.PRODUCER for module in modules if hasattr(module, "PRODUCER"))


def description_files() -> list[str]:
    """Files besides config.json that may describe a quantization."""
    return [producer.own_file for producer in all_producers() if producer.own_file is not None]


def read_scheme(directory: Path, *, label: str, problems: list[str]) -> Scheme | None:
    """Read a checkpoint's quantization; None for an unquantized one, or if `problems` has grown."""
    for producer in all_producers():
        if producer.own_file is not None and (path := directory / producer.own_file).is_file():
            subject = f"{label} {producer.own_file}"
            fields = read_json_object(path, label=subject, problems=problems)
            return None if fields is None else producer.read(fields, subject, problems)
    section = section_of(directory)
    known = producer_of(section)
    # Others are refused where the spec is read.
    return None if known is None else known.read(section, f"{label} {CONFIG_FILE} key '{SECTION}'", problems)


def producer_of(section: Any) -> Producer | None:
    """The producer of a `quantization_config`, or None."""
    if not isinstance(section, dict):
        return None
    return next((producer for producer in all_producers() if producer.recognizes(section)), None)


def require_known_producer(reader: ConfigReader) -> None:
    """Refuse a checkpoint quantized by any other tool; `read_scheme` reads those that are known."""
    section = reader.value(SECTION)
    if section is not None and producer_of(section) is None:
        expected = f"none, or one of {', '.join(producer.name for producer in all_producers())}"
        reader.refuse(SECTION, expected=expected, hint="Use the unquantized checkpoint.")


def section_reader(fields: Mapping[str, Any], subject: str, problems: list[str]) -> ConfigReader:
    """A strict reader of `quantization_config`, for a `subject` as `read_scheme` makes it."""
    label = subject.removesuffix(f" key '{SECTION}'")
    return ConfigReader(fields, label=label, problems=problems, prefix=f"{SECTION}.")


def name_matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """`is_named` for any of many patterns: there are hundreds of them, and thousands of modules."""
    names = frozenset(patterns)
    expressions = [pattern for pattern in names if pattern.startswith("re:")]

    def is_one(module: str) -> bool:
        is_listed = not names.isdisjoint(spellings(module))
        return is_listed or any(is_named(module, pattern) for pattern in expressions)

    return is_one


def is_named(module: str, pattern: str) -> bool:
    """True if a pattern is a module's name, or `re:` and an expression for the beginning of its name."""
    names = spellings(module)
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in names)
    return pattern in names


def pattern_problems(patterns: tuple[str, ...], subject: str) -> list[str]:
    """A problem for each pattern whose expression is broken."""
    found = []
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            found.append(problem(subject, expected="regular expressions after 're:'", found=f"{pattern!r}: {error}"))
    return found


def spellings(module: str) -> tuple[str, ...]:
    """Names of a module on disk and in lists: with and without the prefix of a multimodal wrapper."""
    bare = module.replace(_WRAPPER, "", 1)
    if not bare.startswith("model."):
        return bare, f"{_WRAPPER}{bare}"
    return bare, f"{_WRAPPER}{bare}", f"model.{_WRAPPER}{bare.removeprefix('model.')}"


def section_of(directory: Path) -> Any:
    """The section of the language model if there are several; the spec's reader reports a bad file."""
    path = directory / CONFIG_FILE
    config = read_json_object(path, label=CONFIG_FILE, problems=[]) if path.is_file() else None
    if config is None:
        return None
    inner = config.get("text_config")
    return config.get(SECTION) or (inner.get(SECTION) if isinstance(inner, dict) else None)
