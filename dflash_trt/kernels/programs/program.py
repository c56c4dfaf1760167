"""An operation of the plugin library, described as data: tensors, fields, sizes and launches.

An expression is Python arithmetic as text. Its names are axes, fields, sizes defined before it, constants and functions
of `launch_rules.py` (with arguments by position), and these: `element_bytes` of F, `is_float32`, `num_multiprocessors`
(at most MAX_MULTIPROCESSORS), ceil_div, log2, largest_divisor(of, most). `plugins/aot/programs.py` makes C++ of it, and
refuses any other name. Needs neither PyTorch nor Triton.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

Expression = str

ANY: Final = (1 << 31) - 1  # the largest int32
SMALLEST_FLOAT: Final = 2.0**-126  # of float32, normal
LARGEST_FLOAT: Final = (2.0 - 2.0**-23) * 2.0**127


@dataclass(frozen=True, slots=True)
class TensorRule:
    """An input or an output. `text` is its type and shape as plugins/README.md writes them: "F [T, heads, D]".

    F is the network's float type; without a type it is int32. An axis is an expression; a name that is no field is
    the size of the axis, for other shapes and everything else. Where `when` does not hold, the tensor is not read.
    """

    name: str
    text: str
    when: Expression = ""

    @property
    def dtype(self) -> str:
        """F, int32, int64, float32, or int8 for bytes of any format."""
        return self.text.split("[", 1)[0].strip() or "int32"

    @property
    def shape(self) -> tuple[str, ...]:
        """An expression for each axis."""
        axes, depth = [""], 0
        for letter in self.text.split("[", 1)[1].removesuffix("]"):
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if letter == "," and depth == 0:
                axes.append("")
            else:
                axes[-1] += letter
        return tuple(axis.strip() for axis in axes)


@dataclass(frozen=True, slots=True)
class FieldRule:
    """A scalar from `least` to `most`: int32 or, where these are floats, float32."""

    name: str
    least: float
    most: float

    @property
    def is_real(self) -> bool:
        return isinstance(self.least, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """The variants of a kernel that serve a node, by what they were compiled for.

    Of those that fit, the one with the smallest `at_least` constants is launched. All sizes of one that is equal in
    `types` and `equal` are loaded with a node's first shape, because a step that is captured into a graph cannot load.
    """

    name: str
    types: Mapping[str, str] = field(default_factory=dict)  # of pointer arguments: F, float32, or "pages", F or FP8
    equal: Mapping[str, Expression] = field(default_factory=dict)
    sized: Mapping[str, Expression] = field(default_factory=dict)  # equal, too, but decided by the shapes of a step
    at_least: Mapping[str, Expression] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A size that a compiled kernel decides: its constant `name`. All variants of `kernel` have the same one, or the
    smallest from `nearest` on is taken, or else the largest."""

    name: str
    kernel: Kernel
    nearest: Expression = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """An error unless `holds`. The texts are f-strings over expressions."""

    subject: str
    holds: Expression
    expected: str
    found: str
    hint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Left out where `when` does not hold. Conditions on fields alone also decide whether a library needs the kernel.

    Kernels take arguments by name: tensors, scratch, fields and sizes have their own, and `arguments` the others. These
    are expressions, names of tensors, or None for a null pointer.
    """

    kernel: Kernel
    arguments: Mapping[str, Expression | None] = field(default_factory=dict)
    when: Expression = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Launches with sizes, scratch memory and arguments in common, in this order of evaluation.

    `checks` are of a step's sizes, and `scratch` has bytes by name.
    """

    when: Expression = ""
    sizes: Mapping[str, Expression | Constant] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    scratch: Mapping[str, Expression] = field(default_factory=dict)
    arguments: Mapping[str, Expression | None] = field(default_factory=dict)
    launches: tuple[Launch, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Tensors are row-major, and those of `inputs` and `outputs` come in this order; so do fields, integers first.

    `checks` are of shapes and fields, for an engine's largest shapes, too. What `stage` defines is known to each of
    the `passes` that follow; these share their scratch memory.
    """

    name: str
    inputs: tuple[TensorRule, ...]
    outputs: tuple[TensorRule, ...]
    fields: tuple[FieldRule, ...]
    checks: tuple[Check, ...] = ()
    stage: Stage = field(default_factory=Stage)
    passes: tuple[Stage, ...] = ()

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(rule.name for rule in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(rule.name for rule in self.outputs)

    @property
    def integer_fields(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields if not field.is_real)

    @property
    def real_fields(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields if field.is_real)


def flag(name: str) -> FieldRule:
    return FieldRule(name, 0, 1)


def positive(name: str) -> FieldRule:
    return FieldRule(name, SMALLEST_FLOAT, LARGEST_FLOAT)
