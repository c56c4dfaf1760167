"""Where the torch backend runs."""

from dataclasses import replace

import pytest
import torch

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.core.errors import ConfigError, EngineDirError
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir.provenance import PLUGIN_LIBRARY_NAME, TensorRTRecord
from dflash_trt.executor import opening
from dflash_trt.executor.opening import _runs_on_gpu, open_executor, resolved_config
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength
from dflash_trt.serving.llm import LLM
from tests.engine_dir.building import build
from tests.factories import make_target, make_zlab_drafter


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch):
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)  # noqa: B023
        assert _runs_on_gpu("auto") is has_gpu
        assert _runs_on_gpu("cpu") is False


def test_asking_for_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r'device: expected a CUDA GPU .*, found none\. .* device "cpu"'):
        _runs_on_gpu("cuda")


def test_a_gpu_without_triton_is_refused_rather_than_left_idle(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"device: expected Triton.*Install triton"):
        _runs_on_gpu("auto")
    assert not _runs_on_gpu("cpu")


FP8_PAGES = QuantizationSpec(target_kv=(LayerKvScales(),))
DRAFT_FP8_PAGES = QuantizationSpec(draft_kv=(LayerKvScales(),))
B200, H200, A10, L4 = (10, 0), (9, 0), (8, 6), (8, 9)


def linears(weight_format):
    return QuantizationSpec(linears={f"target.layers.{i}.qkv": weight_format for i in range(3)})


def on_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


@pytest.mark.parametrize(
    ("capability", "quantization", "message"),
    [
        (
            H200,
            linears("nvfp4"),
            "format nvfp4: expected a GPU of compute capability 10.0 or newer, found 9.0. Use `fp8` for speed, or",
        ),
        (A10, linears("fp8"), "format fp8: expected a GPU of compute capability 8.9 or newer, found 8.6. Use"),
        (
            A10,
            FP8_PAGES,
            "K/V pages: expected a GPU of compute capability 8.9 or newer for FP8 pages, found 8.6. Build",
        ),
        (A10, DRAFT_FP8_PAGES, "K/V pages: expected a GPU of compute capability 8.9"),
    ],
)
def test_formats_that_a_gpu_cannot_run_are_refused_before_loading(
    tmp_path, monkeypatch, capability, quantization, message
):
    engine = open_quantized(tmp_path, quantization)
    on_gpu(monkeypatch, capability)
    monkeypatch.setattr(TorchGpuExecutor, "open", None)
    with pytest.raises(EngineDirError) as error:
        open_executor(engine, RuntimeConfig())
    assert f"engine on a GPU: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("capability", "quantization"),
    [
        (H200, linears("nvfp4_w4a16")),
        (H200, linears("fp8")),
        (B200, linears("nvfp4")),
        *((A10, linears(name)) for name in ("nvfp4_w4a16", "fp8_w8a16", "fp8_block", "mxfp4", "int4")),
        (L4, FP8_PAGES),
        (H200, QuantizationSpec()),
    ],
)
def test_formats_that_a_gpu_runs_are_opened_there(tmp_path, monkeypatch, capability, quantization):
    engine = open_quantized(tmp_path, quantization)
    on_gpu(monkeypatch, capability)
    monkeypatch.setattr(TorchGpuExecutor, "open", lambda engine, config, **options: options)
    assert open_executor(engine, RuntimeConfig(), draft_lens=(0, 3))["draft_lens"] == (0, 3)


class OpenedError(Exception):
    pass


@pytest.mark.parametrize(
    ("options", "draft_lens"),
    [
        ({}, (0, 3)),
        ({"draft_length": 2}, (2,)),
        ({"adaptive_draft_length": True}, (0, 1, 2, 3)),
        ({"draft_length_policy": BatchSizeDraftLength({1: 3, 4: 1})}, (1, 3)),
        ({"draft_length": {1: 3, 4: 1}}, (1, 3)),
        ({"use_drafter": False}, (0,)),
    ],
)
def test_an_engine_is_opened_for_every_k_that_its_steps_may_have(pair_engine, monkeypatch, options, draft_lens):
    def spy(engine, config, **given):
        raise OpenedError(given["draft_lens"])

    monkeypatch.setattr(opening, "open_executor", spy)
    with pytest.raises(OpenedError) as opened:
        LLM(pair_engine, **options)
    assert opened.value.args == (draft_lens,)


@pytest.fixture(scope="module")
def pair_engine(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    make_zlab_drafter(root / "drafter", target_dir=make_target(root / "target"), block_size=4)
    return build(root, root / "engine", drafter="drafter").path


def open_quantized(root, quantization):
    """An engine that says it is quantized so; its weights are not looked at."""
    make_target(root / "target")
    engine = build(root, root / "engine")
    config = engine.manifest.pretrained_config.model_copy(update={"quantization": quantization})
    return replace(engine, manifest=engine.manifest.model_copy(update={"pretrained_config": config}))


@pytest.mark.parametrize(
    ("device", "asked", "overlaps"),
    [("cpu", None, False), ("cuda", None, True), ("cuda", False, False), ("cpu", True, True)],
)
def test_steps_are_chained_on_a_gpu_unless_told_otherwise(tmp_path, monkeypatch, device, asked, overlaps):
    target = make_target(tmp_path / "target")
    engine = build(tmp_path, tmp_path / "engine", target=str(target), max_draft_len=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = resolved_config(engine, RuntimeConfig(device=device, overlap_scheduling=asked))
    assert config.overlap_scheduling is overlaps


def test_prefixes_of_hybrids_are_cached_where_their_states_are_copied(tmp_path, monkeypatch):
    make_target(tmp_path / "target", family="qwen3_5_text")
    engine = build(tmp_path, tmp_path / "engine", max_draft_len=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = resolved_config(engine, RuntimeConfig(device="cuda", num_state_snapshots=3))
    assert config.enable_prefix_caching and config.num_state_snapshots == 3
    compiled = replace(engine, manifest=engine.manifest.model_copy(update={"backend": "tensorrt"}))
    config = resolved_config(compiled, RuntimeConfig(device="cuda", num_state_snapshots=3))
    assert config.enable_prefix_caching and config.num_state_snapshots == 3


def test_a_tensorrt_engine_is_deterministic_if_it_was_built_so(tmp_path, monkeypatch):
    target = make_target(tmp_path / "target")
    engine = build(tmp_path, tmp_path / "engine", target=str(target), max_draft_len=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("cuda", "cpu"):
        assert resolved_config(engine, RuntimeConfig(deterministic=True, device=device)).deterministic
    record = {"tensorrt_version": "11.4", "gpu_name": "H200", "compute_capability": "9.0", "flags": (), "profiles": ()}
    record |= {"plugin_library": PLUGIN_LIBRARY_NAME, "num_layers": 1, "build_time_s": 1.0}
    refusal = r"deterministic: expected a TensorRT engine that was built with it, found one .* with --deterministic\."
    for is_deterministic in (True, False):
        tensorrt = TensorRTRecord(**record, deterministic=is_deterministic)
        manifest = engine.manifest.model_copy(update={"backend": "tensorrt", "tensorrt": tensorrt})
        compiled, config = replace(engine, manifest=manifest), RuntimeConfig(deterministic=True)
        if is_deterministic:
            assert resolved_config(compiled, config).deterministic
            continue
        with pytest.raises(ConfigError, match=refusal):
            resolved_config(compiled, config)
