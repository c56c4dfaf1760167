"""Our checkpoints in ModelOpt's unified format against those of its own exporter, given its activation ranges."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.names import target_names
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.checkpoint.tensors import scan_tensors
from dflash_trt.compile.unified_export import (
    Export,
    flat_description,
    kv_changes,
    quantization_description,
    quantized_changes,
    quantized_parts,
)
from dflash_trt.core.quantization import Calibration, QuantizationConfig
from dflash_trt.quantize.plan import QuantizationPlan, make_plan
from tests.quantize.conftest import Exports

LARGEST = {"fp8": 448.0, "nvfp4": 6.0 * 448.0}
Bytes = dict[str, tuple[str, tuple[int, ...], bytes]]  # dtype, shape and content by name


def amax_of(scale: float, largest: float) -> float:
    """The range whose float32 quotient by `largest` is this scale."""
    first = np.float32(scale * largest)
    near = (first, np.nextafter(first, np.float32(0)), np.nextafter(first, np.float32(np.inf)))
    return float(next(x for x in near if np.float32(x) / np.float32(largest) == np.float32(scale)))


def theirs(directory: Path) -> Bytes:
    return {name: _described(tensor) for name, tensor in load_file(directory / "model.safetensors").items()}


def _described(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def ours(source: Path, plan: QuantizationPlan, calibration: Calibration, dtype: torch.dtype) -> tuple[Bytes, set[str]]:
    """The tensors of our export, and its quantized modules."""
    problems: list[str] = []
    stored = scan_tensors(source, label="target", problems=problems)
    parts = quantized_parts(plan.linears, target_names(plan.target, stored.tensors), stored, problems)
    assert problems == []
    changes = quantized_changes(parts, calibration, dtype=dtype)
    if calibration.target_kv is not None:
        changes = kv_changes(changes, stored, calibration.target_kv)
    export = Export(stored=stored, changes=changes)
    (headers,) = export.headers().values()
    names = {"F8_E4M3": "torch.float8_e4m3fn", "U8": "torch.uint8", "F32": "torch.float32", "BF16": "torch.bfloat16"}
    made = {
        name: (names[headers[name].dtype], headers[name].shape, content.tobytes())
        for name, content in export.contents("model.safetensors")
    }
    return made, {part.module for part in parts}


def calibration_of(export: Path, source: Path, plan: QuantizationPlan) -> Calibration:
    """What their scales stand for: the same range in all parts of a fused layer, as they see the same input."""
    stored, names = (
        load_file(export / "model.safetensors"),
        target_names(plan.target, load_file(source / "model.safetensors")),
    )
    ranges = {}
    for linear in plan.linears:
        if linear.format is not None:
            scales = {stored[_input_scale(part)].item() for part in names[linear.name].parts}
            ranges[linear.name] = amax_of(max(scales), LARGEST[linear.format])
    return Calibration(input_amax=ranges, target_kv=open_pair(export, None).quantization.target_kv)


def _input_scale(part: str) -> str:
    return f"{part.removesuffix('weight')}input_scale" if part.endswith(".weight") else f"{part}_input_scale"


@pytest.mark.parametrize(
    ("model", "export", "weight_format"),
    [
        ("target", "target-fp8", "fp8"),
        ("target", "target-nvfp4", "nvfp4"),
        ("target", "target-fp8-kv", "fp8"),
        ("experts", "experts-fp8", "fp8"),
        ("experts", "experts-nvfp4", "nvfp4"),
    ],
)
def test_an_export_has_the_bytes_of_modelopts_own(
    exports: Exports, dtype_name: str, model: str, export: str, weight_format: str
) -> None:
    source, directory = getattr(exports, model), exports.directory / export
    pair = open_pair(source, None)
    plan = make_plan(QuantizationConfig(target=weight_format), pair.target, None, pair.quantization)
    calibration = calibration_of(directory, source, plan)
    made, modules = ours(source, plan, calibration, getattr(torch, dtype_name))
    expected = theirs(directory)
    assert made.keys() == expected.keys()
    different = [name for name in expected if made[name] != expected[name]]
    assert different == []
    plain = json.loads((directory / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    described = quantization_description(dict.fromkeys(modules, weight_format), plain, has_fp8_kv="kv" in export)
    assert described == json.loads((directory / "hf_quant_config.json").read_text())
    assert flat_description(described) == json.loads((directory / "config.json").read_text())["quantization_config"]
