"""C++ of the programs: what `plugins/src/program/program.h` declares, as tables with functions for expressions.

Knows the names that an expression may have. Refuses others.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dflash_trt.core.errors import BuildError
from dflash_trt.kernels.programs import NAMESPACE, PROGRAMS, VERSION
from dflash_trt.kernels.programs.program import (
    Check,
    Constant,
    Expression,
    FieldRule,
    Kernel,
    Launch,
    Program,
    Stage,
    TensorRule,
)
from plugins.aot.expressions import cpp_expression
from plugins.aot.rules import CONSTANTS, RULES

_TYPES: Final = {"F": "kFloat", "int32": "kInt32", "int64": "kInt64", "float32": "kFloat32", "int8": "kInt8"}
_POINTERS: Final = {"F": "PointerType::kNetwork", "float32": "PointerType::kFloat32", "pages": "PointerType::kPages"}
_GIVEN: Final = ("element_bytes", "is_float32", "num_multiprocessors")
_RULES: Final = {rule.__name__ for rule in RULES}
_HELPERS: Final = ("ceil_div", "log2", "largest_divisor")  # of runtime/arithmetic.h
_OF_A_STEP: Final = {"T", "R", "K", "S", "P", "N"}  # axes that change from step to step


def contract(programs: Sequence[Program] = PROGRAMS) -> dict[str, Any]:
    """Names, orders, types, shapes and fields of all plugins: the library's own answer."""
    return {"namespace": NAMESPACE, "version": VERSION, "plugins": [_plugin(program) for program in programs]}


def _plugin(program: Program) -> dict[str, Any]:
    return {
        "name": program.name,
        "inputs": [_tensor(rule) for rule in program.inputs],
        "outputs": [_tensor(rule) for rule in program.outputs],
        "fields": [
            {"name": field.name, "type": _field_type(field), "min": field.least, "max": field.most}
            for field in program.fields
        ],
    }


def _tensor(rule: TensorRule) -> dict[str, Any]:
    return {"name": rule.name, "type": rule.dtype, "shape": list(rule.shape)}


def _field_type(field: FieldRule) -> str:
    return "float32" if field.is_real else "int32"


def programs_source(programs: Sequence[Program] = PROGRAMS) -> str:
    """The definitions of `program.h`."""
    return "\n".join(
        [
            "// Written by plugins.aot from dflash_trt/kernels/programs.",
            '#include "launch_rules.h"',
            '#include "program/program.h"',
            '#include "runtime/arithmetic.h"',
            "",
            "namespace dflash_trt",
            "{",
            f'char const kNamespace[] = "{NAMESPACE}";',
            f'char const kVersion[] = "{VERSION}";',
            f'char const kContract[] = R"json({json.dumps(contract(programs))})json";',
            *(line for program in programs for line in _Writer(program).lines()),
            f"static Program const* const kAll[] = {{{', '.join(f'&k{program.name}' for program in programs)}}};",
            "Rules<Program const*> const kPrograms{kAll};",
            "} // namespace dflash_trt",
            "",
        ]
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where a size is read: an axis of an input, divided by a size if the axis is a product."""

    tensor: str
    axis: int
    divisor: Expression = ""


def _axes(program: Program) -> dict[str, _Axis]:
    """Sizes by name. A tensor that is always read says them first."""
    found: dict[str, _Axis] = {}
    known = {field.name for field in program.fields}
    for rule in sorted(program.inputs, key=lambda rule: rule.when != ""):
        for i, axis in enumerate(rule.shape):
            if axis.isidentifier() and axis not in known:
                found.setdefault(axis, _Axis(rule.name, i))
    for rule in program.inputs:
        for i, axis in enumerate(rule.shape):
            divisor, _, name = axis.partition(" * ")
            if name.isidentifier() and divisor.isalnum() and name not in known:
                found.setdefault(name, _Axis(rule.name, i, divisor))
    return found


@dataclass(slots=True)
class _Writer:
    """The tables of one program. Arrays come before what refers to them."""

    program: Program
    integers: set[str] = field(default_factory=set)
    reals: set[str] = field(default_factory=set)
    tensors: set[str] = field(default_factory=set)
    arrays: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        program = self.program
        axes = _axes(program)
        self.integers = {*_GIVEN, *program.integer_fields, *axes}
        self.reals = set(program.real_fields)
        self.tensors = {*program.input_names, *program.output_names}
        members = [
            f'"{program.name}"',
            self._array("InputRule", [self._input(rule, axes) for rule in program.inputs]),
            self._array("OutputRule", [self._output(rule, axes) for rule in program.outputs]),
            self._array("FieldRule", [_field(field) for field in program.fields]),
            self._array("SizeRule", [self._axis_size(name, axis) for name, axis in axes.items()]),
            self._array("CheckRule", [self._check(check) for check in program.checks]),
            self._stage(program.stage),
        ]
        passes = [self._pass(stage) for stage in program.passes]
        members.append(self._array("StageRule", passes))
        return [*self.arrays, f"Program const k{program.name}{{{', '.join(members)}}};"]

    def _array(self, type_: str, rows: Sequence[str]) -> str:
        if not rows:
            return "{}"
        name = f"k{self.program.name}{type_}s{len(self.arrays)}"
        self.arrays.append(f"static constexpr {type_} {name}[] = {{{', '.join(rows)}}};")
        return name

    def _input(self, rule: TensorRule, axes: Mapping[str, _Axis]) -> str:
        sizes = []
        for axis in rule.shape:
            names = {node.id for node in ast.walk(ast.parse(axis)) if isinstance(node, ast.Name)}
            is_named_here = axes.get(axis, _Axis("", 0)).tensor == rule.name
            is_of_step = "*" in axis and not names.isdisjoint(_OF_A_STEP)
            sizes.append(f"{{{'nullptr' if is_named_here else self._integer(axis)}, {_bool(is_of_step)}}}")
        axis_rules = self._array("AxisRule", sizes)
        return f'{{"{rule.name}", TensorType::{_TYPES[rule.dtype]}, {axis_rules}, {self._condition(rule.when)}}}'

    def _output(self, rule: TensorRule, axes: Mapping[str, _Axis]) -> str:
        shape = [self._array("Factor", list(self._factors(axis, axes))) for axis in rule.shape]
        return f'{{"{rule.name}", TensorType::{_TYPES[rule.dtype]}, {self._array("OutputAxis", shape)}}}'

    def _factors(self, text: Expression, axes: Mapping[str, _Axis]) -> Iterator[str]:
        """An axis of an input with the same text, or the product of constants, fields and sizes."""
        same = [
            _Axis(rule.name, i) for rule in self.program.inputs for i, axis in enumerate(rule.shape) if axis == text
        ]
        for factor in [text] if same and text not in axes else text.split(" * "):
            if factor.isdecimal():
                yield f"{{{factor}, nullptr, {{-1, 0}}, {{-1, 0}}}}"
            elif factor in self.program.integer_fields:
                yield f'{{0, "{factor}", {{-1, 0}}, {{-1, 0}}}}'
            else:
                axis = axes.get(factor) or next(iter(same), None)
                if axis is None:
                    raise self._unknown(factor)
                divisor = axes.get(axis.divisor, _Axis("", 0))
                yield f"{{0, nullptr, {self._place(axis)}, {self._place(divisor)}}}"

    def _place(self, axis: _Axis) -> str:
        names = self.program.input_names
        return f"{{{names.index(axis.tensor) if axis.tensor else -1}, {axis.axis}}}"

    def _axis_size(self, name: str, axis: _Axis) -> str:
        size = f'v.size_of("{axis.tensor}", {axis.axis})'
        value = f"ceil_div({size}, {self._cpp(axis.divisor)})" if axis.divisor else size
        return f'{{"{name}", {_function("int64_t", value)}, {{}}, nullptr, nullptr}}'

    def _check(self, check: Check) -> str:
        texts = (f'"{check.subject}"', self._integer(check.holds), self._text(check.expected), self._text(check.found))
        return f'{{{", ".join(texts)}, "{check.hint}"}}'

    def _pass(self, stage: Stage) -> str:
        """What a pass defines is known to itself alone."""
        known = set(self.integers), set(self.tensors)
        text = self._stage(stage)
        self.integers, self.tensors = known
        return text

    def _stage(self, stage: Stage) -> str:
        when = self._condition(stage.when)
        sizes = []
        for name, value in stage.sizes.items():
            sizes.append(f'{{"{name}", {self._size(value)}}}')
            self.integers.add(name)
        self.tensors |= set(stage.scratch)
        return (
            "{"
            + ", ".join(
                [
                    when,
                    self._array("SizeRule", sizes),
                    self._array("CheckRule", [self._check(check) for check in stage.checks]),
                    self._array(
                        "ScratchRule", [f'{{"{x}", {self._integer(size)}}}' for x, size in stage.scratch.items()]
                    ),
                    self._arguments(stage.arguments),
                    self._array("LaunchRule", [self._launch(launch) for launch in stage.launches]),
                ]
            )
            + "}"
        )

    def _size(self, value: Expression | Constant) -> str:
        if isinstance(value, str):
            return f"{self._integer(value)}, {{}}, nullptr, nullptr"
        nearest = self._integer(value.nearest) if value.nearest else "nullptr"
        return f'nullptr, {self._kernel(value.kernel)}, "{value.name}", {nearest}'

    def _kernel(self, kernel: Kernel) -> str:
        types = [f'{{"{name}", {_POINTERS[type_]}}}' for name, type_ in kernel.types.items()]
        constants = [
            f'{{"{name}", Match::{match}, {self._integer(value)}}}'
            for match, values in (("kEqual", kernel.equal), ("kSized", kernel.sized), ("kAtLeast", kernel.at_least))
            for name, value in values.items()
        ]
        return f'{{"{kernel.name}", {self._array("TypeRule", types)}, {self._array("ConstantRule", constants)}}}'

    def _launch(self, launch: Launch) -> str:
        names = {node.id for node in ast.walk(ast.parse(launch.when)) if isinstance(node, ast.Name)}
        is_fixed = names <= {*self.program.integer_fields, *CONSTANTS}
        rows = (self._kernel(launch.kernel), self._arguments(launch.arguments), self._condition(launch.when))
        return f"{{{', '.join(rows)}, {_bool(is_fixed)}}}"

    def _arguments(self, arguments: Mapping[str, Expression | None]) -> str:
        return self._array("Argument", [f'{{"{name}", {self._argument(x)}}}' for name, x in arguments.items()])

    def _argument(self, text: Expression | None) -> str:
        text = str(text)
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        if names & self.tensors or text == "None":
            return f"nullptr, nullptr, {_function('Pointer', self._cpp(text))}"
        if text in self.reals or (isinstance(_parsed(text), ast.Constant) and "." in text):
            return f"nullptr, {_function('float', self._cpp(text))}, nullptr"
        return f"{self._integer(text)}, nullptr, nullptr"

    def _condition(self, text: Expression) -> str:
        return self._integer(text) if text else "nullptr"

    def _integer(self, text: Expression) -> str:
        return _function("int64_t", self._cpp(text))

    def _text(self, text: str) -> str:
        joined = _parsed(f"f{text!r}")
        assert isinstance(joined, ast.JoinedStr)
        pieces = [
            f"std::to_string({self._node(part.value)})"
            if isinstance(part, ast.FormattedValue)
            else json.dumps(part.value)
            for part in joined.values
            if isinstance(part, ast.FormattedValue | ast.Constant)
        ]
        return _function("std::string", " + ".join(["std::string()", *pieces]))

    def _cpp(self, text: Expression) -> str:
        return self._node(_parsed(text))

    def _node(self, node: ast.expr) -> str:
        return cpp_expression(f"program {self.program.name}", node, self._leaf)

    def _leaf(self, node: ast.expr) -> str | None:
        match node:
            case ast.Name(id=name) if name in self.integers:
                return f'v.integer_of("{name}")'
            case ast.Name(id=name) if name in self.reals:
                return f'v.real_of("{name}")'
            case ast.Name(id=name) if name in CONSTANTS:
                return f"launch_rules::{name}"
            case ast.Name(id=name) if name in self.tensors:
                return f'v.pointer_of("{name}")'
            case ast.Constant(value=None):
                return "Pointer{}"
            case ast.Name(id=name):
                raise self._unknown(name)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _RULES or name in _HELPERS:
                scope = "launch_rules::" if name in _RULES else ""
                return f"{scope}{name}({', '.join(map(self._node, arguments))})"
        return None

    def _unknown(self, name: str) -> BuildError:
        return BuildError.about(
            f"program {self.program.name}",
            expected="names of axes, fields, sizes, constants and tensors",
            found=name,
            hint="Define it before it is used.",
        )


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _function(type_: str, value: str) -> str:
    return f"[]([[maybe_unused]] Values const& v) -> {type_} {{ return {value}; }}"


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _field(field: FieldRule) -> str:
    type_ = "FieldType::kFloat32" if field.is_real else "FieldType::kInt32"
    return f'{{"{field.name}", {type_}, {field.least!r}, {field.most!r}}}'
