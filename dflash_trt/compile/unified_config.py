"""Checkpoint description in ModelOpt's unified format: hf_quant_config.json, copied to config.json."""

from collections.abc import Collection, Mapping
from typing import Any

from dflash_trt.checkpoint.producers.modelopt import stored_as
from dflash_trt.formats.registry import weight_format

FORMAT_VERSION = "0.47.0"  # the ModelOpt release with this format
_BITS = {"FP8": 8, "NVFP4": 4}


def quantization_description(formats: Mapping[str, str], plain: Collection[str], *, has_fp8_kv: bool) -> dict[str, Any]:
    """Fields of hf_quant_config.json. `formats` are by module, `plain` are other modules with a matrix."""
    layers = {module: _layer(name) for module, name in formats.items()}
    kinds = {name: _layer(name) for name in sorted(set(formats.values()))}
    section: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": "FP8" if has_fp8_kv else None}
    if len(kinds) == 1:
        section |= next(iter(kinds.values()))
        section["exclude_modules"] = sorted(plain)
    elif kinds:
        section |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return {"producer": {"name": "modelopt", "version": FORMAT_VERSION}, "quantization": section}


def flat_description(description: Mapping[str, Any]) -> dict[str, Any]:
    """The same as `quantization_config` of config.json, with the keys that other loaders read."""
    section = description["quantization"]
    layers: Mapping[str, Mapping[str, Any]] = section.get("quantized_layers", {})
    groups: list[tuple[Mapping[str, Any], list[str]]] = []
    if layers:
        kinds = {str(layer): layer for layer in layers.values()}.values()
        groups = [(kind, sorted(name for name, layer in layers.items() if layer == kind)) for kind in kinds]
    elif section["quant_algo"] is not None:
        groups.append((section, ["Linear"]))
    flat: dict[str, Any] = {
        "config_groups": {f"group_{i}": _group(kind) | {"targets": names} for i, (kind, names) in enumerate(groups)}
    }
    if layers:
        flat["quantized_layers"] = layers
    flat["ignore"] = section.get("exclude_modules", [])
    if section["quant_algo"] is not None:
        flat["quant_algo"] = section["quant_algo"]
    if section["kv_cache_quant_algo"] is not None:
        flat["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return flat | {"producer": description["producer"], "quant_method": "modelopt"}


def _layer(format_name: str) -> dict[str, Any]:
    algorithm, _ = stored_as(format_name)
    block = weight_format(format_name).columns_per_block
    return {"quant_algo": algorithm} | ({"group_size": block} if block > 1 else {})


def _group(kind: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"dynamic": False, "num_bits": _BITS[kind["quant_algo"]], "type": "float"}
    if "group_size" in kind:
        values["group_size"] = kind["group_size"]
    return {"input_activations": values, "weights": values}
