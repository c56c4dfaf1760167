"""The engine inspector's JSON, in its documented form: which quantized linear layers run over wide weights."""

import json
from typing import Any

import pytest

from dflash_trt.backends.tensorrt.inspection import linear_mark, quantized_linear_problems

FP8 = "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_warpgroupsize1x1x1"
WIDE = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1"
LINEARS = {"target.layers.0.qkv": "fp8", "target.layers.0.o": "nvfp4"}


def layer(*names: str, tactic: str, kind: str = "gemm", types: tuple[str, ...] = ("BFloat16",)) -> dict[str, Any]:
    return {
        "Name": "__myl_gemm_myl0_7",
        "LayerType": kind,
        "Inputs": [{"Name": "x", "Dimensions": [8, 64], "Format/Datatype": name} for name in types],
        "Outputs": [{"Name": "y", "Dimensions": [8, 64], "Format/Datatype": "BFloat16"}],
        "TacticName": tactic,
        "StreamId": 0,
        "Metadata": "".join(map(linear_mark, names)),
    }


def problems_of(*layers: dict[str, Any]) -> list[str]:
    return quantized_linear_problems(json.dumps({"Layers": list(layers), "Bindings": []}), LINEARS)


def test_kernels_or_inputs_of_narrow_types_are_right() -> None:
    by_kernel = layer("target.layers.0.qkv", tactic=FP8)
    by_types = layer("target.layers.0.o[0:64]", tactic="kernel_mma", types=("FP4", "E2M1"))
    quantize = layer("target.layers.0.o", tactic="__myl_Quant_0x1", kind="kgen")
    assert problems_of(by_kernel, by_types, quantize, layer(tactic=WIDE)) == []


def test_a_gemm_over_wide_weights_is_named_with_its_kernel() -> None:
    found = problems_of(layer("target.layers.0.qkv", "target.layers.0.o", tactic=WIDE))
    assert [line.split(":")[0] for line in found] == [
        "linear layer target.layers.0.qkv",
        "linear layer target.layers.0.o",
    ]
    assert f"expected a GEMM of fp8 operands, found {WIDE} over BFloat16" in found[0]


def test_one_wide_part_of_a_layer_is_enough() -> None:
    name = "target.layers.0.qkv"
    narrow = [layer(f"{each}[0:8]", tactic=FP8) for each in LINEARS]
    [found] = problems_of(*narrow, layer(f"{name}[8:24]", tactic=WIDE))
    assert found.startswith(f"linear layer {name}: expected")


def test_a_layer_that_no_gemm_is_made_of_is_missed() -> None:
    [found] = problems_of(layer("target.layers.0.qkv", tactic=FP8))
    assert "linear layer target.layers.0.o: expected a GEMM of nvfp4 operands, found no GEMM with its name" in found


def test_an_engine_without_detailed_layers_is_refused() -> None:
    for information in ({"Layers": ["a name alone"]}, {}):
        with pytest.raises(ValueError, match=r"ProfilingVerbosity\.DETAILED"):
            quantized_linear_problems(json.dumps(information), LINEARS)
