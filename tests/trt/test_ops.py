"""Every op of the façade alone: built by TensorRT's front end and compiler, read back, and equal to torch's."""

import pytest
import torch

from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.host_views import host_tensor
from dflash_trt.backends.tensorrt.layers import Layers
from dflash_trt.backends.tensorrt.module import make_logger
from dflash_trt.backends.tensorrt.ops import TrtOps
from dflash_trt.backends.torch.ops import TorchOps, make_rope_table
from dflash_trt.core.model.rope import RopeSpec, Rotary
from dflash_trt.network.ops import Linear
from tests.trt.interpreter import NetworkInterpreter
from tests.trt.networks import tensor_of

DTYPES = ["float32", "bfloat16", "float16"]
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}  # of values near 1: a few units in the last place
ROTARY = Rotary(RopeSpec(theta=10000.0), 8)

X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(12, 16, generator=torch.Generator().manual_seed(1)) / 4
IDS = torch.tensor([3, 0, 11, 3, 7], dtype=torch.int32)

OPS = {
    "embedding": lambda ops, x, w, ids: ops.embedding(w(WEIGHT), ids),
    "scaled embedding": lambda ops, x, w, ids: ops.embedding(w(WEIGHT), ids, 73.32),
    "linear": lambda ops, x, w, ids: ops.linear(x, Linear(weight=w(WEIGHT))),
    "linear with bias": lambda ops, x, w, ids: ops.linear(x, Linear(weight=w(WEIGHT), bias=w(WEIGHT[:, 0]))),
    "rms_norm": lambda ops, x, w, ids: ops.rms_norm(x, w(WEIGHT[0]), 1e-6),
    "rms_norm of heads": lambda ops, x, w, ids: ops.rms_norm(ops.split_heads(x, 8), w(WEIGHT[0, :8]), 1e-6),
    "add": lambda ops, x, w, ids: ops.add(x, x),
    "scale": lambda ops, x, w, ids: ops.scale(x, 0.37),
    "silu_mul": lambda ops, x, w, ids: ops.silu_mul(x),
    "gelu_mul": lambda ops, x, w, ids: ops.gelu_mul(x),
    "softcap": lambda ops, x, w, ids: ops.softcap(x, 1.5),
    "tanh": lambda ops, x, w, ids: ops.tanh(x),
    "sigmoid": lambda ops, x, w, ids: ops.sigmoid(x),
    "mul by rows": lambda ops, x, w, ids: ops.mul(x, x),
    "mul by a number": lambda ops, x, w, ids: ops.mul(x, w(WEIGHT[0, :1])),
    "unweighted_rms_norm": lambda ops, x, w, ids: ops.unweighted_rms_norm(ops.split_heads(x, 8), 1e-6),
    "split and concat": lambda ops, x, w, ids: ops.concat(ops.split(x, (4, 10, 2))[::-1]),
    "rope": lambda ops, x, w, ids: ops.rope(ops.split_heads(x, 8), ops.rope_table(ROTARY, ids)),
    "gather_rows of a weight": lambda ops, x, w, ids: ops.gather_rows(w(WEIGHT), ids),
    "gather_rows": lambda ops, x, w, ids: ops.gather_rows(x, w(torch.tensor([[4, 0], [1, 1]], dtype=torch.int32))),
}


def build(trt, dtype, compute):
    """(the network, its logger, its builder, the interpreter) of one op over x [N, 16] and ids [N]."""
    torch_dtype = getattr(torch, dtype)
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    layers = Layers(trt, network, logger)
    x = layers.add_input("x", dtype, (-1, 16), ("N", "H"))
    ids = layers.add_input("ids", "int32", (-1,), ("N",))
    counter = iter(range(99))

    def weight(values):
        stored = (values.to(torch_dtype) if values.is_floating_point() else values).contiguous()
        host = host_tensor(f"weight {next(counter)}", stored)
        return layers.tensor(host) if values.dtype == torch.int32 else host

    cos, sin = make_rope_table(ROTARY, num_positions=64, dtype=torch_dtype)
    tables = {ROTARY: (host_tensor("cos", cos), host_tensor("sin", sin))}
    layers.mark_output(compute(TrtOps(layers, None, None, tables), x, weight, ids), "out")
    constants = {host.name: tensor_of(host) for host in layers.constant_owners}
    return network, layers, builder, NetworkInterpreter(trt, network, constants)


def compiled(trt, builder, network, shapes):
    """The plan, or None; `shapes` are the minimum, optimum and maximum of each input."""
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    profile = builder.create_optimization_profile()
    for name, extents in shapes.items():
        profile.set_shape(name, *extents)
    config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config)


def torch_ops(dtype):
    ops = object.__new__(TorchOps)  # no step: only the ops that need none
    ops._shared_rows = None
    ops._rope_tables = {ROTARY: make_rope_table(ROTARY, num_positions=64, dtype=dtype)}
    return ops


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_an_op_computes_what_torch_computes(trt, name, dtype):
    torch_dtype = getattr(torch, dtype)
    x = X.to(torch_dtype)
    expected = OPS[name](torch_ops(torch_dtype), x, lambda v: v.to(torch_dtype) if v.is_floating_point() else v, IDS)
    *_, interpreter = build(trt, dtype, OPS[name])
    found = interpreter.run({"x": x, "ids": IDS})["out"]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", OPS)
def test_an_op_compiles_with_a_dynamic_number_of_rows(trt, name):
    network, layers, builder, _ = build(trt, "bfloat16", OPS[name])
    plan = compiled(trt, builder, network, {"x": ((1, 16), (4, 16), (64, 16)), "ids": ((1,), (4,), (64,))})
    assert plan is not None, layers.errors
    assert plan.nbytes > 0


def test_the_largest_of_more_scores_than_int32_counts_compiles_where_sampling_selects_it(trt):
    """A vocabulary of 151,936 at 16,384 rows: 2.5e9 scores."""
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    layers = Layers(trt, network, logger)
    scores = layers.add_input("scores", "float32", (-1, 151936), ("N", "V"))
    drawn = layers.add_input("drawn", "int32", (-1, 1), ("N", "1"))
    layers.mark_output(layers.where(layers.binary("GREATER", drawn, 0), drawn, layers.argmax(scores, 1)), "out")
    rows = (1, 64, 16384)
    shapes = {"scores": [(n, 151936) for n in rows], "drawn": [(n, 1) for n in rows]}
    assert compiled(trt, builder, network, shapes) is not None, layers.errors


def test_a_norm_without_its_cast_to_float32_is_noticed(trt, monkeypatch):
    """The tolerance of the op test tells fp32 inside from bfloat16 inside."""
    wide = torch.randn(200, 16, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16) * 8
    ids = torch.zeros(200, dtype=torch.int32)

    def worst(interpreter):
        expected = torch_ops(torch.bfloat16).rms_norm(wide, WEIGHT[0].to(torch.bfloat16), 1e-6)
        found = interpreter.run({"x": wide, "ids": ids})["out"]
        return ((found - expected).abs() / expected.abs().clamp(min=0.1)).max()

    assert worst(build(trt, "bfloat16", OPS["rms_norm"])[-1]) < 0.008  # measured 0.0039: one rounding
    monkeypatch.setattr(Layers, "cast", lambda self, x, dtype: x)
    assert worst(build(trt, "bfloat16", OPS["rms_norm"])[-1]) > 0.008


def test_what_tensorrt_refuses_becomes_an_error_with_its_message(trt):
    from dflash_trt.core.errors import BuildError

    logger = make_logger(trt)
    network = trt.Builder(logger).create_network(0)
    layers = Layers(trt, network, logger)
    x = layers.add_input("x", "float32", (-1, 16), ("N", "H"))
    y = layers.add_input("y", "float32", (-1, 15), ("N", "H"))
    with pytest.raises(BuildError, match=r"add_matrix_multiply.*TensorRT|TensorRT add_matrix_multiply"):
        layers.matmul(x, y, is_b_transposed=True)


def test_rows_of_a_host_tensor_are_views_of_the_same_memory():
    values = torch.arange(12.0).reshape(4, 3)
    part = host_tensor("w", values).rows(1, 3)
    assert isinstance(part, HostTensor)
    values[1, 0] = 99.0
    assert tensor_of(part).tolist() == [[99.0, 4.0, 5.0], [6.0, 7.0, 8.0]]
