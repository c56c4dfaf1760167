"""The engine inspector's view of quantized linear layers: does TensorRT multiply codes or wide copies?

Pure over the inspector's JSON (`EngineInspector.get_engine_information`, of an engine with detailed verbosity). NVIDIA
documents its form by example only: a GEMM has a type, input types and the name of its kernel, which contains the
operands' types. The metadata of a layer names the network's layers that it was made of.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dflash_trt.core.errors import problem

_GEMM: Final = re.compile(r"gemm|matrixmultiply|matmul|mma", re.IGNORECASE)
_NARROW: Final = re.compile(r"e4m3|e2m1|fp8|fp4|float8|float4|f8|f4", re.IGNORECASE)  # in names of types and kernels
_MARK: Final = re.compile(r"\[quantized linear ([^\]]+)\]")
_HINT: Final = "TensorRT did not fuse the dequantization into the GEMM: report it with this message."


def linear_mark(name: str) -> str:
    """Metadata of the GEMM of a quantized linear layer."""
    return f"[quantized linear {name}]"


def quantized_linear_problems(information: str, linears: Mapping[str, str]) -> list[str]:
    """A problem for each linear layer of `linears` (name to format) without a GEMM of narrow operands.

    Raises:
        ValueError: not the JSON of an engine inspector with detailed layers.
    """
    layers = json.loads(information).get("Layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise ValueError("an engine inspector's JSON with detailed layers (ProfilingVerbosity.DETAILED)")
    gemms: dict[str, list[dict[str, Any]]] = {name: [] for name in linears}
    for layer in layers:
        for name in _MARK.findall(str(layer.get("Metadata", ""))):
            if name.partition("[")[0] in gemms and _is_gemm(layer):
                gemms[name.partition("[")[0]].append(layer)
    return [line for name, found in gemms.items() for line in _problems(name, linears[name], found)]


def _problems(name: str, weight_format: str, gemms: list[dict[str, Any]]) -> Iterator[str]:
    expected = f"a GEMM of {weight_format} operands"
    if not gemms:
        yield problem(f"linear layer {name}", expected=expected, found="no GEMM with its name", hint=_HINT)
    for gemm in gemms:
        if not any(_NARROW.search(text) for text in (str(gemm.get("TacticName", "")), *_types(gemm))):
            found = (
                f"{gemm.get('TacticName') or gemm.get('LayerType')} over {', '.join(_types(gemm)) or 'unnamed types'}"
            )
            yield problem(f"linear layer {name}", expected=expected, found=found, hint=_HINT)


def _is_gemm(layer: Mapping[str, Any]) -> bool:
    return any(_GEMM.search(str(layer.get(key, ""))) for key in ("LayerType", "ParameterType", "TacticName"))


def _types(layer: Mapping[str, Any]) -> Iterator[str]:
    for tensor in layer.get("Inputs", ()):
        yield str(tensor.get("Format/Datatype", ""))
    weights = layer.get("Weights")
    if isinstance(weights, dict):
        yield str(weights.get("Type", ""))
