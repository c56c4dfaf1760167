"""Our packing and our reading against ModelOpt's own exporter, both formats, target and drafter, both dtypes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.names import draft_names, target_names
from dflash_trt.checkpoint.pair import CheckpointPair, open_pair
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.weight_spec import segments_of
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.formats.nvfp4 import e2m1_values
from dflash_trt.formats.registry import dequantize, split_quantized
from dflash_trt.formats.registry import weight_format as known_format
from dflash_trt.quantize.stream import joined
from tests.quantize.conftest import Exports

FORMATS = ["fp8", "nvfp4", "nvfp4_w4a16"]
PAIRS = [("target", "fp8"), ("target", "nvfp4"), ("target", "nvfp4_w4a16"), ("drafter", "fp8"), ("drafter", "nvfp4")]
PAIRS += [("target", "fp8_w8a16"), ("target", "fp8_block")]


def independent_dequantization(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """What an exported module's weight is, by ModelOpt's documentation of its tensors; shares no code with ours."""
    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"].float()
    if weight.dtype == torch.float8_e4m3fn:
        if scale.dim() == 4:  # [row blocks, 1, column blocks, 1]
            scale = scale[:, 0, :, 0].repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
            return weight.float() * scale[: weight.shape[0], : weight.shape[1]]
        return weight.float() * (scale[:, None] if scale.dim() else scale)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    rows, half = weight.shape
    unpacked = torch.empty(rows, 2 * half)
    unpacked[:, 0::2], unpacked[:, 1::2] = values[(weight & 15).long()], values[(weight >> 4).long()]
    return unpacked * scale.repeat_interleave(16, dim=1) * tensors[f"{module}.weight_scale_2"]


def opened(exports: Exports, part: str, export: str) -> CheckpointPair:
    """The pair with one side as ModelOpt exported it."""
    if part == "target":
        return open_pair(exports.directory / export, None)
    return open_pair(exports.target, exports.directory / export)


def quantized_of(pair: CheckpointPair, dtype: torch.dtype) -> dict[str, QuantizedWeight[torch.Tensor]]:
    tensors = dict(joined(pair.iter_weights(dtype=dtype, mapping=Mapping()), dtype=dtype))
    table = engine_weights(pair.target, pair.draft, pair.quantization)
    return split_quantized(tensors, table, pair.quantization.linears)[1]


def modules_of(pair: CheckpointPair, name: str) -> list[str]:
    names = target_names(pair.target) | (draft_names(pair.draft, ()) if pair.draft else {})
    return [part.removesuffix(".weight") for part in names[name].parts]


@pytest.mark.parametrize(("part", "weight_format"), PAIRS)
def test_an_exported_weight_is_read_to_the_bit(exports: Exports, part: str, weight_format: str) -> None:
    pair = opened(exports, part, f"{part}-{weight_format}")
    stored = load_file(exports.directory / f"{part}-{weight_format}" / "model.safetensors")
    weights = quantized_of(pair, torch.float32)
    assert len(weights) == {"target": 16, "drafter": 10}[part]
    for name, weight in weights.items():
        expected = torch.cat([independent_dequantization(stored, module) for module in modules_of(pair, name)])
        assert torch.equal(dequantize(weight), expected), name


def ranges(weight: QuantizedWeight[torch.Tensor], largest: float) -> torch.Tensor:
    """Of the segments; weights with scales per row or block have ranges of their own."""
    has_numbers = weight.weight_scale is not None and "weight_scale" in weight.per_segment
    return weight.weight_scale * largest if has_numbers else torch.ones(len(weight.segments))


@pytest.mark.parametrize(("part", "weight_format"), PAIRS)
def test_our_packing_writes_what_modelopt_wrote(
    exports: Exports, part: str, weight_format: str, dtype_name: str
) -> None:
    """Given the ranges that its scales stand for, from the unquantized weights alone."""
    dtype = getattr(torch, dtype_name)
    pair = opened(exports, part, f"{part}-{weight_format}")
    plain = dict(open_pair(exports.target, exports.drafter).iter_weights(dtype=dtype, mapping=Mapping()))
    for name, theirs in quantized_of(pair, dtype).items():
        if weight_format == "fp8_block" and len(theirs.segments) > 1:
            continue  # its exporter gives q, k and v, or gate and up, the blocks' largest ranges
        largest = {"fp8": 448.0}.get(weight_format, 6.0 * 448.0)
        ours = known_format(weight_format).quantize(
            plain[name],
            segments=theirs.segments,
            weight_amax=ranges(theirs, largest),
            input_amax=None if theirs.input_scale is None else theirs.input_scale * largest,
        )
        assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8)), name  # type: ignore[attr-defined]
        assert torch.equal(dequantize(ours), dequantize(theirs)), name


@pytest.mark.parametrize("weight_format", FORMATS)
def test_our_own_ranges_are_those_of_modelopt_for_a_target(
    exports: Exports, weight_format: str, dtype_name: str
) -> None:
    from dflash_trt.core.quantization import Calibration, QuantizationConfig
    from dflash_trt.quantize.plan import make_plan
    from dflash_trt.quantize.stream import quantize_linear

    source = open_pair(exports.target, None)
    plan = make_plan(QuantizationConfig(target=weight_format), source.target, None, source.quantization)  # type: ignore[arg-type]
    plain = dict(source.iter_weights(dtype=getattr(torch, dtype_name), mapping=Mapping()))
    theirs = quantized_of(opened(exports, "target", f"target-{weight_format}"), torch.float32)
    calibration = Calibration(input_amax=dict.fromkeys(theirs, 1.0))
    compared = [linear for linear in plan.linears if linear.format is not None]
    assert len(compared) == 16
    for linear in compared:
        ours = quantize_linear(linear, plain[linear.name], calibration)
        assert torch.equal(ours.weight_scale, theirs[linear.name].weight_scale), linear.name
        assert torch.equal(dequantize(ours), dequantize(theirs[linear.name])), linear.name


def test_a_changed_weight_packs_to_something_else(exports: Exports, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    theirs = quantized_of(opened(exports, "target", "target-nvfp4"), dtype)["target.layers.1.qkv"]
    plain = dict(open_pair(exports.target, None).iter_weights(dtype=dtype, mapping=Mapping()))["target.layers.1.qkv"]
    changed = plain.clone()
    changed[5, 17] = -changed[5, 17] - 0.1
    amax = theirs.weight_scale * (6 * 448)
    kept, moved = (
        known_format("nvfp4_w4a16").quantize(weight, segments=theirs.segments, weight_amax=amax, input_amax=None)
        for weight in (plain, changed)
    )
    assert torch.equal(dequantize(kept), dequantize(theirs))
    assert not torch.equal(dequantize(moved), dequantize(theirs))


def test_a_mixed_export_is_read_module_by_module(exports: Exports) -> None:
    linears = opened(exports, "target", "target-mixed").quantization.linears
    assert {name: linears.get(name) for name in ("target.layers.0.qkv", "target.layers.0.gate_up")} == {
        "target.layers.0.qkv": "fp8",
        "target.layers.0.gate_up": "nvfp4",
    }
    assert not any(name.startswith("target.layers.3.") for name in linears)  # excluded


def test_k_v_scales_come_with_the_export(exports: Exports) -> None:
    scales = opened(exports, "target", "target-fp8-kv").quantization.target_kv
    stored = load_file(exports.directory / "target-fp8-kv" / "model.safetensors")
    assert scales is not None and len(scales) == 4
    for i, layer in enumerate(scales):
        assert layer.k == stored[f"model.layers.{i}.self_attn.k_proj.k_scale"].item()
        assert layer.v == stored[f"model.layers.{i}.self_attn.v_proj.v_scale"].item()


def test_config_json_alone_says_as_much_as_hf_quant_config(exports: Exports, tmp_path: Path) -> None:
    for export in ("target-fp8-kv", "target-mixed", "target-nvfp4"):
        copy = shutil.copytree(exports.directory / export, tmp_path / export)
        (copy / "hf_quant_config.json").unlink()
        assert open_pair(copy, None).quantization == opened(exports, "target", export).quantization


def test_a_fused_linear_of_two_formats_is_dequantized_exactly(exports: Exports, tmp_path: Path) -> None:
    """The drafter's layer 0 in FP8 and layer 1 in NVFP4: `draft.kv`, which stacks both, becomes plain."""
    mixed = shutil.copytree(exports.directory / "drafter-fp8", tmp_path / "mixed")
    fp8 = load_file(exports.directory / "drafter-fp8" / "model.safetensors")
    nvfp4 = load_file(exports.directory / "drafter-nvfp4" / "model.safetensors")
    tensors = {name: tensor for name, tensor in fp8.items() if not name.startswith("layers.1.")}
    tensors |= {name: tensor for name, tensor in nvfp4.items() if name.startswith("layers.1.")}
    save_file(tensors, mixed / "model.safetensors", {"format": "pt"})
    modules = sorted(name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale"))
    layers = {
        name: {"quant_algo": "NVFP4", "group_size": 16} if name.startswith("layers.1.") else {"quant_algo": "FP8"}
        for name in modules
    }
    section = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    (mixed / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    pair = open_pair(exports.target, mixed)
    assert pair.quantization.linears["draft.layers.0.q"] == "fp8"
    assert pair.quantization.linears["draft.layers.1.q"] == "nvfp4"
    assert "draft.kv" not in pair.quantization.linears
    read = dict(joined(pair.iter_weights(dtype=torch.float32, mapping=Mapping()), dtype=torch.float32))
    expected = torch.cat([independent_dequantization(tensors, module) for module in modules_of(pair, "draft.kv")])
    assert torch.equal(read["draft.kv"], expected)


def test_two_ranks_hold_the_two_halves_of_a_quantized_weight(exports: Exports) -> None:
    pair = opened(exports, "target", "target-nvfp4")
    whole = quantized_of(pair, torch.float32)
    table = engine_weights(pair.target, None, pair.quantization)
    from dflash_trt.core.weight_spec import rank_shard

    halves = []
    for rank in range(2):
        mapping = Mapping(world_size=2, tp_size=2, rank=rank)
        share = {name: rank_shard(spec, Mapping(world_size=2, tp_size=2)) for name, spec in table.items()}
        halves.append(
            split_quantized(
                dict(pair.iter_weights(dtype=torch.float32, mapping=mapping)), share, pair.quantization.linears
            )[1]
        )
    for name in ("target.layers.0.qkv", "target.layers.0.down"):
        first, second = (dequantize(half[name]) for half in halves)
        if name.endswith("down"):  # cut along its columns
            joined_up = torch.cat((first, second), dim=1)
        else:  # each segment is cut on its own
            segments = [rows // 2 for rows in segments_of(table[name])]
            pieces = zip(first.split(segments), second.split(segments), strict=True)
            joined_up = torch.cat([half for both in pieces for half in both])
        assert torch.equal(joined_up, dequantize(whole[name]))


def test_nibbles_are_read_as_modelopt_writes_them() -> None:
    assert e2m1_values(torch.tensor([[0x3A, 0x21]], dtype=torch.uint8)).tolist() == [[-1.0, 1.5, 0.5, 1.0]]
