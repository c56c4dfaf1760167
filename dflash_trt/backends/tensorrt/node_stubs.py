"""Stubs of plugin nodes, for a builder that takes no plugins: TensorRT-RTX's Python API has no `add_plugin_v3`.

A stub has the inputs and the outputs of its node, as the program of its operation says. Types, ranks and known sizes of
the inputs are checked here. A few layers make the outputs from the inputs, so that the builder compiles everything
around a node with the node's types and shapes; their values mean nothing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from dflash_trt.backends.tensorrt.layers import Dim, ITensor, Layers
from dflash_trt.core.errors import BuildError, problem, raise_all
from dflash_trt.kernels.programs.program import Program, TensorRule

STUB: Final = "stub of "  # metadata of a stub's layers, before the name of the node


def add_stub(
    layers: Layers, program: Program, name: str, inputs: Sequence[ITensor], fields: Mapping[str, float]
) -> list[ITensor]:
    """The outputs of the node, as `plugins.add_plugin_node` gives them.

    Raises:
        BuildError: every input of another type, rank or size than the program's.
    """
    begin = layers.network.num_layers
    sizes = _Sizes.of(layers, program, inputs, fields)
    raise_all(BuildError, f"plugin node {name}", list(_input_problems(layers, program, inputs, sizes)))
    total = _sum_of_first_elements(layers, inputs)
    outputs = [_output(layers, total, rule, inputs[0], sizes) for rule in program.outputs]
    for i in range(begin, layers.network.num_layers):
        layers.network.get_layer(i).metadata = STUB + name
    return outputs


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes by the expressions of axes, from fields and inputs; a dynamic one is an axis of a tensor."""

    layers: Layers
    fixed: dict[str, int] = field(default_factory=dict)
    dynamic: dict[str, tuple[ITensor, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: Layers, program: Program, inputs: Sequence[ITensor], fields: Mapping[str, float]) -> Self:
        """The largest where inputs differ: a tensor that is not read has an axis of 1."""
        sizes = cls(layers, {name: int(fields[name]) for name in program.integer_fields})
        for rule, tensor in zip(program.inputs, inputs, strict=True):
            for i, (axis, size) in enumerate(zip(rule.shape, tensor.shape, strict=False)):
                if size < 0:
                    sizes.dynamic.setdefault(axis, (tensor, i))
                else:
                    sizes.fixed[axis] = max(size, sizes.fixed.get(axis, 1))
        return sizes

    def known(self, expression: str) -> int | None:
        """The value of a sum of products whose factors are all fixed, or the size that an input has of it."""
        try:
            return sum(math.prod(map(self._factor, term.split(" * "))) for term in expression.split(" + "))
        except KeyError:
            return self.fixed.get(expression)

    def size(self, expression: str) -> Dim:
        """An axis, or a product, of which one factor may follow from a product among the inputs."""
        layers = self.layers
        if expression in self.dynamic:
            return layers.dim(*self.dynamic[expression])
        if (known := self.known(expression)) is not None:
            return known
        if " * " in expression:
            first, second = map(self.size, expression.split(" * "))
            return _product(layers, first, second)
        product = next(found for found in self.dynamic if found.endswith(f" * {expression}"))
        return layers.binary("DIV", self.size(product), self.size(product.split(" * ")[0]))

    def _factor(self, factor: str) -> int:
        return int(factor) if factor.isdigit() else self.fixed[factor]


def _product(layers: Layers, a: Dim, b: Dim) -> Dim:
    return layers.binary("PROD", b, a) if isinstance(a, int) else layers.binary("PROD", a, b)


def _input_problems(layers: Layers, program: Program, inputs: Sequence[ITensor], sizes: _Sizes) -> Iterator[str]:
    for rule, tensor in zip(program.inputs, inputs, strict=True):
        shape = tuple(tensor.shape)
        known = [sizes.known(axis) for axis in rule.shape]
        fits = len(shape) == len(known) and all(
            size in (-1, 1) or wanted in (None, size) for size, wanted in zip(shape, known, strict=True)
        )
        data_type = inputs[0].dtype if rule.dtype == "F" else layers.data_type(rule.dtype)
        if not fits or tensor.dtype != data_type:
            found = f"{tensor.dtype.name} {list(shape)}"
            yield problem(f"input {rule.name}", expected=f"{rule.dtype} [{', '.join(rule.shape)}]", found=found)


def _sum_of_first_elements(layers: Layers, inputs: Sequence[ITensor]) -> ITensor:  # float32 [1]
    firsts = []
    for x in inputs:
        if x.dtype == layers.trt.DataType.INT8:
            continue  # a constant that the builder lets nothing but a plugin node or a dequantization read
        rank = len(x.shape)
        first = layers.output_of(layers.add_layer("add_slice", x, (0,) * rank, (1,) * rank, (1,) * rank))
        firsts.append(layers.reshape(layers.cast(first, "float32"), (1,)))
    return layers.reduce("SUM", layers.concat(firsts, 0), 0)


def _output(layers: Layers, value: ITensor, rule: TensorRule, first: ITensor, sizes: _Sizes) -> ITensor:
    typed = layers.cast_like(value, first) if rule.dtype == "F" else layers.cast(value, rule.dtype)
    shape = [sizes.size(axis) for axis in rule.shape]
    return layers.broadcast(layers.reshape(typed, (1,) * len(shape)), shape)
