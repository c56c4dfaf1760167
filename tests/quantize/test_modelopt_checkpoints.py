"""A ModelOpt export that is broken, or of an unknown kind, is refused with words that say what and how to fix it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.errors import CheckpointError, ConfigError, DFlashError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.quantization import Calibration, QuantizationConfig
from dflash_trt.formats.base import segment_amax
from dflash_trt.formats.registry import quantized_tensors
from dflash_trt.quantize.plan import make_plan
from dflash_trt.quantize.stream import engine_stream

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.2.mlp.down_proj"


def write_export(source: Path, output: Path, weight_format: str) -> Path:
    """A target as ModelOpt exports it, made of our own packing: parity with the real one is tested elsewhere."""
    pair = open_pair(source, None)
    plan = make_plan(QuantizationConfig(target=weight_format), pair.target, None, pair.quantization)  # type: ignore[arg-type]
    calibration = Calibration(input_amax={linear.name: 4.0 for linear in plan.linears if linear.format})
    stream = dict(
        engine_stream(pair.iter_weights(dtype=torch.float32, mapping=Mapping()), plan, calibration, dtype=torch.float32)
    )
    tensors = load_file(source / "model.safetensors")
    for linear in plan.linears:
        if linear.format is None:
            continue
        modules = _modules(linear.name)
        rows = torch.split(torch.arange(linear.spec.shape[0]), list(linear.spec.segments or (linear.spec.shape[0],)))
        for s, (module, part) in enumerate(zip(modules, rows, strict=True)):
            tensors[f"{module}.weight"] = stream[linear.name][part[0] : part[-1] + 1].clone()
            numbers = {"weight_scale": stream[f"{linear.name}.weight_scale"][s].clone()}
            if weight_format != "fp8":
                numbers = {"weight_scale_2": numbers["weight_scale"]}
                blocks = stream[f"{linear.name}.block_scale"].view(torch.uint8)[part[0] : part[-1] + 1].clone()
                tensors[f"{module}.weight_scale"] = blocks.view(torch.float8_e4m3fn)
            if weight_format != "nvfp4_w4a16":
                numbers["input_scale"] = stream[f"{linear.name}.input_scale"][s].clone()
            tensors |= {f"{module}.{kind}": number for kind, number in numbers.items()}
    shutil.copytree(source, output)
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    algorithm = {"fp8": "FP8", "nvfp4": "NVFP4", "nvfp4_w4a16": "W4A16_NVFP4"}[weight_format]
    section: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    if weight_format != "fp8":
        section["group_size"] = 16
    (output / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    return output


def _modules(name: str) -> list[str]:
    _, _, layer, kind = name.split(".")
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    return {
        "qkv": [f"{attention}.{x}_proj" for x in "qkv"],
        "o": [f"{attention}.o_proj"],
        "gate_up": [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
        "down": [f"{mlp}.down_proj"],
    }[kind]


@pytest.fixture(scope="module")
def good(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(weight_format: str) -> Path:
        if weight_format not in made:
            made[weight_format] = write_export(pair[0], tmp_path_factory.mktemp("good") / weight_format, weight_format)
        return made[weight_format]

    return make


def refusal(directory: Path, error: type[DFlashError] = CheckpointError) -> str:
    """What opening and reading the checkpoint says."""
    with pytest.raises(error) as raised:
        for _ in open_pair(directory, None).iter_weights(dtype=torch.float32, mapping=Mapping()):
            pass
    return str(raised.value)


def broken(good: Path, tmp_path: Path, edit: Callable[[Tensors], None]) -> Path:
    copy = shutil.copytree(good, tmp_path / "broken")
    tensors = load_file(copy / "model.safetensors")
    edit(tensors)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def reconfigured(good: Path, tmp_path: Path, **changes: Any) -> Path:
    copy = shutil.copytree(good, tmp_path / "reconfigured")
    path = copy / "hf_quant_config.json"
    path.write_text(json.dumps({"quantization": json.loads(path.read_text())["quantization"] | changes}))
    return copy


@pytest.mark.parametrize("weight_format", ["fp8", "nvfp4", "nvfp4_w4a16"])
def test_a_whole_export_is_read(good: Callable[[str], Path], weight_format: str) -> None:
    pair = open_pair(good(weight_format), None)
    assert set(pair.quantization.linears.values()) == {weight_format}
    tensors = dict(pair.iter_weights(dtype=torch.float32, mapping=Mapping()))
    for name in pair.quantization.linears:
        for part, layout in quantized_tensors(name, pair.table, weight_format).items():
            assert tuple(tensors[part].shape) == layout.shape


@pytest.mark.parametrize(
    ("weight_format", "scale"),
    [
        ("fp8", "weight_scale"),
        ("fp8", "input_scale"),
        ("nvfp4", "weight_scale"),
        ("nvfp4", "weight_scale_2"),
        ("nvfp4", "input_scale"),
        ("nvfp4_w4a16", "weight_scale_2"),
    ],
)
def test_a_missing_scale_is_named(good: Callable[[str], Path], tmp_path: Path, weight_format: str, scale: str) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors[f"{DOWN}.{scale}"]

    message = refusal(broken(good(weight_format), tmp_path, edit))
    assert f"'{DOWN}.weight': expected the scales of {weight_format}, found no '{DOWN}.{scale}'" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize(
    ("weight_format", "scale"),
    [("fp8", "weight_scale"), ("fp8", "input_scale"), ("nvfp4", "weight_scale_2"), ("nvfp4", "input_scale")],
)
def test_a_scale_that_is_no_scale_is_refused(
    good: Callable[[str], Path], tmp_path: Path, weight_format: str, scale: str, value: float
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{DOWN}.{scale}"] = torch.tensor(value)

    message = refusal(broken(good(weight_format), tmp_path, edit))
    assert f"tensor '{DOWN}.{scale}': expected a finite, positive scale" in message


def test_a_block_scale_that_is_no_number_is_refused(good: Callable[[str], Path], tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        raw = tensors[f"{DOWN}.weight_scale"].view(torch.uint8)
        raw[3, 1] = 0x7F  # NaN
        raw[4, 2] |= 0x80  # a negative scale

    message = refusal(broken(good("nvfp4"), tmp_path, edit))
    assert f"tensor '{DOWN}.weight_scale': expected finite E4M3 values, found 2 codes" in message


def test_a_weight_code_that_is_no_number_is_refused(good: Callable[[str], Path], tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight"].view(torch.uint8)[0, 0] = 0xFF

    message = refusal(broken(good("fp8"), tmp_path, edit))
    assert f"tensor '{DOWN}.weight': expected finite E4M3 values, found 1 codes" in message


def test_blocks_of_another_size_are_refused_by_their_size(good: Callable[[str], Path], tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        name = f"{DOWN}.weight_scale"
        tensors[name] = tensors[name].view(torch.uint8)[:, ::2].contiguous().view(torch.float8_e4m3fn)

    message = refusal(broken(good("nvfp4"), tmp_path, edit))
    assert "(blocks of 32 columns instead of 16)" in message


def test_a_group_size_other_than_16_is_refused(good: Callable[[str], Path], tmp_path: Path) -> None:
    message = refusal(reconfigured(good("nvfp4"), tmp_path, group_size=32), ConfigError)
    assert "group_size of NVFP4: expected 16, found 32" in message


def test_a_scale_per_channel_is_refused(good: Callable[[str], Path], tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale"] = torch.ones(64)

    message = refusal(broken(good("fp8"), tmp_path, edit))
    assert f"'{DOWN}.weight_scale': expected F32 [] for fp8, found F32 [64]" in message


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "NVFP4_AWQ", "MXFP8", 8])
def test_an_unknown_algorithm_is_refused_by_name(
    good: Callable[[str], Path], tmp_path: Path, algorithm: object
) -> None:
    message = refusal(reconfigured(good("fp8"), tmp_path, quant_algo=algorithm), ConfigError)
    assert f"found {json.dumps(algorithm)}" in message
    assert "expected one of FP8, NVFP4, W4A16_NVFP4" in message


def test_a_quantized_weight_that_the_config_excludes_is_refused(good: Callable[[str], Path], tmp_path: Path) -> None:
    message = refusal(reconfigured(good("fp8"), tmp_path, exclude_modules=["lm_head", "model.layers.2.*"]))
    assert f"'{DOWN}.weight': expected an unquantized dtype, as in target hf_quant_config.json" in message


def test_codes_of_another_format_than_the_config_says_are_refused(good: Callable[[str], Path], tmp_path: Path) -> None:
    message = refusal(reconfigured(good("fp8"), tmp_path, quant_algo="NVFP4"))
    assert f"'{DOWN}.weight': expected U8 [64, 48] for nvfp4, found F8_E4M3 [64, 96]" in message


def test_quantized_weights_without_any_config_are_refused(good: Callable[[str], Path], tmp_path: Path) -> None:
    copy = shutil.copytree(good("fp8"), tmp_path / "copy")
    (copy / "hf_quant_config.json").unlink()
    assert "problems" in refusal(copy)


def test_k_v_scales_of_some_layers_only_are_refused(good: Callable[[str], Path], tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["model.layers.1.self_attn.k_proj.k_scale"] = torch.tensor(0.1)

    copy = broken(good("fp8"), tmp_path, edit)
    message = refusal(reconfigured(copy, tmp_path, kv_cache_quant_algo="FP8"))
    assert "expected the K/V scales of every layer, found no 'model.layers.0.self_attn.k_proj.k_scale'" in message


def test_k_v_in_another_format_is_refused(good: Callable[[str], Path], tmp_path: Path) -> None:
    message = refusal(reconfigured(good("fp8"), tmp_path, kv_cache_quant_algo="NVFP4"), ConfigError)
    assert 'kv_cache_quant_algo: expected FP8 or null, found "NVFP4"' in message


def test_a_weight_of_zeros_has_no_range() -> None:
    assert segment_amax(torch.zeros(4, 16), (4,)).tolist() == [0.0]
