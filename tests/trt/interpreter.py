"""Reads a finished `INetworkDefinition` back through TensorRT's own API and executes it in torch.

Nothing here knows what the network is for: layer types, attributes, constants and connections are all taken from the
object that the builder would compile. Only constants that TensorRT's Python API cannot give back (bfloat16, FP8, FP4)
are looked up by layer name among the tensors that the test handed in.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.torch.fixed_shapes import in_vectors
from tests.trt.quantized_layers import constant_of, dequantize, dynamic_quantize, quantize

TORCH_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "FP8": torch.float8_e4m3fn,
    "E8M0": torch.float8_e8m0fnu,
    "INT8": torch.int8,
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "SUB": torch.sub,
    "PROD": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "LESS": torch.lt,
    "GREATER": torch.gt,
    "EQUAL": torch.eq,
    "AND": torch.logical_and,
    "OR": torch.logical_or,
}
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "NOT": torch.logical_not,
    "NEG": torch.neg,
    "ABS": torch.abs,
    "SQRT": torch.sqrt,
    "EXP": torch.exp,
    "LOG": torch.log,
    "ISNAN": torch.isnan,
    "ISINF": torch.isinf,
    "ROUND": torch.round,  # "round to nearest even" (NvInfer.h)
}
_CLASSES = {
    "ACTIVATION": "IActivationLayer",
    "CAST": "ICastLayer",
    "CONCATENATION": "IConcatenationLayer",
    "CONSTANT": "IConstantLayer",
    "CUMULATIVE": "ICumulativeLayer",
    "DEQUANTIZE": "IDequantizeLayer",
    "DIST_COLLECTIVE": "IDistCollectiveLayer",
    "DYNAMIC_QUANTIZE": "IDynamicQuantizeLayer",
    "ELEMENTWISE": "IElementWiseLayer",
    "FILL": "IFillLayer",
    "GATHER": "IGatherLayer",
    "IDENTITY": "IIdentityLayer",
    "MATRIX_MULTIPLY": "IMatrixMultiplyLayer",
    "QUANTIZE": "IQuantizeLayer",
    "REDUCE": "IReduceLayer",
    "SELECT": "ISelectLayer",
    "SHAPE": "IShapeLayer",
    "SHUFFLE": "IShuffleLayer",
    "SLICE": "ISliceLayer",
    "TOPK": "ITopKLayer",
    "UNARY": "IUnaryLayer",
}

RunNode = Callable[[Any, list[Tensor]], list[Tensor]]
Plugins = tuple[list[Any], RunNode]  # nodes, and what runs one
Step = Callable[[list[Tensor]], list[Tensor]]


class NetworkInterpreter:
    """Compiles the network into a list of torch closures once; `run` executes them on concrete tensors."""

    def __init__(self, trt: Any, network: Any, constants: Mapping[str, Tensor], plugins: Plugins | None = None) -> None:
        """Outputs of plugin nodes stand among the network's inputs; `plugins` makes them when they are due."""
        self._constants = constants
        nodes, run_node = plugins if plugins is not None else ([], None)
        made_by_nodes = {name for node in nodes for name in node.outputs}
        self._steps: list[tuple[Step, list[str], list[tuple[str, torch.dtype | None]]]] = []
        self.layer_types: list[str] = []
        known = {network.get_input(i).name for i in range(network.num_inputs)} - made_by_nodes
        layers = [_as_its_class(trt, network.get_layer(i)) for i in range(network.num_layers)]
        for layer in _in_order([*layers, *map(_NodeLayer, nodes)], known):
            if isinstance(layer, _NodeLayer):
                step = functools.partial(run_node, layer.node)
                self._steps.append((step, layer.node.inputs, [(name, None) for name in layer.node.outputs]))
                continue
            outputs = [layer.get_output(j) for j in range(layer.num_outputs)]
            kind = _kind(layer)
            self.layer_types.append(kind)
            step = getattr(self, f"_{kind.lower()}")(layer)
            self._steps.append(
                (step, _input_names(layer), [(out.name, TORCH_DTYPES.get(out.dtype.name)) for out in outputs])
            )
        self._inputs = {
            tensor.name: (TORCH_DTYPES[tensor.dtype.name], tuple(tensor.shape))
            for tensor in (network.get_input(i) for i in range(network.num_inputs))
            if tensor.name not in made_by_nodes
        }
        self.output_names = [network.get_output(i).name for i in range(network.num_outputs)]

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every output by name. Inputs must have the dtypes and fixed sizes that the network declares."""
        values: dict[str, Tensor] = {}
        for name, (dtype, shape) in self._inputs.items():
            tensor = inputs[name]
            assert tensor.dtype == dtype, f"{name}: {tensor.dtype} for {dtype}"
            assert len(tensor.shape) == len(shape), f"{name}: rank"
            assert all(want in (-1, have) for want, have in zip(shape, tensor.shape, strict=True)), name
            values[name] = tensor
        for step, names, outputs in self._steps:
            results = step([values[name] for name in names])
            for (name, dtype), result in zip(outputs, results, strict=True):
                assert dtype is None or result.dtype == dtype, f"{name}: {result.dtype}, TensorRT says {dtype}"
                values[name] = result
        return {name: values[name] for name in self.output_names}

    # One method per layer type: reads the attributes now, returns what to do with the inputs later.

    def _constant(self, layer: Any) -> Step:
        weights, shape = layer.weights, tuple(layer.shape)
        if isinstance(weights, np.ndarray):
            value = torch.from_numpy(weights.copy()).reshape(shape)
        else:
            value = self._constants[layer.name.rsplit(" #", 1)[0]]
            value = constant_of(value, weights.dtype.name, shape)
        return lambda _: [value]

    def _identity(self, layer: Any) -> Step:
        return lambda given: [given[0]]

    def _cast(self, layer: Any) -> Step:
        dtype = TORCH_DTYPES[layer.to_type.name]
        return lambda given: [given[0].to(dtype)]

    def _elementwise(self, layer: Any) -> Step:
        op = layer.op.name
        if op != "DIV":
            function = _BINARY[op]
            return lambda given: [function(*_same_rank_and_dtype(given))]

        def divide(given: list[Tensor]) -> list[Tensor]:
            a, b = _same_rank_and_dtype(given)
            return [a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")]

        return divide

    def _unary(self, layer: Any) -> Step:
        function = _UNARY[layer.op.name]
        return lambda given: [function(given[0])]

    def _activation(self, layer: Any) -> Step:
        """Each number alike wherever it is, as on a GPU."""
        function = {"SIGMOID": torch.sigmoid, "TANH": torch.tanh}[layer.type.name]
        return lambda given: [in_vectors(function, given[0])]

    def _select(self, layer: Any) -> Step:
        def select(given: list[Tensor]) -> list[Tensor]:
            condition, a, b = given
            assert condition.dtype == torch.bool and a.dtype == b.dtype
            assert condition.dim() == a.dim() == b.dim()
            return [torch.where(condition, a, b)]

        return select

    def _reduce(self, layer: Any) -> Step:
        op, axis, keep = layer.op.name, _only_bit(layer.axes), layer.keep_dims
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "SUM": lambda x: x.sum(axis, keepdim=keep, dtype=x.dtype),
            "AVG": lambda x: x.mean(axis, keepdim=keep),
            "MAX": lambda x: x.amax(axis, keepdim=keep),
            "MIN": lambda x: x.amin(axis, keepdim=keep),
        }
        return lambda given: [functions[op](given[0])]

    def _cumulative(self, layer: Any) -> Step:
        assert layer.op.name == "SUM" and not layer.exclusive and not layer.reverse
        return lambda given: [given[0].cumsum(int(given[1]), dtype=given[0].dtype)]

    def _topk(self, layer: Any) -> Step:
        assert layer.op.name == "MAX"
        axis, k = _only_bit(layer.axes), layer.k

        def top_k(given: list[Tensor]) -> list[Tensor]:
            if k == 1:
                index = given[0].argmax(axis, keepdim=True)  # the first of equal ones
                values = given[0].gather(axis, index)
            else:
                ordered = given[0].sort(dim=axis, descending=True, stable=True)
                values, index = (x.narrow(axis, 0, k) for x in ordered)
            return [values, index.to(TORCH_DTYPES[layer.get_output(1).dtype.name])]

        return top_k

    def _matrix_multiply(self, layer: Any) -> Step:
        turned = [getattr(layer, f"op{i}").name == "TRANSPOSE" for i in (0, 1)]

        def multiply(given: list[Tensor]) -> list[Tensor]:
            a, b = (x.transpose(-1, -2) if turn else x for x, turn in zip(given, turned, strict=True))
            assert a.dtype == b.dtype and a.dim() == b.dim()
            return [a @ b]

        return multiply

    def _shape(self, layer: Any) -> Step:
        return lambda given: [torch.tensor(given[0].shape, dtype=torch.int64)]

    def _shuffle(self, layer: Any) -> Step:
        rank = len(layer.get_input(0).shape)
        first = list(layer.first_transpose)[:rank]
        second = list(layer.second_transpose)
        dims_set = layer.reshape_dims  # None: not a reshape, or one to a shape known only at run time
        fixed = None if dims_set is None else list(dims_set)

        def shuffle(given: list[Tensor]) -> list[Tensor]:
            x = given[0].permute(first)
            dims = given[1].tolist() if len(given) == 2 else fixed
            if dims is not None:
                x = x.reshape([x.shape[i] if dim == 0 else dim for i, dim in enumerate(dims)])
            assert second[: x.dim()] == list(range(x.dim()))
            return [x]

        return shuffle

    def _slice(self, layer: Any) -> Step:
        start, stride = list(layer.start), list(layer.stride)
        axes = list(layer.axes) if layer.axes is not None and len(layer.axes) else None
        fixed = list(layer.shape) if layer.num_inputs < 3 or layer.get_input(2) is None else None
        assert layer.num_inputs < 2 or layer.get_input(1) is None, "a start known only at run time"

        def cut(given: list[Tensor]) -> list[Tensor]:
            x = given[0]
            sizes = given[1].tolist() if fixed is None else fixed
            for i, axis in enumerate(axes if axes is not None else range(x.dim())):
                x = x.index_select(axis, start[i] + stride[i] * torch.arange(sizes[i]))
            return [x]

        return cut

    def _concatenation(self, layer: Any) -> Step:
        axis = layer.axis

        def join(given: list[Tensor]) -> list[Tensor]:
            assert len({x.dtype for x in given}) == 1
            return [torch.cat(given, axis)]

        return join

    def _fill(self, layer: Any) -> Step:
        assert layer.operation.name == "LINSPACE"
        dtype = TORCH_DTYPES[layer.to_type.name]

        def count(given: list[Tensor]) -> list[Tensor]:
            size, first, delta = given
            return [first + delta * torch.arange(int(size), dtype=dtype)]

        return count

    def _gather(self, layer: Any) -> Step:
        mode, axis = layer.mode.name, layer.axis
        assert layer.num_elementwise_dims == 0

        def gather(given: list[Tensor]) -> list[Tensor]:
            x, indices = given[0], given[1].long()
            if mode == "ELEMENT":
                return [x.gather(axis, indices)]
            taken = x.index_select(axis, indices.flatten())
            return [taken.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])]

        return gather

    def _quantize(self, layer: Any) -> Step:
        return lambda given: [quantize(given[0], given[1])]

    def _dequantize(self, layer: Any) -> Step:
        axis, dtype = layer.axis, TORCH_DTYPES[layer.to_type.name]
        blocks = _block_shape(layer)
        return lambda given: [dequantize(given[0], given[1], axis=axis, dtype=dtype, block_shape=blocks)]

    def _dynamic_quantize(self, layer: Any) -> Step:
        block_size = layer.block_size
        return lambda given: list(dynamic_quantize(given[0], given[1], block_size=block_size))


class _NodeLayer:
    """A plugin node, seen as a layer where order is decided."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.name = node.name


def _as_its_class(trt: Any, layer: Any) -> Any:
    """`get_layer` gives plain ILayers; the bindings' own way to the attributes is to change the class."""
    layer.__class__ = getattr(trt, _CLASSES[layer.type.name])
    return layer


def _kind(layer: Any) -> str:
    """The layer type; some classes hide it behind a property of the same name."""
    return next(kind for kind, name in _CLASSES.items() if type(layer).__name__ == name)


def _input_names(layer: Any) -> list[str]:
    if isinstance(layer, _NodeLayer):
        return list(layer.node.inputs)
    tensors = [layer.get_input(j) for j in range(layer.num_inputs)]
    return [tensor.name for tensor in tensors if tensor is not None]


def _output_names(layer: Any) -> set[str]:
    if isinstance(layer, _NodeLayer):
        return set(layer.node.outputs)
    return {layer.get_output(j).name for j in range(layer.num_outputs)}


def _in_order(layers: list[Any], known: set[str]) -> list[Any]:
    """Each layer after those it reads; layers stand in the order of creation, and inputs may be set later."""
    known, waiting, ordered = set(known), layers, []
    while waiting:
        later = []
        for layer in waiting:
            if not known.issuperset(_input_names(layer)):
                later.append(layer)
                continue
            names = _output_names(layer)
            assert not known & names, f"{layer.name}: a tensor name given twice"
            known |= names
            ordered.append(layer)
        assert len(later) < len(waiting), f"{later[0].name} reads what nobody makes"
        waiting = later
    return ordered


def _same_rank_and_dtype(given: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Strongly typed networks convert nothing, and TensorRT broadcasts only between equal ranks."""
    a, b = given
    assert a.dtype == b.dtype, f"{a.dtype} with {b.dtype}"
    assert a.dim() == b.dim(), f"rank {a.dim()} with rank {b.dim()}"
    return a, b


def _block_shape(layer: Any) -> tuple[int, ...]:
    try:
        return tuple(layer.block_shape)
    except RuntimeError:  # the bindings' answer where it was not set
        return ()


def _only_bit(mask: int) -> int:
    assert mask.bit_count() == 1
    return mask.bit_length() - 1
