"""Descriptions of quantized checkpoints: the format of every module that they name, and the K/V that they quantize."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from dflash_trt.checkpoint.producers import compressed_tensors, fp8, modelopt
from dflash_trt.checkpoint.producers.base import Scheme, spellings
from dflash_trt.checkpoint.quantized_reading import read_number
from dflash_trt.checkpoint.tensors import StoredTensor
from dflash_trt.core.errors import CheckpointError

Config = dict[str, Any]
FP8: Config = {"num_bits": 8, "type": "float", "strategy": "channel"}
STATIC: Config = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
INT4: Config = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
NVFP4: Config = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
KV: Config = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
DOWN, Q = "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj"


def scheme(producer: Any, fields: Config) -> Scheme:
    problems: list[str] = []
    assert producer.recognizes(fields)
    found: Scheme | None = producer.read(fields, "c.json key 'quantization_config'", problems)
    assert found is not None, problems
    return found


def problems_of(producer: Any, fields: Config) -> str:
    problems: list[str] = []
    assert producer.read(fields, "c.json key 'quantization_config'", problems) is None
    return "\n".join(problems)


def formats(found: Scheme, *modules: str) -> list[str | None]:
    return [None if (stored := found.format_of(module)) is None else stored.format for module in modules]


def compressed(*groups: Config, **fields: Any) -> Config:
    config_groups = {f"group_{i}": group for i, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": config_groups} | fields


def group(weights: Config, *targets: str, **fields: Any) -> Config:
    return {"weights": weights, "targets": list(targets)} | fields


MIXED = [
    group(FP8, "Linear", format="float-quantized"),
    group(INT4, "re:.*mlp.*", format="pack-quantized"),
    group(NVFP4, DOWN, format="nvfp4-pack-quantized"),
]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_name_goes_before_an_expression_and_that_before_the_class(order: tuple[int, ...]) -> None:
    found = scheme(compressed_tensors, compressed(*(MIXED[i] for i in order), format="mixed-precision"))
    modules = (DOWN, "model.layers.2.mlp.down_proj", Q)
    assert formats(found, *modules) == ["nvfp4_w4a16", "int4", "fp8_w8a16"]
    assert found.kv_scale == "self_attn.{x}_scale" and not found.has_fp8_kv


def test_ignored_modules_and_those_that_no_group_names_are_unquantized() -> None:
    given = compressed(group(FP8, "re:.*proj"), format="float-quantized", ignore=["re:.*q_proj", DOWN, "re:mlp.*"])
    assert formats(scheme(compressed_tensors, given), DOWN, Q, "model.layers.2.mlp.down_proj", "lm_head") == [
        None,
        None,
        "fp8_w8a16",  # an expression is for the beginning of a name
        None,
    ]
    assert formats(scheme(compressed_tensors, given | {"ignore": ["Linear"]}), "model.layers.2.mlp.up_proj") == [None]


@pytest.mark.parametrize(
    ("weights", "inputs", "file_format", "expected"),
    [
        (FP8, None, "float-quantized", "fp8_w8a16"),
        (FP8, FP8 | {"strategy": "token", "dynamic": True}, "naive-quantized", "fp8_w8a16"),
        (STATIC, STATIC, "float-quantized", "fp8"),
        (STATIC, STATIC | {"dynamic": None}, "float-quantized", "fp8"),
        (STATIC, None, "float-quantized", "fp8_w8a16"),
        (FP8 | {"strategy": "block", "block_structure": [128, 128]}, None, "float-quantized", "fp8_block"),
        (NVFP4, NVFP4 | {"dynamic": "local"}, "nvfp4-pack-quantized", "nvfp4"),
        (NVFP4, None, "nvfp4-pack-quantized", "nvfp4_w4a16"),
        (INT4 | {"group_size": 128, "actorder": "weight"}, None, "pack-quantized", "int4"),
        (FP8, STATIC, "float-quantized", None),
        (STATIC, STATIC | {"symmetric": False}, "float-quantized", None),
        (STATIC, STATIC | {"strategy": "token"}, "float-quantized", None),
        (INT4, STATIC, "pack-quantized", None),
        (INT4 | {"group_size": 16}, None, "pack-quantized", None),
        (NVFP4 | {"group_size": 32}, None, "nvfp4-pack-quantized", None),
        (FP8, None, "pack-quantized", None),
        (FP8 | {"strategy": "block", "block_structure": [128, 128]}, STATIC, "float-quantized", None),
    ],
)
def test_weights_and_activations_make_a_format_or_are_refused(
    weights: Config, inputs: Config | None, file_format: str, expected: str | None
) -> None:
    given = compressed(group(weights, "Linear", input_activations=inputs), format=file_format)
    if expected is None:
        assert "expected " in problems_of(compressed_tensors, given)
    else:
        assert formats(scheme(compressed_tensors, given), DOWN) == [expected]


@pytest.mark.parametrize(
    ("scheme_of_kv", "is_read"),
    [(KV, True), ({}, True)]
    + [(KV | change, False) for change in ({"dynamic": True}, {"num_bits": 4}, {"type": "int"}, {"symmetric": False})]
    + [(KV | {"strategy": "channel"}, False), ([8], False)],
)
def test_k_and_v_are_fp8_with_a_static_scale_or_refused(scheme_of_kv: Any, is_read: bool) -> None:
    given = compressed(group(FP8, "Linear"), format="float-quantized", kv_cache_scheme=scheme_of_kv)
    if is_read:
        assert scheme(compressed_tensors, given).has_fp8_kv
    else:
        assert "kv_cache_scheme': expected FP8 per tensor, static" in problems_of(compressed_tensors, given)


MODELOPT: Config = {"producer": {"name": "modelopt"}, "quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.mark.parametrize("key", ["exclude_modules", "ignore"])
@pytest.mark.parametrize("is_nested", [True, False])
def test_both_schemas_of_modelopt_leave_out_the_same_modules(key: str, is_nested: bool) -> None:
    section = {"quant_algo": "NVFP4", "group_size": 16, key: ["lm_head", "*self_attn*", "model.layers.0.mlp.experts"]}
    given = MODELOPT | ({"quantization": section} if is_nested else section)
    stacked = "model.layers.{}.mlp.experts.gate_up_proj"
    assert formats(scheme(modelopt, given), DOWN, Q, "lm_head", stacked.format(0), stacked.format(1)) == [
        "nvfp4",
        None,
        None,
        None,
        "nvfp4",
    ]


def test_a_mixed_checkpoint_of_modelopt_quantizes_what_it_lists() -> None:
    layers = {f"dflash_module.{DOWN}": {"quant_algo": "FP8"}, Q: {"quant_algo": "W4A16_NVFP4"}}
    given = MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert formats(scheme(modelopt, given), DOWN, Q, "lm_head") == ["fp8", "nvfp4_w4a16", None]


@pytest.mark.parametrize(
    ("fields", "has_fp8_kv"),
    [
        ({}, False),
        ({"kv_cache_quant_algo": "FP8"}, True),
        ({"kv_cache_quant_algo": None}, False),
        ({"kv_cache_scheme": KV}, True),
        ({"kv_cache_scheme": KV | {"dynamic": True}}, None),
        ({"kv_cache_scheme": KV | {"num_bits": 4}}, None),
        ({"kv_cache_scheme": KV | {"type": "int"}}, None),
        ({"kv_cache_quant_algo": "NVFP4"}, None),
    ],
)
def test_k_and_v_of_modelopt_are_fp8_or_refused(fields: Config, has_fp8_kv: bool | None) -> None:
    if has_fp8_kv is None:
        assert "kv_cache_quant_algo: expected FP8 or null" in problems_of(modelopt, MODELOPT | fields)
    else:
        assert scheme(modelopt, MODELOPT | fields).has_fp8_kv is has_fp8_kv


BLOCKS: Config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (BLOCKS, "fp8_block"),
        (BLOCKS | {"activation_scheme": "static"}, "fp8_block"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),
        ({"quant_method": "fp8"}, "fp8_w8a16"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8_w8a16"),
    ],
)
def test_fp8_is_in_blocks_or_per_tensor_or_per_row(fields: Config, expected: str) -> None:
    assert formats(scheme(fp8, fields), DOWN) == [expected]
    for key in ("modules_to_not_convert", "ignored_layers"):
        found = scheme(fp8, fields | {key: ["down_proj", "model.layers.0", "re:.*v_proj"]})
        modules = (
            DOWN,
            Q,
            "model.layers.0.mlp.up_proj",
            "model.layers.1.self_attn.v_proj",
            "model.layers.10.mlp.up_proj",
        )
        assert formats(found, *modules) == [None, expected, None, None, expected]


WORDS = st.text("ab.*?[]!-", max_size=6)


@drawn(patterns=st.lists(WORDS, max_size=5), module=st.text("ab.", min_size=1, max_size=4))
def test_modelopts_patterns_are_those_of_fnmatch_however_many(patterns: list[str], module: str) -> None:
    is_excluded = any(fnmatchcase(name, pattern) for name in spellings(module) for pattern in patterns)
    found = scheme(modelopt, MODELOPT | {"exclude_modules": patterns})
    assert formats(found, module) == [None if is_excluded else "fp8"]


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, float("inf"), float("nan"), 1e-38, 3.0])
def test_a_scale_is_finite_and_positive(value: float) -> None:
    stored = StoredTensor(path=Path("f"), name="s", dtype="F32", shape=(1,))
    tensor = torch.tensor([value])
    if 0 < value < float("inf"):
        assert read_number(stored, lambda _: tensor) == tensor.item()
        return
    with pytest.raises(CheckpointError, match="tensor 's': expected a finite, positive scale"):
        read_number(stored, lambda _: tensor)
