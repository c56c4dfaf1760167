"""FP8 and NVFP4 linears: compiled by TensorRT, and equal to the quantized arithmetic of the torch backend."""

import pytest
import torch

from dflash_trt.backends.tensorrt.layers import Layers
from dflash_trt.backends.tensorrt.module import make_logger
from dflash_trt.backends.tensorrt.ops import TrtOps
from dflash_trt.backends.torch.quantized_linear import apply_quantized, prepare_linear
from dflash_trt.formats.base import segment_amax
from dflash_trt.formats.fp8 import Fp8Weight
from dflash_trt.formats.nvfp4 import Nvfp4Weight
from dflash_trt.formats.registry import weight_format
from dflash_trt.network.ops import Linear
from tests.trt.interpreter import NetworkInterpreter
from tests.trt.networks import host_quantized, tensor_of

ROWS, COLUMNS = (8, 16, 8), 64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(7, 256, generator=GENERATOR)
FP8_CODES = (torch.randn(sum(ROWS), COLUMNS, generator=GENERATOR) * 40).to(torch.float8_e4m3fn)
FP4_CODES = torch.randint(0, 256, (sum(ROWS), COLUMNS // 2), generator=GENERATOR, dtype=torch.uint8)
BLOCK_SCALES = (torch.rand(sum(ROWS), COLUMNS // 16, generator=GENERATOR) * 4 + 1).to(torch.float8_e4m3fn)


def fp8(weight_scale, input_scale):
    return Fp8Weight(segments=ROWS, weight_scale=weight_scale, input_scale=input_scale, codes=FP8_CODES)


def nvfp4(weight_scale, input_scale):
    return Nvfp4Weight(
        segments=ROWS, weight_scale=weight_scale, input_scale=input_scale, codes=FP4_CODES, block_scale=BLOCK_SCALES
    )


def of_format(name, segments=ROWS, columns=COLUMNS):
    """A weight in a format without activation scales, and how many GEMMs it takes."""
    known = weight_format(name)
    values = torch.randn(sum(segments), columns, generator=GENERATOR).bfloat16()
    amax = segment_amax(values, segments)
    return known.quantize(values, segments=segments, weight_amax=amax, input_amax=None), 1


def scales(*values):
    return torch.tensor(values, dtype=torch.float32)


WEIGHTS = {
    "fp8, one input scale": (fp8(scales(0.01, 0.02, 0.005), scales(0.008, 0.008, 0.008)), 1),
    "fp8, an input scale per segment": (fp8(scales(0.01, 0.02, 0.005), scales(0.008, 0.004, 0.004)), 2),
    "fp8, weight only": (fp8(scales(0.01, 0.02, 0.005), None), 1),
    "nvfp4": (nvfp4(scales(0.02, 0.02, 0.02), scales(0.001, 0.001, 0.001)), 1),
    "nvfp4, scales per segment": (nvfp4(scales(0.02, 0.02, 0.01), scales(0.001, 0.002, 0.002)), 3),
    "nvfp4, weight only": (nvfp4(scales(0.02, 0.02, 0.02), None), 1),
    "fp8_w8a16": of_format("fp8_w8a16"),
    "fp8_block, partial blocks": of_format("fp8_block"),
    "fp8_block": of_format("fp8_block", segments=(256, 128), columns=256),
    "int4": of_format("int4"),
    "mxfp4": of_format("mxfp4"),
}


def columns_of(weight):
    return weight.codes.shape[1] * (2 if weight.codes.dtype == torch.uint8 else 1)


def define(trt, dtype, weight):
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    layers = Layers(trt, network, logger)
    x = layers.add_input("x", dtype, (-1, columns_of(weight)), ("N", "H"))
    host = host_quantized({"w": weight})["w"]
    layers.mark_output(TrtOps(layers, None, None, []).linear(x, Linear(weight=host)), "out")
    return builder, network, layers


def interpreted(trt, weight):
    _, network, layers = define(trt, "float32", weight)
    constants = {owner.name: tensor_of(owner) for owner in layers.constant_owners}
    return NetworkInterpreter(trt, network, constants)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_quantized_linear_computes_what_torch_computes(trt, name):
    weight, num_gemms = WEIGHTS[name]
    x = X[:, : columns_of(weight)].contiguous()
    expected = apply_quantized(x, prepare_linear(Linear(weight=weight), torch.float32))
    network = interpreted(trt, weight)
    found = network.run({"x": x})["out"]
    assert network.layer_types.count("MATRIX_MULTIPLY") == num_gemms
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_quantized_linear_compiles_for_blackwell(trt, name):
    builder, network, layers = define(trt, "bfloat16", WEIGHTS[name][0])
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    profile = builder.create_optimization_profile()
    columns = columns_of(WEIGHTS[name][0])
    profile.set_shape("x", (1, columns), (8, columns), (64, columns))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    assert plan is not None, layers._logger.errors
    assert plan.nbytes > 0


@pytest.mark.parametrize("name", ["fp8, one input scale", "nvfp4"])
def test_codes_in_another_order_are_noticed(trt, name):
    weight, _ = WEIGHTS[name]
    x = X[:, : columns_of(weight)].contiguous()
    expected = apply_quantized(x, prepare_linear(Linear(weight=weight), torch.float32))
    codes = weight.codes.view(torch.uint8)
    turned = (codes << 4) | (codes >> 4) if name == "nvfp4" else codes.flip(0)
    changed = type(weight)(
        **{
            field: getattr(weight, field)
            for field in ("segments", "weight_scale", "input_scale", "block_scale")
            if hasattr(weight, field)
        },
        codes=turned.contiguous().view(weight.codes.dtype),
    )
    found = interpreted(trt, changed).run({"x": x})["out"]
    assert (found - expected).abs().max() > 0.1 * expected.abs().max()


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4, weight only", "fp8, weight only"])
def test_scales_of_weights_are_multiplied_in_float32_and_the_gemm_names_its_layer(trt, name):
    """Of two levels of scales the product is rounded once, when it is cast to the network's dtype."""
    weight, _ = WEIGHTS[name]
    _, network, _ = define(trt, "bfloat16", weight)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    producers = {layer.get_output(0).name: layer for layer in layers}
    [gemm] = [layer for layer in layers if layer.type == trt.LayerType.MATRIX_MULTIPLY]
    assert gemm.metadata == "[quantized linear w[0:32]]"
    dequantize = producers[gemm.get_input(1).name]
    scale = producers[dequantize.get_input(1).name]
    if name.startswith("fp8"):
        assert (scale.type, scale.get_output(0).dtype) == (trt.LayerType.CONSTANT, trt.float32)
        return
    assert (scale.type, scale.get_output(0).dtype) == (trt.LayerType.CAST, trt.bfloat16)
    product = producers[scale.get_input(0).name]
    assert (product.type, product.get_output(0).dtype) == (trt.LayerType.DEQUANTIZE, trt.float32)
