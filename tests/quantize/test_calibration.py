"""Calibration end to end: what it measures, on what, what it says when it cannot, and that it is remembered."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.backends.torch.loading import bind_tensors
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.compile.build import build_engine
from dflash_trt.compile.calibration import calibrate_pair
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_states
from dflash_trt.core.quantization import Calibration, QuantizationConfig
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.formats.registry import split_quantized
from dflash_trt.quantize.calibrate import cache_dir
from dflash_trt.quantize.plan import make_plan
from dflash_trt.quantize.stream import engine_stream
from tests.engines import decode, make_executor
from tests.factories import make_speculators_drafter, make_target
from tests.quantize.conftest import Exports

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed: scripts/test installs it"
)

PROMPTS = [[5 + (i * 7 + j * j) % 250 for j in range(24)] for i in range(4)]  # those of modelopt_export

# ModelOpt ran the prompts through transformers, we in our own kernels; measured: 4.4e-7 in float32, 0.0078 in bfloat16.
RANGE_TOLERANCE = {"float32": 2e-6, "bfloat16": 0.02}


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in PROMPTS))
    return path


def build(
    pair: tuple[Path, Path | None], output: Path, prompts_file: Path | None = None, **quantization: Any
) -> EngineDir:
    if prompts_file is not None:
        quantization["calibration"] = {"prompts": str(prompts_file)}
    config = BuildConfig(
        target=str(pair[0]),
        drafter=None if pair[1] is None else str(pair[1]),
        dtype="float32",
        max_seq_len=256,
        quantization=QuantizationConfig(**quantization) if quantization else None,
    )
    return build_engine(
        config, output, base_dir=Path(), overwrite=True, command=["test"], progress=lambda progress: None
    )


def calibrated(
    checkpoints: tuple[Path, Path | None], *, dtype: torch.dtype = torch.float32, **choices: Any
) -> Calibration:
    pair = open_pair(*checkpoints)
    plan = make_plan(QuantizationConfig(**choices), pair.target, pair.draft, pair.quantization)
    return calibrate_pair(pair, plan, PROMPTS, dtype=dtype, chunk_tokens=32, advance=lambda *told: None)


def weights_of(engine: EngineDir) -> dict[str, torch.Tensor]:
    return load_file(engine.weights_path(0))


@pytest.mark.parametrize(("weight_format", "largest"), [("fp8", 448.0), ("nvfp4", 6 * 448.0)])
def test_ranges_are_those_that_modelopt_measures_in_transformers(
    exports: Exports, dtype_name: str, weight_format: str, largest: float
) -> None:
    found = calibrated((exports.target, None), dtype=getattr(torch, dtype_name), target=weight_format).input_amax
    stored = load_file(exports.directory / f"target-{weight_format}" / "model.safetensors")
    modules = {"qkv": "self_attn.q_proj", "o": "self_attn.o_proj", "gate_up": "mlp.up_proj", "down": "mlp.down_proj"}
    assert len(found) == 16
    for name, amax in found.items():
        _, _, layer, kind = name.split(".")
        expected = stored[f"model.layers.{layer}.{modules[kind]}.input_scale"].item() * largest
        assert amax == pytest.approx(expected, rel=RANGE_TOLERANCE[dtype_name]), name


def test_k_v_ranges_are_those_that_modelopt_measures(exports: Exports, dtype_name: str) -> None:
    found = calibrated((exports.target, None), dtype=getattr(torch, dtype_name), kv_cache="fp8").target_kv
    expected = open_pair(exports.directory / "target-fp8-kv", None).quantization.target_kv
    assert found is not None and expected is not None
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.k == pytest.approx(theirs.k, rel=RANGE_TOLERANCE[dtype_name])
        assert ours.v == pytest.approx(theirs.v, rel=RANGE_TOLERANCE[dtype_name])


def test_the_drafter_sees_the_taps_that_modelopt_would_show_it(exports: Exports, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    found = calibrated((exports.target, exports.drafter), dtype=dtype, drafter="fp8").input_amax["draft.fc"]
    stored = load_file(exports.directory / "drafter-fp8" / "model.safetensors")
    expected = stored["fc.input_scale"].item() * 448
    assert found == pytest.approx(expected, rel=RANGE_TOLERANCE[dtype_name])


def test_the_drafter_is_calibrated_on_taps_of_the_quantized_target(pair: tuple[Path, Path]) -> None:
    """The range of fc's input is the largest tap of the very engine that will run."""
    alone = calibrated(pair, drafter="fp8").input_amax["draft.fc"]
    together = calibrated(pair, target="nvfp4", drafter="fp8")
    assert together.input_amax["draft.fc"] != alone
    opened = open_pair(*pair)
    plan = make_plan(
        QuantizationConfig(target="nvfp4", drafter="fp8"), opened.target, opened.draft, opened.quantization
    )
    stream = engine_stream(
        opened.iter_weights(dtype=torch.float32, mapping=Mapping()), plan, together, dtype=torch.float32
    )
    plain, quantized = split_quantized(dict(stream), plan.table(), plan.formats)
    assert opened.draft is not None
    network = bind_tensors(opened.target, opened.draft, plain, quantized)
    executor = _executor(network)
    layer_ids = opened.draft.target_layer_ids
    largest = [tap.abs().max().item() for prompt in PROMPTS for tap in _taps(executor, prompt, layer_ids)]
    assert together.input_amax["draft.fc"] == pytest.approx(max(largest), rel=1e-5)


def test_an_export_generates_what_our_own_packing_generates_with_its_scales(exports: Exports, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    for weight_format, largest in (("fp8", 448.0), ("nvfp4", 6 * 448.0)):
        source, export = open_pair(exports.target, None), open_pair(exports.directory / f"target-{weight_format}", None)
        read = dict(export.iter_weights(dtype=dtype, mapping=Mapping()))
        plan = make_plan(
            QuantizationConfig(target=weight_format),
            source.target,
            None,
            source.quantization,  # type: ignore[arg-type]
        )
        ranges = {name: read[f"{name}.input_scale"].max().item() * largest for name in plan.formats}
        quantized = dict(
            engine_stream(
                source.iter_weights(dtype=dtype, mapping=Mapping()), plan, Calibration(input_amax=ranges), dtype=dtype
            )
        )
        runs = []
        for tensors in (read, quantized):
            plain, linears = split_quantized(tensors, plan.table(), plan.formats)
            executor = _executor(bind_tensors(source.target, None, plain, linears))
            runs.append(decode(executor, PROMPTS[0], 48, num_draft_tokens=0))
        assert runs[0].tokens == runs[1].tokens
        assert runs[0].logprobs == pytest.approx(runs[1].logprobs, abs=1e-4)


def test_exported_target_and_drafter_become_an_engine_without_modelopt(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    checkpoints = (exports.directory / "target-fp8-kv", exports.directory / "drafter-nvfp4")
    engine = build(checkpoints, tmp_path / "engine")
    quantization = engine.manifest.pretrained_config.quantization
    assert quantization is not None
    assert quantization.linears["target.layers.0.qkv"] == "fp8" and quantization.linears["draft.kv"] == "nvfp4"
    assert quantization.target_kv is not None and quantization.draft_kv is None
    executor = TorchExecutor.open(engine, RuntimeConfig(kv_cache_bytes=1 << 26))
    drafted, plain = (decode(executor, PROMPTS[1], 32, num_draft_tokens=k).tokens[:32] for k in (3, 0))
    assert drafted == plain


@pytest.mark.parametrize("weight_format", ["fp8", "nvfp4"])
def test_a_quantized_engine_drafts_without_changing_its_text(
    pair: tuple[Path, Path], prompts_file: Path, tmp_path: Path, weight_format: str
) -> None:
    engine = build(pair, tmp_path / "engine", prompts_file, target=weight_format, kv_cache="fp8", draft_lm_head="fp8")
    executor = TorchExecutor.open(engine, RuntimeConfig(kv_cache_bytes=1 << 26))
    drafted, plain = (decode(executor, PROMPTS[1], 32, num_draft_tokens=k).tokens[:32] for k in (3, 0))
    assert drafted == plain
    assert engine.weights_path(0).stat().st_size < build(pair, tmp_path / "plain").weights_path(0).stat().st_size / 2


def test_a_drafter_with_a_vocabulary_of_its_own_is_quantized_and_loaded(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    drafter = make_speculators_drafter(tmp_path / "drafter", target_dir=target)
    engine = build((target, drafter), tmp_path / "engine", target="nvfp4_w4a16", draft_lm_head="nvfp4_w4a16")
    executor = TorchExecutor.open(engine, RuntimeConfig(kv_cache_bytes=1 << 26))
    drafted, plain = (decode(executor, PROMPTS[1], 32, num_draft_tokens=k).tokens[:32] for k in (3, 0))
    assert drafted == plain


def test_without_modelopt_only_what_needs_it_is_refused(
    pair: tuple[Path, Path], prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    build(pair, tmp_path / "plain")
    build(pair, tmp_path / "weight-only", target="nvfp4_w4a16")
    build(pair, tmp_path / "pages", prompts_file, kv_cache="fp8")
    with pytest.raises(ConfigError, match="expected NVIDIA ModelOpt") as raised:
        build(pair, tmp_path / "fp8", prompts_file, target="fp8")
    assert "pip install 'dflash-trt[quantize]'" in str(raised.value)
    assert not (tmp_path / "fp8").exists()


def test_activations_beyond_the_range_of_the_dtype_are_refused_by_name(prompts_file: Path, tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"] *= 1e38
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError) as raised:
        build((target, None), tmp_path / "engine", prompts_file, target="fp8")
    assert "calibration: the input of target.layers.1." in str(raised.value)
    assert "expected finite values, found NaN or infinity" in str(raised.value)
    assert not (tmp_path / "engine").exists()


def test_the_same_inputs_are_calibrated_once(pair: tuple[Path, Path], prompts_file: Path, tmp_path: Path) -> None:
    first = build(pair, tmp_path / "first", prompts_file, target="fp8")
    second = build(pair, tmp_path / "second", prompts_file, target="fp8")
    other = build(pair, tmp_path / "other", prompts_file, target="nvfp4")
    notes = [engine.provenance()["notes"] for engine in (first, second, other)]
    assert notes[0] == ["calibrated on 4 prompts, 96 tokens"]
    assert notes[1] == ["calibrated on 4 prompts, 96 tokens, by an earlier build"]
    assert notes[2] == ["calibrated on 4 prompts, 96 tokens"]
    assert first.weights_path(0).read_bytes() == second.weights_path(0).read_bytes()


def test_a_damaged_cache_is_measured_again(pair: tuple[Path, Path], prompts_file: Path, tmp_path: Path) -> None:
    first = build(pair, tmp_path / "first", prompts_file, target="fp8")
    (cached,) = cache_dir().iterdir()
    cached.write_text('{"input_amax": {"target.layers.0.qkv": -1}}')
    second = build(pair, tmp_path / "second", prompts_file, target="fp8")
    assert second.provenance()["notes"] == ["calibrated on 4 prompts, 96 tokens"]
    assert first.weights_path(0).read_bytes() == second.weights_path(0).read_bytes()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: expected a JSON object with one of prompt, messages, prompt_token_ids"),
        ('{"text": "x"}', "line 2: expected a JSON object with one of"),
        ('{"prompt_token_ids": [5, 999]}', "expected token ids below the target's vocab_size 272"),
    ],
)
def test_a_wrong_row_of_prompts_is_named(
    pair: tuple[Path, Path], prompts_file: Path, tmp_path: Path, line: str, words: str
) -> None:
    prompts_file.write_text(f'{{"prompt_token_ids": [5, 6, 7]}}\n{line}\n')
    with pytest.raises(ConfigError) as raised:
        build(pair, tmp_path / "engine", prompts_file, target="fp8")
    assert words in str(raised.value)


def test_text_prompts_need_a_tokenizer(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", tokenizer=False)
    with pytest.raises(ConfigError, match="expected a target with a tokenizer"):
        build((target, None), tmp_path / "engine", target="fp8")


def _executor(network: Any) -> TorchExecutor:
    from dflash_trt.backends.page_budget import plan_pages

    plan = plan_pages(
        engine_states(network.target, network.draft, dtype="float32"),
        page_size=4,
        max_batch_size=8,
        max_seq_len=256,
        budget_bytes=1 << 28,
    )
    max_draft_len = network.draft.max_draft_len if network.draft else 0
    return TorchExecutor(network, page_plan=plan, max_batch_size=8, max_num_tokens=1024, max_draft_len=max_draft_len)


def _taps(executor: TorchExecutor, prompt: list[int], layer_ids: tuple[int, ...]) -> list[torch.Tensor]:
    """Outputs of the tapped layers, seen from outside: the residual stream as it enters the layers after them."""
    from dflash_trt.network import decoder

    outputs: list[torch.Tensor] = []
    run_layers = decoder.run_layers

    def watched(*arguments: Any) -> Any:
        outputs.extend(run_layers(*arguments))
        return outputs

    decoder.run_layers = watched
    try:
        executor.target_logits(prompt)
    finally:
        decoder.run_layers = run_layers
    return [outputs[layer_id] for layer_id in layer_ids]


def test_an_unquantized_executor_has_the_logits_of_its_steps(pair: tuple[Path, Path]) -> None:
    executor = make_executor(*pair)
    logits = executor.target_logits(PROMPTS[0]).log_softmax(-1)
    run = decode(executor, PROMPTS[0], 1, num_draft_tokens=0)
    assert logits[-1].argmax().item() == run.tokens[0]
    assert logits[-1].max().item() == pytest.approx(run.logprobs[0], abs=1e-5)


def test_the_experts_of_a_layer_share_the_range_of_their_inputs(tmp_path: Path, prompts_file: Path) -> None:
    """A router is a linear, too, which an override may name."""
    target = make_target(tmp_path / "target", family="gpt_oss", num_hidden_layers=2)
    overrides = {"target.layers.1.router": "fp8"}
    ranges = calibrated((target, None), target="fp8", overrides=overrides).input_amax
    kinds = ("qkv", "o", "experts.gate_up", "experts.down")
    linears = {f"target.layers.{i}.{kind}" for i in range(2) for kind in kinds}
    assert set(ranges) == {*linears, "target.layers.1.router"}
    engine = build((target, None), tmp_path / "engine", prompts_file, target="fp8", overrides=overrides)
    plain = build((target, None), tmp_path / "plain")
    stored, unquantized = weights_of(engine), weights_of(plain)
    assert stored["target.layers.1.router"].dtype == torch.float8_e4m3fn
    down = "target.layers.1.experts.down"
    assert stored[down].dtype == torch.float8_e4m3fn and stored[down].shape == unquantized[down].shape
    assert torch.equal(stored[f"{down}.input_scale"], torch.full((8, 1), ranges[down] / 448))
    largest = unquantized[down].abs().amax(dim=(1, 2))
    assert torch.equal(stored[f"{down}.weight_scale"][:, 0], largest / 448)
    tokens = list(range(4, 24))
    found, expected = (TorchExecutor.open(each, RuntimeConfig()).target_logits(tokens) for each in (engine, plain))
    difference = (found - expected).norm() / expected.norm()
    assert 1e-4 < difference < 0.2
