"""Hybrids that ModelOpt quantized, read bit for bit; and hybrids that a build quantizes through it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt import LLM, SamplingParams
from dflash_trt.backends.torch.native.library import NoKernels
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.quantization import QuantizationConfig
from tests.checkpoint.refusals import edit_tensors, weights_of
from tests.checkpoint.test_quantized_hybrids import assert_is_read
from tests.engine_dir.building import build
from tests.engines import decode, make_executor
from tests.factories import make_target, make_zlab_drafter
from tests.quantize.conftest import ROOT
from tests.quantize.test_modelopt_parity import independent_dequantization

PROMPTS = [[5 + (i * 7 + j * j) % 250 for j in range(24)] for i in range(4)]  # of modelopt_export
SIZES = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "tokenizer": False}
SIZES |= {"linear_key_head_dim": 24, "linear_value_head_dim": 16, "intermediate_size": 64}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 48}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed: scripts/test installs it")
    root = tmp_path_factory.mktemp("exports")
    make_target(root / "dense", family="qwen3_5_text", **SIZES)
    make_target(root / "next", family="qwen3_next", **SIZES, **EXPERTS)
    words = [sys.executable, "-m", "tests.quantize.hybrid_export", str(root)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return root


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be compiled for every test, into a cache of its own."""
    monkeypatch.setattr("dflash_trt.backends.torch.executor.cpu_kernels", lambda: NoKernels("not wanted"))


def write_dequantized(export: Path, output: Path) -> Path:
    """The export without quantization."""
    stored = load_file(export / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(("_scale", "_scale_2"))}
    for name in tensors:
        module = name.removesuffix(".weight")
        if f"{module}.weight_scale" in stored:
            tensors[name] = independent_dequantization(stored, module)
    output.mkdir()
    config = json.loads((export / "config.json").read_text())
    config.pop("quantization_config", None)
    (output / "config.json").write_text(json.dumps(config))
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    return output


@pytest.mark.parametrize("name", ["next-nvfp4", "dense-nvfp4", "dense-fp8"])
def test_an_exported_hybrid_is_read_to_the_bit(exports: Path, tmp_path: Path, name: str) -> None:
    plain = write_dequantized(exports / name, tmp_path / "plain")
    names = assert_is_read(exports / name, plain)
    assert {"target.layers.0.qkvz", "target.layers.0.o", "target.layers.1.qkv"} <= names
    assert "target.layers.0.ba" not in names, "ModelOpt leaves the gates as they are"
    run = decode(make_executor(exports / name, has_kernels=False), PROMPTS[0], 8, num_draft_tokens=0)
    assert len(run.tokens) == 8 and all(torch.tensor(run.logprobs).isfinite())


def test_codes_of_other_rows_are_noticed(exports: Path, tmp_path: Path) -> None:
    """The negative control: two key heads change places."""
    plain = write_dequantized(exports / "dense-nvfp4", tmp_path / "plain")

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        scales = tensors["model.layers.0.linear_attn.in_proj_qkv.weight_scale"].view(torch.uint8)
        scales[[0, 24]] = scales[[24, 0]]

    edit_tensors(exports / "dense-nvfp4", swap)
    with pytest.raises(AssertionError, match=r"layers\.0\.qkvz"):
        assert_is_read(exports / "dense-nvfp4", plain)
    edit_tensors(exports / "dense-nvfp4", swap)


@pytest.mark.parametrize("weight_format", ["fp8", "nvfp4"])
def test_a_build_quantizes_a_hybrid_with_the_ranges_of_modelopt(
    exports: Path, tmp_path: Path, weight_format: str
) -> None:
    (tmp_path / "target").symlink_to(exports / "dense")
    make_zlab_drafter(tmp_path / "drafter", target_dir=exports / "dense", target_layer_ids=(0, 1))
    rows = [json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    calibration = {"prompts": str(tmp_path / "prompts.jsonl"), "chunk_tokens": 9}  # states go from chunk to chunk
    config = QuantizationConfig(target=weight_format, kv_cache="fp8", calibration=calibration)  # type: ignore[arg-type]
    engine = build(
        tmp_path, tmp_path / "engine", drafter="drafter", dtype="float32", quantization=config, max_seq_len=96
    )
    linears = engine.manifest.pretrained_config.quantization.linears
    assert linears["target.layers.0.qkvz"] == weight_format and "target.layers.0.ba" not in linears
    ours = load_file(engine.path / "rank0.safetensors")
    theirs = weights_of(open_pair(exports / f"dense-{weight_format}", None))
    for name in ("target.layers.0.o", "target.layers.1.down"):
        torch.testing.assert_close(ours[f"{name}.input_scale"], theirs[f"{name}.input_scale"], rtol=1e-3, atol=0)
        assert torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)), name
    with LLM(engine.path, kv_cache_bytes=1 << 20) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], SamplingParams(max_new_tokens=8))
    assert all(len(output.token_ids) for output in outputs)
