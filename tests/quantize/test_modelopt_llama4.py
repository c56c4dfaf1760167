"""Llama 4 that ModelOpt quantized: experts [experts, in, out] in one tensor, read bit for bit; what they compute."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

from dflash_trt.backends.torch.native.library import NoKernels
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.errors import CheckpointError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.quantization import QuantizationConfig
from dflash_trt.formats.registry import dequantize
from dflash_trt.quantize.plan import make_plan
from tests.checkpoint.refusals import edit_tensors, pair_refusal
from tests.checkpoint.test_quantized_experts import quantized_of
from tests.engine_dir.building import build
from tests.engines import make_executor
from tests.factories import Tensors, make_target, read_json, write_tokenizer
from tests.quantize.conftest import ROOT
from tests.quantize.test_execution import quantized
from tests.quantize.test_modelopt_parity import independent_dequantization
from tests.quantize.test_unified_export import calibration_of, ours, theirs

PROMPTS = [[5 + (i * 7 + j * j) % 250 for j in range(24)] for i in range(4)]  # of modelopt_export
SIZES = {"num_hidden_layers": 2, "num_local_experts": 4, "intermediate_size": 96, "tokenizer": False}
EXPERTS = "model.layers.1.feed_forward.experts"
GATE_UP, DOWN = "target.layers.1.experts.gate_up", "target.layers.1.experts.down"
LOGIT_TOLERANCE = 1e-4  # measured 1.6e-5, of logits up to 14


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed: scripts/test installs it")
    root = tmp_path_factory.mktemp("exports")
    make_target(root / "text", family="llama4_text", **SIZES)
    make_target(root / "text-bfloat16", family="llama4_text", dtype=torch.bfloat16, **SIZES)
    words = [sys.executable, "-m", "tests.quantize.llama4_export", str(root)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return root


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be compiled for every test, into a cache of its own."""
    monkeypatch.setattr("dflash_trt.backends.torch.executor.cpu_kernels", lambda: NoKernels("not wanted"))


def expert_weights(stored: Tensors, name: str) -> torch.Tensor:  # [experts, out, in]
    """By ModelOpt's documentation of its tensors; shares no code with ours."""
    parts = {kind: stored.get(f"{name}_{kind}") for kind in ("weight_scale", "weight_scale_2")}
    parts["weight"] = stored[name]

    def of_expert(part: torch.Tensor, i: int) -> torch.Tensor:
        return part[i].t() if part.dim() == 3 else part[i] if part.dim() else part

    experts = range(len(stored[name]))
    all_parts = [{f"m.{kind}": of_expert(x, i) for kind, x in parts.items() if x is not None} for i in experts]
    return torch.stack([independent_dequantization(each, "m") for each in all_parts])


def dequantized(export: Path) -> Tensors:
    """The export's tensors without quantization, as the unquantized checkpoint has them."""
    stored = load_file(export / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(("_scale", "_scale_2"))}
    for name in tensors:
        if f"{name}_weight_scale" in stored:
            tensors[name] = expert_weights(stored, name).transpose(1, 2).contiguous()
        elif f"{name}_scale" in stored:
            tensors[name] = independent_dequantization(stored, name.removesuffix(".weight"))
    return tensors


def write_plain(export: Path, output: Path) -> Path:
    output.mkdir()
    config = read_json(export / "config.json")
    config.pop("quantization_config", None)
    (output / "config.json").write_text(json.dumps(config))
    save_file(dequantized(export), output / "model.safetensors", {"format": "pt"})
    return output


def model_of(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor(PROMPTS[:1]), use_cache=False).logits[0]
    return logits


def our_logits(export: Path) -> torch.Tensor:
    return make_executor(export, has_kernels=False).target_logits(PROMPTS[0])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGIT_TOLERANCE)


def assert_is_read(export: Path, plain: Path) -> set[str]:
    """The quantized weights, which are equal to those of `plain`, dequantized without us."""
    weights = quantized_of(open_pair(export, None))
    expected = dict(open_pair(plain, None).iter_weights(dtype=torch.float32, mapping=Mapping()))
    for name, weight in weights.items():
        assert torch.equal(dequantize(weight), expected[name]), name
    return set(weights)


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "nvfp4_w4a16", "fp8_w8a16", "mixed", "plain-experts", "seen"])
def test_an_export_is_read_to_the_bit(exports: Path, tmp_path: Path, name: str) -> None:
    plain = write_plain(exports / name, tmp_path / "plain")
    pair = open_pair(exports / name, None)
    names = assert_is_read(exports / name, plain)
    assert "target.layers.1.qkv" in names and "target.layers.1.router" not in names
    assert ({GATE_UP, DOWN} <= names) == (name != "plain-experts")
    formats = {"mixed": "nvfp4", "seen": "nvfp4", "plain-experts": None}
    assert pair.quantization.linears.get(GATE_UP) == formats.get(name, name)
    assert (pair.quantization.target_kv is not None) == (name == "seen")
    if name == "seen":
        return
    source = load_file(exports / "text" / "model.safetensors")
    for part, tensor in dequantized(exports / name).items():  # the reference has rows, columns and signs in place
        assert (tensor - source[part]).norm() < 0.15 * source[part].norm(), part


def test_exchanged_scales_are_noticed(exports: Path, tmp_path: Path) -> None:
    """The negative control of reading: two experts' block scales, or the scales of two tensors, change places."""
    plain = write_plain(exports / "nvfp4", tmp_path / "plain")

    def exchange_experts(tensors: Tensors) -> None:
        scales = tensors[f"{EXPERTS}.gate_up_proj_weight_scale"].view(torch.uint8)
        scales[[0, 1]] = scales[[1, 0]]

    def exchange_tensors(tensors: Tensors) -> None:
        first, second = (f"{EXPERTS}.{word}_proj_weight_scale_2" for word in ("gate_up", "down"))
        tensors[first], tensors[second] = tensors[second], tensors[first]

    for i, change in enumerate((exchange_experts, exchange_tensors)):
        copy = shutil.copytree(exports / "nvfp4", tmp_path / f"copy-{i}")
        edit_tensors(copy, change)
        with pytest.raises(AssertionError, match=r"layers\.1\.experts"):
            assert_is_read(copy, plain)


@pytest.mark.parametrize("name", ["nvfp4", "fp8"])
def test_a_scale_for_each_expert_is_that_experts(exports: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(exports / name, tmp_path / "copy")
    kind = "weight_scale_2" if name == "nvfp4" else "weight_scale"

    def separate(tensors: Tensors) -> None:
        for word in ("gate_up", "down"):
            for part in (kind, "input_scale"):
                tensors[f"{EXPERTS}.{word}_proj_{part}"] = tensors[
                    f"{EXPERTS}.{word}_proj_{part}"
                ] * 2.0 ** torch.arange(4)

    edit_tensors(copy, separate)
    found, one_for_all = (quantized_of(open_pair(directory, None)) for directory in (copy, exports / name))
    for weight in (GATE_UP, DOWN):
        for i in range(4):
            assert torch.equal(dequantize(found[weight])[i], dequantize(one_for_all[weight])[i] * 2**i)
            assert torch.equal(found[weight].input_scale[i], one_for_all[weight].input_scale[i] * 2**i)


@pytest.mark.parametrize("name", ["nvfp4_w4a16", "fp8_w8a16"])
def test_logits_are_those_of_the_dequantized_weights(exports: Path, tmp_path: Path, name: str) -> None:
    expected = logits_of(model_of(write_plain(exports / name, tmp_path / "plain")))
    assert_close(our_logits(exports / name), expected)
    assert (our_logits(exports / "text") - expected).abs().max() > 0.05, "the negative control"


def with_quantized_inputs(model: Any, stored: Tensors, name: str, *, noise: float) -> Any:
    """`model`, whose quantized layers read what the format makes of their inputs times 1 + noise."""

    def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return quantized(x.flatten(0, -2) * (1 + noise), name, scale.item()).view_as(x)

    def experts_forward(module: Any, prefix: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            x = rounded(
                x.view(module.num_experts, -1, module.hidden_size), stored[f"{prefix}.gate_up_proj_input_scale"]
            )
            gate, up = torch.bmm(x, module.gate_up_proj).chunk(2, dim=-1)
            middle = rounded(up * silu(gate), stored[f"{prefix}.down_proj_input_scale"])
            return torch.bmm(middle, module.down_proj).flatten(0, 1)

        return forward

    for prefix, module in model.named_modules():
        if f"{prefix}.input_scale" in stored:
            scale = stored[f"{prefix}.input_scale"]
            module.register_forward_pre_hook(lambda _, inputs, scale=scale: rounded(inputs[0], scale))
        elif f"{prefix}.down_proj_input_scale" in stored:
            module.forward = experts_forward(module, prefix)
    return model


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_logits_are_those_of_quantized_weights_and_inputs(exports: Path, tmp_path: Path, name: str) -> None:
    """At positions where no input stands so near to a rounding boundary that the order of a sum decides."""
    stored = load_file(exports / name / "model.safetensors")
    plain = write_plain(exports / name, tmp_path / "plain")
    unquantized_inputs = logits_of(model_of(plain))
    expected, above, below = (
        logits_of(with_quantized_inputs(model_of(plain), stored, name, noise=noise)) for noise in (0, 2e-6, -2e-6)
    )
    is_clear = torch.stack([(other - expected).abs().amax(1) for other in (above, below)]).amax(0) < LOGIT_TOLERANCE
    assert is_clear.sum() > 16  # measured 23 and 24, of 24
    found = our_logits(exports / name)
    assert_close(found[is_clear], expected[is_clear])
    assert (found - unquantized_inputs)[is_clear].abs().max() > 100 * LOGIT_TOLERANCE, "the negative control"
    if name == "fp8":
        assert_close(found[is_clear], load_file(exports / "fp8.safetensors")["logits"][is_clear])
    copy = shutil.copytree(exports / name, tmp_path / "copy")
    first, second = (f"{EXPERTS}.{word}_proj_input_scale" for word in ("gate_up", "down"))
    edit_tensors(copy, lambda tensors: tensors.update({first: tensors[second], second: tensors[first]}))
    assert (our_logits(copy) - expected)[is_clear].abs().max() > 100 * LOGIT_TOLERANCE, "exchanged scales"


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "fp8_w8a16"])
def test_two_ranks_divide_each_expert_or_the_experts(exports: Path, name: str) -> None:
    pair = open_pair(exports / name, None)
    whole = {part: dequantize(quantized_of(pair)[part]) for part in (GATE_UP, DOWN)}

    def shares(ep_size: int) -> list[Tensors]:
        mappings = [Mapping(world_size=2, tp_size=2, ep_size=ep_size, rank=rank) for rank in range(2)]
        return [{part: dequantize(quantized_of(pair, mapping)[part]) for part in whole} for mapping in mappings]

    first, second = shares(ep_size=1)
    assert torch.equal(torch.cat((first[DOWN], second[DOWN]), dim=2), whole[DOWN])
    gates, ups = zip(*(half[GATE_UP].chunk(2, dim=1) for half in (first, second)), strict=True)
    assert torch.equal(torch.cat((*gates, *ups), dim=1), whole[GATE_UP])
    first, second = shares(ep_size=2)
    assert all(torch.equal(torch.cat((first[part], second[part])), whole[part]) for part in whole)


def test_blocks_of_rows_and_columns_are_refused(exports: Path) -> None:
    message = pair_refusal(exports / "fp8_block", None)
    assert f"'{EXPERTS}.down_proj': expected experts [experts, in, out] in FP8 with a scale for all or each" in message
    assert "found fp8_block, whose scales do not match the codes. Export it in FP8 without blocks" in message


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_2", "input_scale"])
def test_experts_without_a_scale_or_in_another_order_are_refused(exports: Path, tmp_path: Path, scale: str) -> None:
    copy = shutil.copytree(exports / "nvfp4", tmp_path / "copy")
    edit_tensors(copy, lambda tensors: tensors.pop(f"{EXPERTS}.down_proj_{scale}"))
    with pytest.raises(CheckpointError, match=rf"down_proj': expected the scales of nvfp4, found no .*_{scale}'"):
        open_pair(copy, None)

    def transpose(tensors: Tensors) -> None:
        tensors[f"{EXPERTS}.gate_up_proj"] = tensors[f"{EXPERTS}.gate_up_proj"].transpose(1, 2).contiguous()

    edit_tensors(copy, transpose)
    assert "gate_up_proj': expected U8 [4, 32, 192] for nvfp4, found U8 [4, 192, 32]" in pair_refusal(copy, None)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_a_build_quantizes_experts_with_the_ranges_of_modelopt(exports: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "target").symlink_to(exports / "text")
    rows = [json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    config = QuantizationConfig(target=name, calibration={"prompts": str(tmp_path / "prompts.jsonl")})  # type: ignore[arg-type]
    engine = build(tmp_path, tmp_path / "engine", dtype="float32", quantization=config, max_seq_len=96)
    assert engine.manifest.pretrained_config.quantization.linears[GATE_UP] == name
    ours, theirs = load_file(engine.path / "rank0.safetensors"), quantized_of(open_pair(exports / name, None))
    for part in (GATE_UP, DOWN, "target.layers.1.shared.down"):
        torch.testing.assert_close(ours[f"{part}.input_scale"], theirs[part].input_scale, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_our_export_for_tensorrt_llm_has_the_bytes_of_modelopts_own(
    exports: Path, tmp_path: Path, name: str, dtype_name: str
) -> None:
    end = "" if dtype_name == "float32" else f"-{dtype_name}"
    source, export = exports / f"text{end}", exports / f"{name}{end}"
    pair = open_pair(source, None)
    plan = make_plan(QuantizationConfig(target=name), pair.target, None, pair.quantization)
    calibration, expected = calibration_of(export, source, plan), theirs(export)

    def different(source: Path) -> list[str]:
        made, modules = ours(source, plan, calibration, getattr(torch, dtype_name))
        assert made.keys() == expected.keys() and EXPERTS in modules
        return [part for part in expected if made[part] != expected[part]]

    assert different(source) == []
    copy = shutil.copytree(source, tmp_path / "copy")
    edit_tensors(copy, lambda tensors: tensors[f"{EXPERTS}.down_proj"][2, 5].neg_())
    assert different(copy) == [f"{EXPERTS}.down_proj"], "the negative control"


def test_a_build_for_tensorrt_llm_lists_the_experts_as_modelopt_does(exports: Path, tmp_path: Path) -> None:
    target = shutil.copytree(exports / "text", tmp_path / "target")
    write_tokenizer(target)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt_token_ids": PROMPTS[0]}) + "\n")
    overrides = {"target.layers.*.experts.*": "none"}
    for name, choices in {"plain-experts": overrides, "fp8": {}}.items():
        fields = {"target": "fp8", "overrides": choices, "calibration": {"prompts": str(tmp_path / "prompts.jsonl")}}
        config = QuantizationConfig(**fields)  # type: ignore[arg-type]
        options = {"dtype": "bfloat16", "quantization": config, "max_seq_len": 96, "backend": "tensorrt_llm"}
        engine = build(tmp_path, tmp_path / f"engine-{name}", **options)
        described = read_json(engine.path / "target" / "hf_quant_config.json")
        assert described == read_json(exports / name / "hf_quant_config.json")
