"""Quantized tensors by name, and quantizations that do not fit the models."""

from typing import Any

import pytest
import torch

from dflash_trt.bench.machine_probes import CPU_SIZES, probe_specs
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.core.weight_spec import WeightSpec, rank_shard, row_sharded
from dflash_trt.formats.registry import (
    check_quantization,
    engine_tensors,
    field_spec,
    quantized_tensors,
    split_quantized,
    weight_format,
    weight_formats,
)
from tests.formats.test_formats import FORMATS, quantized

TARGET, DRAFT = probe_specs(CPU_SIZES[0])
SCALES = (LayerKvScales(),)


def test_quantizations_of_the_models_are_accepted() -> None:
    linears = {"target.layers.0.qkv": "fp8", "draft.layers.0.down": "int4", "target.lm_head": "fp8"}
    spec = QuantizationSpec(linears=linears, target_kv=SCALES * 2, draft_kv=SCALES)
    check_quantization(spec, TARGET.model_copy(update={"is_embedding_tied": False}), DRAFT)
    check_quantization(QuantizationSpec(), TARGET, None)


@pytest.mark.parametrize(
    ("fields", "has_drafter", "said"),
    [
        ({"linears": {"target.layers.0.qkv": "int3"}}, True, "only formats .*fp8.* .not int3"),
        ({"linears": {"target.layers.2.qkv": "fp8"}}, True, "linear layers of the models .not target.layers.2.qkv"),
        ({"linears": {"target.norm": "fp8"}}, True, "linear layers of the models .not target.norm"),
        ({"linears": {"draft.layers.0.down": "fp8"}}, False, "linear layers of the models .not draft.layers.0.down"),
        ({"target_kv": SCALES}, True, "K/V scales for 2 layers .not 1"),
        ({"target_kv": SCALES * 3}, True, "K/V scales for 2 layers .not 3"),
        ({"draft_kv": SCALES * 2}, True, "K/V scales for 1 layers .not 2"),
        ({"draft_kv": SCALES}, False, "K/V scales for 0 layers .not 1"),
    ],
)
def test_a_quantization_that_does_not_fit_the_models_is_refused(
    fields: dict[str, Any], has_drafter: bool, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check_quantization(QuantizationSpec(**fields), TARGET, DRAFT if has_drafter else None)


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_goes_by_its_names_and_comes_back(name: str) -> None:
    weight = quantized(name, torch.randn(384, 160, generator=torch.Generator().manual_seed(1)))
    tensors = engine_tensors("m.qkv", weight) | {"m.norm": torch.ones(3)}
    table = {"m.qkv": row_sharded((384, 160), (200, 56, 128)), "m.norm": WeightSpec(shape=(3,))}
    assert next(iter(tensors)) == "m.qkv"
    layout = quantized_tensors("m.qkv", table, name)
    assert {key: item.shape for key, item in layout.items()} == {
        key: tuple(tensor.shape) for key, tensor in tensors.items() if key != "m.norm"
    }
    plain, found = split_quantized(tensors, table, {"m.qkv": name})
    assert list(plain) == ["m.norm"] and list(found) == ["m.qkv"]
    assert found["m.qkv"].tensors().keys() == weight.tensors().keys() and found["m.qkv"].segments == (200, 56, 128)


def test_tensors_of_a_weight_are_shared_as_it_is_block_by_block() -> None:
    rows = row_sharded((512, 256), (256, 128, 128), (1, 64, 64))
    columns = WeightSpec(shape=(512, 256), sharding="columns")
    two = Mapping(world_size=2, tp_size=2)
    for name, known in weight_formats().items():
        for spec in (rows, columns):
            whole = known.layout(spec.shape, (256, 128, 128) if spec is rows else (512,))
            share = rank_shard(spec, two)
            part = known.layout(share.shape, (128, 64, 64) if spec is rows else (512,))
            for field, layout in whole.items():
                if name == "fp8_block" and spec is rows and field == "block_scale":
                    continue  # half of 128 rows is no block
                found = rank_shard(field_spec(spec, known, field, layout.shape), two)
                assert found.shape == part[field].shape, (name, field, spec.sharding)
    blocks = row_sharded((1024, 256), (512, 256, 256))
    known = weight_format("fp8_block")
    found = field_spec(blocks, known, "block_scale", known.layout(blocks.shape, blocks.segments)["block_scale"].shape)
    assert (found.segments, found.shape, rank_shard(found, two).shape) == ((4, 2, 2), (8, 2), (4, 2))
