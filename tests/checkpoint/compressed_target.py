"""Targets that compressed-tensors' own compressors have quantized, and what its decompressors make of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.factories import Tensors, edit_json

NVFP4_MAX = 448.0 * 6.0
INPUT_RANGE = 3.0
IGNORED = ["lm_head", "re:.*layers\\.3\\.mlp.*"]  # in a name and in an expression


def group(**weights: Any) -> dict[str, Any]:
    """A group of config_groups; `weights` has its `activations`."""
    activations = weights.pop("activations", None)
    fields = {"symmetric": True, "dynamic": False} | weights
    return {"targets": ["Linear"], "weights": fields, "input_activations": activations, "output_activations": None}


DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
LOCAL = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}

# By name: our format, their format, the group.
PUBLISHED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "FP8": ("fp8", "float-quantized", group(num_bits=8, type="float", strategy="tensor", activations=STATIC)),
    "FP8 tensor, dynamic": (
        "fp8_w8a16",
        "float-quantized",
        group(num_bits=8, type="float", strategy="tensor", activations=DYNAMIC),
    ),
    "FP8_DYNAMIC": (
        "fp8_w8a16",
        "float-quantized",
        group(num_bits=8, type="float", strategy="channel", activations=DYNAMIC),
    ),
    "FP8_BLOCK": (
        "fp8_block",
        "float-quantized",
        group(num_bits=8, type="float", strategy="block", block_structure=[128, 128], activations=DYNAMIC),
    ),
    "W8A8": ("int8", "int-quantized", group(num_bits=8, type="int", strategy="channel", activations=TOKENS)),
    "W8A8 tensor": ("int8", "int-quantized", group(num_bits=8, type="int", strategy="tensor", activations=TOKENS)),
    "INT4 g32": ("int4", "pack-quantized", group(num_bits=4, type="int", strategy="group", group_size=32)),
    "W4A16": ("int4", "pack-quantized", group(num_bits=4, type="int", strategy="group", group_size=128)),
    "NVFP4": ("nvfp4", "nvfp4-pack-quantized", group(**NVFP4, activations=LOCAL)),
    "NVFP4A16": ("nvfp4_w4a16", "nvfp4-pack-quantized", group(**NVFP4)),
}


def compress(
    source: Path, output: Path, name: str, *, part: str = "", ignored: Sequence[str] = tuple(IGNORED)
) -> Tensors:
    """Write `source` in a published layout; the weights of its quantized modules as they are decompressed.

    Those with `part` in their names are quantized, unless they are among those of `quantized_modules` that are not.
    """
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed: scripts/test installs it")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    _, file_format, config = PUBLISHED[name]
    scheme, compressor = QuantizationScheme(**config), BaseCompressor.get_value_from_registry(file_format)
    tensors, decompressed = load_file(source / "model.safetensors"), {}
    for module in [module for module in quantized_modules(tensors) if part in module]:
        state = {"weight": tensors.pop(f"{module}.weight")} | {}
        state |= dict(_scales(state["weight"], scheme))
        stored = compressor.compress(state, scheme)
        tensors |= {f"{module}.{key}": value for key, value in stored.items()}
        decompressed[f"{module}.weight"] = decompress(stored, scheme, compressor)
    output.mkdir()
    for file in source.iterdir():
        (output / file.name).write_bytes(file.read_bytes())
    save_file({key: value.contiguous() for key, value in tensors.items()}, output / "model.safetensors")
    section = {"quant_method": "compressed-tensors", "format": file_format, "quantization_status": "compressed"}
    section |= {"config_groups": {"group_0": config}, "ignore": list(ignored), "kv_cache_scheme": None}
    section["version"] = "0.20.0"
    edit_json(output / "config.json", quantization_config=section)
    return decompressed


def decompress(stored: Tensors, scheme: Any, compressor: Any) -> torch.Tensor:  # float32
    """As in a checkpoint whose scales are in float32: their result has the dtype of the scales."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    scale = stored["weight_scale"].float()
    if "weight_global_scale" not in stored:
        return compressor.decompress(stored | {"weight_scale": scale}, scheme)["weight"]
    rows, half = stored["weight_packed"].shape
    codes = unpack_fp4_from_uint8(stored["weight_packed"], rows, 2 * half, dtype=torch.float32)
    global_scale = stored["weight_global_scale"]
    return dequantize(codes, scale, args=scheme.weights, dtype=torch.float32, global_scale=global_scale)


def quantized_modules(tensors: Tensors) -> list[str]:
    names = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    return [name for name in names if not (".layers.3." in name and ".mlp." in name)]


def _scales(weight: torch.Tensor, scheme: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What an observer of ranges would add to a module."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args, global_scale = scheme.weights, None
    if args.strategy == "tensor_group":
        global_scale = generate_gparam(weight.min(), weight.max())
        yield "weight_global_scale", global_scale
        if scheme.input_activations is not None:
            yield "input_global_scale", torch.tensor([NVFP4_MAX / INPUT_RANGE])
    elif scheme.input_activations is not None and not scheme.input_activations.dynamic:
        yield "input_scale", torch.tensor([INPUT_RANGE / 448])
    blocks = _blocks(weight, args)
    scale, _ = calculate_qparams(blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3)), args, global_scale=global_scale)
    if args.strategy == "tensor":
        scale = scale.reshape(1)
    yield "weight_scale", scale


def _blocks(weight: torch.Tensor, args: Any) -> torch.Tensor:  # [row blocks, rows, column blocks, columns]
    rows, columns = weight.shape
    shapes = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}
    block_rows, block_columns = shapes.get(str(args.strategy), (1, args.group_size or 1))
    padded = torch.nn.functional.pad(weight, (0, -columns % block_columns, 0, -rows % block_rows))
    return padded.view(padded.shape[0] // block_rows, block_rows, -1, block_columns)
