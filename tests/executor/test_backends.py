"""What each backend says of engines: which it does not run, and which need compiling."""

import pytest
import torch

from dflash_trt.backends.base import backend_of
from dflash_trt.backends.cuda import linear
from dflash_trt.backends.cuda.packed import form_of
from dflash_trt.backends.tensorrt.quantized_linear import GEMMS
from dflash_trt.backends.torch.quantized_linear import ACTIVATIONS
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.formats.int4 import Int4Weight
from dflash_trt.formats.nvfp4 import Nvfp4Weight
from dflash_trt.formats.registry import weight_formats
from dflash_trt.kernels import packed_matrix
from tests.factories import make_target
from tests.gemma_targets import EXPERTS, PER_LAYER, make_gemma

ALONE, TWO = Mapping(), Mapping(world_size=2, tp_size=2)
NVFP4 = QuantizationSpec(linears={"target.layers.0.qkv": "nvfp4"})
FP8_PAGES = QuantizationSpec(target_kv=(LayerKvScales(),))


@pytest.fixture
def target(tmp_path):
    return open_pair(make_target(tmp_path / "target"), None).target


def subjects(name, target, quantization=None, mapping=ALONE):
    return [line.split(":")[0] for line in backend_of(name).unsupported(target, None, quantization, mapping)]


def test_a_cpu_runs_whatever_was_built(target) -> None:
    assert subjects("torch", target, NVFP4, TWO) == []


def test_a_gpu_names_every_format_that_it_does_not_compute(target, monkeypatch) -> None:
    both = QuantizationSpec(linears=NVFP4.linears, target_kv=FP8_PAGES.target_kv)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert subjects("cuda", target, both) == ["format nvfp4", "K/V pages"]
    assert subjects("cuda", target) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert subjects("cuda", target, FP8_PAGES, TWO) == []


@pytest.mark.parametrize("head_dim", [24, 528])
def test_a_gpu_names_heads_that_no_kernel_is_made_for(tmp_path, head_dim) -> None:
    odd = open_pair(make_target(tmp_path / "odd", head_dim=head_dim), None).target
    assert subjects("cuda", odd) == ["head_dim of the target"]
    assert subjects("torch", odd) == []


def test_tensorrt_lowers_every_target_on_several_ranks(target, tmp_path) -> None:
    assert subjects("tensorrt", target) == []
    gpt_oss = open_pair(make_target(tmp_path / "gpt_oss", family="gpt_oss"), None).target
    assert subjects("tensorrt", gpt_oss, mapping=TWO) == []


def test_routers_chunks_and_temperatures_have_kernels_but_for_queries_that_are_normed_too(tmp_path) -> None:
    def read(family, **options):
        return open_pair(make_target(tmp_path / family, family=family, **options), None).target

    glm, minimax, llama4 = read("glm4_moe", n_group=4, topk_group=2), read("minimax_m2"), read("llama4_text")
    for backend in ("torch", "cuda", "tensorrt"):
        assert subjects(backend, glm, mapping=TWO) == subjects(backend, minimax, mapping=TWO) == []
        assert subjects(backend, llama4, mapping=TWO) == []
    layers = [
        layer.model_copy(update={"mixer": layer.mixer.model_copy(update={"has_qk_norm": True})})
        for layer in llama4.layers
    ]
    normed = llama4.model_copy(update={"layers": tuple(layers)})
    assert subjects("cuda", normed) == ["temperature of queries"]
    assert subjects("torch", normed) == subjects("tensorrt", normed) == []


def test_gemma_runs_everywhere_but_for_groups_of_wide_heads_that_no_tile_holds(tmp_path) -> None:
    def of(name, **fields):
        return open_pair(make_gemma(tmp_path / name, **({"family": "gemma4_text"} | fields)), None).target

    heads, many = of("heads", global_head_dim=512), of("many", global_head_dim=512, num_attention_heads=18)
    experts = of("experts", **EXPERTS)
    both = of("both", **PER_LAYER, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2)
    for backend in ("cuda", "tensorrt"):
        assert subjects(backend, of(f"3 {backend}", family="gemma3_text")) == []
        assert subjects(backend, of(f"4 {backend}")) == subjects(backend, heads) == []
        assert subjects(backend, experts) == subjects(backend, both) == []
        assert subjects(backend, many) == ["num_attention_heads of the target"]
    assert subjects("torch", both) == subjects("torch", many) == []


def test_only_tensorrt_compiles(tmp_path) -> None:
    config = BuildConfig(target="target")
    assert backend_of("torch").compiler(config, tmp_path) is None
    assert backend_of("cuda").compiler(config, tmp_path) is None


def test_a_cpu_names_a_format_whose_activations_it_cannot_quantize(target, monkeypatch) -> None:
    monkeypatch.delitem(ACTIVATIONS, Nvfp4Weight)
    (message,) = backend_of("torch").unsupported(target, None, NVFP4, ALONE)
    assert message.startswith("linear layers: expected fp8, ")
    assert " nvfp4_w4a16 or unquantized weights, found nvfp4 in target.layers.0.qkv and 0 more" in message


@pytest.mark.parametrize("name", sorted(weight_formats()))
@pytest.mark.parametrize("backend", ["torch", "cuda", "tensorrt"])
def test_every_format_is_computed_by_every_backend(target, monkeypatch, backend, name) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert subjects(backend, target, QuantizationSpec(linears={"target.layers.0.qkv": name})) == []


@pytest.mark.parametrize("name", sorted(weight_formats()))
def test_the_kernels_of_experts_have_every_format_that_a_gpu_computes(target, monkeypatch, name) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    quantization = QuantizationSpec(linears={"target.layers.0.experts.down": name})
    assert subjects("cuda", target, quantization) == subjects("tensorrt", target, quantization) == []
    assert form_of(weight_formats()[name].weight_type) in packed_matrix.FORMS
    with pytest.raises(ConfigError, match=r"packed weights: expected Fp8Weight, .*, found QuantizedWeight"):
        form_of(QuantizedWeight)


def test_a_gpu_names_a_weight_only_format_without_a_kernel(target, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr(linear, "WEIGHT_ONLY", tuple(kind for kind in linear.WEIGHT_ONLY if kind is not Int4Weight))
    quantization = QuantizationSpec(linears={"target.layers.0.qkv": "int4"})
    (message,) = backend_of("cuda").unsupported(target, None, quantization, ALONE)
    assert message.startswith("linear layers: expected fp8, ") and "found int4" in message


def test_tensorrt_names_a_format_without_a_lowering(target, monkeypatch) -> None:
    assert subjects("tensorrt", target, NVFP4) == []
    monkeypatch.delitem(GEMMS, Nvfp4Weight)
    assert subjects("tensorrt", target, NVFP4) == ["linear layers"]
