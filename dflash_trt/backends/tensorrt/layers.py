"""TensorRT's `add_*` calls, wrapped: short names, shape arithmetic, errors where TensorRT only logs.

Knows `INetworkDefinition` and nothing of language models. Handles are ITensors of the module it was given (`tensorrt`
or `tensorrt_rtx`), or HostTensors, which become constants when first used.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from dflash_trt.backends.tensorrt.host_tensor import HostTensor, host_floats, host_ints
from dflash_trt.core.dtype import tensorrt_dtype
from dflash_trt.core.errors import BuildError, problem

ITensor: TypeAlias = Any  # trt.ITensor; the module is chosen at run time
Handle: TypeAlias = Any  # ITensor or HostTensor
Dim: TypeAlias = Any  # an int, or an int64 [1] ITensor known only at run time

_HARMLESS_ERRORS = ("cudaError 35", "CUDA initialization failure")  # the checking builder without a driver


class Layers:
    """Adds layers to one network. Keeps every host tensor that became a constant alive as long as itself."""

    def __init__(self, trt: Any, network: Any, logger: Any) -> None:
        self.trt = trt
        self.network = network
        self._logger = logger
        self._constants: dict[tuple[int, str, tuple[int, ...]], ITensor] = {}
        self._small: dict[tuple[str, tuple[float, ...], tuple[int, ...]], ITensor] = {}
        self.constant_owners: list[HostTensor] = []  # memory that TensorRT reads when it builds

    # -- inputs, outputs, constants

    def add_input(self, name: str, dtype: str, shape: Sequence[int], axes: Sequence[str]) -> ITensor:
        """A network input; `axes` name its dimensions, so that TensorRT knows which sizes are equal."""
        tensor = self.network.add_input(name, self.data_type(dtype), tuple(shape))
        if tensor is None:
            raise BuildError(self._failure("add_input", name))
        for i, axis in enumerate(axes):
            if shape[i] == -1:
                tensor.set_dimension_name(i, axis)
        return tensor

    def mark_output(self, tensor: ITensor, name: str) -> None:
        """Through an identity, so that one tensor may leave under two names."""
        named = self._add("add_identity", tensor)
        named.name = name
        self.network.mark_output(named)

    def tensor(self, handle: Handle) -> ITensor:
        """The ITensor of a handle; a host tensor becomes a constant, once, in place."""
        if not isinstance(handle, HostTensor):
            return handle
        key = (handle.address, handle.dtype, handle.shape)
        if key not in self._constants:
            self._constants[key] = self._constant(handle)
        return self._constants[key]

    def constant_of_bits(
        self, host: HostTensor, data_type: Literal["FP4", "INT4", "E8M0", "INT8"], shape: tuple[int, ...]
    ) -> ITensor:
        """The bytes of a tensor as numbers of another type; of two in a byte, the first is the low nibble."""
        return self._constant(host, dtype=getattr(self.trt.DataType, data_type), shape=shape)

    def floats(self, values: Sequence[float], shape: Sequence[int] = ()) -> ITensor:
        """A small float32 constant, shared with every equal one."""
        key = ("float32", tuple(values), tuple(shape))
        if key not in self._small:
            self._small[key] = self._constant(host_floats("float", list(values), tuple(shape)))
        return self._small[key]

    def ints(
        self, values: Sequence[int], shape: Sequence[int] = (), dtype: Literal["int32", "int64"] = "int32"
    ) -> ITensor:
        """A small integer constant, shared with every equal one."""
        key = (dtype, tuple(values), tuple(shape))
        if key not in self._small:
            self._small[key] = self._constant(host_ints("int", list(values), tuple(shape), dtype))
        return self._small[key]

    def like(self, value: float, x: ITensor) -> ITensor:
        """A constant of x's dtype that broadcasts against x."""
        ones = (1,) * len(x.shape)
        if x.dtype in (self.trt.DataType.INT32, self.trt.DataType.INT64):
            return self.ints([int(value)], ones, "int32" if x.dtype == self.trt.DataType.INT32 else "int64")
        return self._cast(self.floats([value], ones), x.dtype)

    # -- elementwise

    def binary(self, op: str, a: ITensor, b: ITensor) -> ITensor:
        """`op` is an ElementWiseOperation, by name; a number in `b` becomes a constant of a's dtype."""
        other = self.like(b, a) if isinstance(b, int | float) else b
        return self._add("add_elementwise", a, other, getattr(self.trt.ElementWiseOperation, op))

    def unary(self, op: str, x: ITensor) -> ITensor:
        return self._add("add_unary", x, getattr(self.trt.UnaryOperation, op))

    def clamp(self, x: ITensor, least: float, most: float) -> ITensor:
        return self.binary("MIN", self.binary("MAX", x, least), most)

    def sigmoid(self, x: ITensor) -> ITensor:
        return self._add("add_activation", x, self.trt.ActivationType.SIGMOID)

    def tanh(self, x: ITensor) -> ITensor:
        return self._add("add_activation", x, self.trt.ActivationType.TANH)

    def cast(self, x: ITensor, dtype: str) -> ITensor:
        """x itself when it has that dtype already."""
        return self._cast(x, self.data_type(dtype))

    def cast_like(self, x: ITensor, other: ITensor) -> ITensor:
        return self._cast(x, other.dtype)

    def where(self, condition: ITensor, a: ITensor, b: ITensor) -> ITensor:
        return self._add("add_select", condition, a, b)

    def dequantize(self, codes: ITensor, scale: ITensor, data_type: Any, *, axis: int | None = None) -> ITensor:
        """codes * scale: a scalar, one number for each index of `axis`, or one per block along `axis`."""
        layer = self._layer("add_dequantize", codes, scale, data_type)
        if axis is not None:
            layer.axis = axis
        return self._output(layer, "add_dequantize", 0)

    def dequantize_fp8(self, codes: ITensor) -> ITensor:
        """The float32 values of FP8 codes."""
        return self.dequantize(codes, self.floats([1.0]), self.trt.DataType.FLOAT)

    # -- reductions and products

    def reduce(self, op: str, x: ITensor, axis: int, *, keep_dims: bool = True) -> ITensor:
        return self._add("add_reduce", x, getattr(self.trt.ReduceOperation, op), 1 << axis, keep_dims)

    def cumulative_sum(self, x: ITensor, axis: int) -> ITensor:
        """Inclusive."""
        operation = self.trt.CumulativeOperation.SUM
        return self._add("add_cumulative", x, self.ints([axis]), operation, False, False)

    def argmax(self, x: ITensor, axis: int) -> ITensor:
        """int32, `axis` kept with size 1; the first of equal ones."""
        return self.top_k(x, 1, axis)[1]

    def top_k(self, x: ITensor, k: int, axis: int) -> tuple[ITensor, ITensor]:
        """The k largest numbers along an axis, the largest first, and where they are, int32.

        Indices are int64 inside: of 2^31 scores or more, TensorRT makes int64 ones anyway, and then refuses to
        select between them and int32.
        """
        layer = self._layer("add_topk", x, self.trt.TopKOperation.MAX, k, 1 << axis, self.trt.DataType.INT64)
        return self._output(layer, "add_topk", 0), self.cast(self._output(layer, "add_topk", 1), "int32")

    def matmul(self, a: ITensor, b: ITensor, *, is_b_transposed: bool = False) -> ITensor:
        none, transpose = self.trt.MatrixOperation.NONE, self.trt.MatrixOperation.TRANSPOSE
        return self._add("add_matrix_multiply", a, none, b, transpose if is_b_transposed else none)

    # -- shapes

    def dim(self, x: ITensor, axis: int) -> Dim:
        """An int where the size is fixed, else an int64 [1] tensor."""
        size = x.shape[axis]
        return size if size >= 0 else self.slice(self._add("add_shape", x), 0, axis, 1)

    def reshape(self, x: ITensor, dims: Sequence[Dim]) -> ITensor:
        """`dims` as in numpy (one -1 allowed), but each may be a size known only at run time."""
        layer = self._layer("add_shuffle", x)
        if all(isinstance(dim, int) for dim in dims):
            layer.reshape_dims = tuple(dims)
        else:
            layer.set_input(1, self._shape_tensor(dims))
        return self._output(layer, "add_shuffle", 0)

    def transpose(self, x: ITensor, order: Sequence[int]) -> ITensor:
        layer = self._layer("add_shuffle", x)
        layer.first_transpose = tuple(order)
        return self._output(layer, "add_shuffle", 0)

    def slice(self, x: ITensor, axis: int, start: int, size: Dim) -> ITensor:
        """Rows start .. start + size - 1 of one axis."""
        if isinstance(size, int):
            layer = self._layer("add_slice", x, (start,), (size,), (1,))
        else:
            layer = self._layer("add_slice", x, (start,), (0,), (1,))
            layer.set_input(2, size)
        layer.axes = (axis,)
        return self._output(layer, "add_slice", 0)

    def drop_ends(self, x: ITensor, axis: int, *, first: int, last: int) -> ITensor:
        """Without its `first` first and `last` last elements along an axis whose size may be dynamic."""
        size = self.dim(x, axis)
        if isinstance(size, int):
            return self.slice(x, axis, first, size - first - last)
        return self.slice(x, axis, first, self.binary("SUB", size, first + last))

    def concat(self, xs: Sequence[ITensor], axis: int) -> ITensor:
        if len(xs) == 1:
            return xs[0]
        layer = self._layer("add_concatenation", list(xs))
        layer.axis = axis
        return self._output(layer, "add_concatenation", 0)

    def arange(self, size: Dim) -> ITensor:
        """int32 [size]: 0, 1, 2, ..."""
        if isinstance(size, int):
            return self.ints(list(range(size)), (size,))
        layer = self._layer("add_fill", (0,), self.trt.FillOperation.LINSPACE, self.trt.DataType.INT32)
        layer.set_input(0, size)
        layer.set_input(1, self.ints([0]))
        layer.set_input(2, self.ints([1], (1,)))
        return self._output(layer, "add_fill", 0)

    def broadcast(self, x: ITensor, dims: Sequence[Dim]) -> ITensor:
        """Repeat the axes of size 1; other sizes must already equal x's."""
        strides = tuple(0 if size == 1 else 1 for size in x.shape)
        zeros = (0,) * len(strides)
        if all(isinstance(dim, int) for dim in dims):
            return self._add("add_slice", x, zeros, tuple(dims), strides)
        layer = self._layer("add_slice", x, zeros, zeros, strides)
        layer.set_input(2, self._shape_tensor(dims))
        return self._output(layer, "add_slice", 0)

    # -- gather

    def gather(self, x: ITensor, indices: ITensor, axis: int = 0) -> ITensor:
        """numpy.take: `indices`, of any rank, replace `axis`."""
        return self._add("add_gather", x, indices, axis)

    def gather_elements(self, x: ITensor, indices: ITensor, axis: int) -> ITensor:
        """numpy.take_along_axis."""
        layer = self._layer("add_gather_v2", x, indices, self.trt.GatherMode.ELEMENT)
        layer.axis = axis
        return self._output(layer, "add_gather_v2", 0)

    # -- the doors themselves

    def data_type(self, dtype: str) -> Any:
        return getattr(self.trt.DataType, tensorrt_dtype(dtype))

    def add_layer(self, method: str, *arguments: Any) -> Any:
        """A layer whose properties the caller sets; read its result with `output_of`."""
        return self._layer(method, *arguments)

    def output_of(self, layer: Any, index: int = 0) -> ITensor:
        return self._output(layer, str(layer.name), index)

    def _cast(self, x: ITensor, data_type: Any) -> ITensor:
        return x if x.dtype == data_type else self._add("add_cast", x, data_type)

    def _constant(self, host: HostTensor, *, dtype: Any = None, shape: tuple[int, ...] | None = None) -> ITensor:
        dims = host.shape if shape is None else shape
        count = 1
        for size in dims:
            count *= size
        weights = self.trt.Weights(self.data_type(host.dtype) if dtype is None else dtype, host.address, count)
        self.constant_owners.append(host)
        layer = self._layer("add_constant", dims, weights)
        layer.name = f"{host.name} #{self.network.num_layers - 1}"
        return self._output(layer, "add_constant", 0)

    def _shape_tensor(self, dims: Sequence[Dim]) -> ITensor:
        return self.concat([self.ints([dim], (1,), "int64") if isinstance(dim, int) else dim for dim in dims], 0)

    def _add(self, method: str, *arguments: Any) -> ITensor:
        return self._output(self._layer(method, *arguments), method, 0)

    def _layer(self, method: str, *arguments: Any) -> Any:
        layer = getattr(self.network, method)(*arguments)
        if layer is None:
            raise BuildError(self._failure(method, _described(arguments)))
        return layer

    def _output(self, layer: Any, method: str, index: int) -> ITensor:
        """Reading the shape makes TensorRT check the layer now, not when the whole network is built."""
        tensor = layer.get_output(index)
        try:
            num_dims = len(tensor.shape)
        except (RuntimeError, ValueError):  # shape not computable; ValueError: an invalid rank
            raise BuildError(self._failure(method, str(layer.name))) from None
        if self._logged_errors():
            raise BuildError(self._failure(method, f"{layer.name} (rank {num_dims})"))
        return tensor

    def _logged_errors(self) -> list[str]:
        return [text for text in self._logger.errors if not any(known in text for known in _HARMLESS_ERRORS)]

    def _failure(self, method: str, subject: str) -> str:
        said = "; ".join(self._logged_errors() or self._logger.warnings[-1:]) or "nothing"
        return problem(
            f"TensorRT {method} ({subject})",
            expected="a layer",
            found=f"the message: {said}",
            hint="This is a bug of dflash-trt or a checkpoint it does not cover: report it with this message.",
        )


def _described(arguments: Sequence[Any]) -> str:
    shown = [f"{argument.name} {tuple(argument.shape)}" for argument in arguments if hasattr(argument, "shape")]
    return ", ".join(shown) or "no tensors"
