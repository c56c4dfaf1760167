"""The shapes of a node's outputs, as its program says them."""

import re
from collections.abc import Mapping, Sequence

from dflash_trt.kernels.programs.program import Program


def output_shapes(
    program: Program, shapes: Mapping[str, Sequence[int]], fields: Mapping[str, float]
) -> list[tuple[int, ...]]:
    """From the shapes of the inputs, by name; -1 is a size that is not known yet."""
    axes = [axis for rule in program.inputs for axis in zip(rule.shape, shapes[rule.name], strict=True)]
    sizes: dict[str, float] = {text: size for text, size in reversed(axes) if text.isidentifier()}
    for text, size in axes:
        known, _, other = text.partition(" * ")
        if known in sizes and other.isidentifier():
            sizes.setdefault(other, -1 if -1 in (size, sizes[known]) else size // sizes[known])
    return [tuple(_size(axis, sizes | dict(fields)) for axis in rule.shape) for rule in program.outputs]


def _size(axis: str, sizes: dict[str, float]) -> int:
    if any(sizes[name] == -1 for name in re.findall(r"[A-Za-z_]\w*", axis)):
        return -1
    return int(eval(axis, {}, sizes))
