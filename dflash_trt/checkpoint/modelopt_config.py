"""ModelOpt's description of a checkpoint: hf_quant_config.json, or `quantization_config` of config.json.

Reads both schemas of ModelOpt 0.47, the nested one and the flat one of config.json. Refuses unknown algorithms and
other producers by name. `quantized_weights` finds the tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeGuard

from dflash_trt.checkpoint.config_reader import ConfigReader, read_json_object, shown
from dflash_trt.core.errors import problem
from dflash_trt.formats.base import WeightFormat
from dflash_trt.formats.registry import weight_formats

QUANT_CONFIG_FILE = "hf_quant_config.json"

_ALGORITHMS: dict[str, WeightFormat] = {
    known.modelopt_algorithm: known for known in weight_formats().values() if known.modelopt_algorithm is not None
}
_MIXED = "MIXED_PRECISION"
_OTHER_EXPORT = f"Export it from ModelOpt with one of {', '.join(_ALGORITHMS)}, or use the unquantized checkpoint."


@dataclass(frozen=True, kw_only=True)
class ModelOptConfig:
    """`layers` are the modules of a mixed-precision checkpoint; otherwise `default` applies to all but `excluded`."""

    default: str | None
    excluded: tuple[str, ...] = ()  # patterns
    layers: Mapping[str, str]
    has_fp8_kv: bool = False

    def format_of(self, module: str) -> str | None:
        """The declared format of a module, for example `model.layers.0.mlp.down_proj`."""
        if self.layers:
            return self.layers.get(module)
        return None if any(fnmatchcase(module, pattern) for pattern in self.excluded) else self.default


def read_modelopt_config(directory: Path, *, label: str, problems: list[str]) -> ModelOptConfig | None:
    """Read a checkpoint's quantization; None for an unquantized one, or if `problems` has grown."""
    path = directory / QUANT_CONFIG_FILE
    if path.is_file():
        subject = f"{label} {QUANT_CONFIG_FILE}"
        fields = read_json_object(path, label=subject, problems=problems)
    elif (directory / "config.json").is_file():
        subject = f"{label} config.json key 'quantization_config'"
        fields = _from_config(directory / "config.json", subject)
    else:
        return None
    if fields is None:
        return None
    num_problems = len(problems)
    section = fields.get("quantization", fields)
    if not isinstance(section, dict):
        problems.append(problem(subject, expected="a JSON object", found=shown(section), hint=_OTHER_EXPORT))
        return None
    problems += _problems_of(section, subject)
    if len(problems) > num_problems:
        return None
    excluded = section.get("exclude_modules", section.get("ignore")) or []
    algorithm = section.get("quant_algo")
    return ModelOptConfig(
        default=None if algorithm in (None, _MIXED) else _ALGORITHMS[algorithm].name,
        excluded=tuple(_plain_name(name) for name in excluded),
        layers={
            _plain_name(name): _ALGORITHMS[entry["quant_algo"]].name
            for name, entry in (section.get("quantized_layers") or {}).items()
        },
        has_fp8_kv=_kv_algorithm(section) == "FP8",
    )


def is_modelopt(section: Any) -> TypeGuard[dict[str, Any]]:
    """True if a `quantization_config` is ModelOpt's."""
    if not isinstance(section, dict):
        return False
    producer = section.get("producer")
    return section.get("quant_method") == "modelopt" or (
        isinstance(producer, dict) and producer.get("name") == "modelopt"
    )


def require_modelopt(reader: ConfigReader) -> None:
    """Refuse quantization by any other tool; `read_modelopt_config` reads ModelOpt's."""
    section = reader.value("quantization_config")
    if section is not None and not is_modelopt(section):
        reader.refuse("quantization_config", expected="none, or ModelOpt's", hint=_OTHER_EXPORT)


def _from_config(path: Path, subject: str) -> dict[str, Any] | None:
    """`quantization_config` if it is ModelOpt's; the reader of the spec reports a broken config.json."""
    config = read_json_object(path, label=subject, problems=[])
    fields = None if config is None else config.get("quantization_config")
    return fields if is_modelopt(fields) else None  # others are refused where the spec is read


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
    known = _ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    if known is not None and known.columns_per_block > 1 and group_size not in (None, known.columns_per_block):
        block = str(known.columns_per_block)
        hint = f"{algorithm} has blocks of {block} columns: export the checkpoint again."
        yield problem(f"{subject}: group_size of {algorithm}", expected=block, found=shown(group_size), hint=hint)


def _kv_algorithm(section: Mapping[str, Any]) -> Any:
    """`kv_cache_quant_algo`, or its equivalent in the flat schema's `kv_cache_scheme`."""
    scheme = section.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        is_fp8 = scheme.get("num_bits") == 8 and scheme.get("type") == "float" and not scheme.get("dynamic")
        return "FP8" if is_fp8 else scheme
    return section.get("kv_cache_quant_algo", scheme)


def _plain_name(name: str) -> str:
    """Remove the prefix that a drafter's modules had in training."""
    return name.removeprefix("dflash_module.")


def require_mxfp4(reader: ConfigReader) -> None:
    """Allow `quantization_config` of MXFP4 or ModelOpt; the tensors' names show which weights are in MXFP4."""
    section = reader.value("quantization_config")
    if is_modelopt(section) or not isinstance(section, dict):
        require_modelopt(reader)
        return
    nested = reader.nested("quantization_config", section)
    hint = "Use the checkpoint with MXFP4 experts, or an unquantized one."
    nested.require("quant_method", "mxfp4", default="none", hint=hint)
    nested.ignore(("modules_to_not_convert", "dequantize"))
    nested.finish()
