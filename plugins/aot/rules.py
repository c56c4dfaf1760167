"""Exports of Python to the plugin library, for its manifest and as C++: launch rules and the sampler's tables.

Knows which constants, functions and tables are exported; computes nothing with them. Refuses a rule that is more than
integer arithmetic.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, Final

from dflash_trt.core.dtype import num_bytes_of
from dflash_trt.core.errors import BuildError
from dflash_trt.core.sampling import STEP_SAMPLING_FIELDS
from dflash_trt.kernels import launch_rules
from dflash_trt.kernels.argmax_launch import DRAFT_KERNELS, DRAFT_SCRATCH
from dflash_trt.kernels.sampling_launch import SAMPLING_KERNELS
from dflash_trt.kernels.sampling_scratch import SCRATCH

RULES: Final[tuple[Callable[..., int], ...]] = (
    launch_rules.work_slots,
    launch_rules.heads_reciprocal,
    launch_rules.num_partials,
    launch_rules.num_stats,
    launch_rules.max_lag,
    launch_rules.max_lead,
    launch_rules.latent_slots,
    launch_rules.latent_key_block,
    launch_rules.min_direct_rows,
    launch_rules.row_tiles,
    launch_rules.tile_tokens,
    launch_rules.max_tiles,
)
_CONSTANTS: Final[dict[str, int]] = {name: value for name, value in vars(launch_rules).items() if name.isupper()}
_OPERATORS: Final[dict[type[ast.AST], str]] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "/",
    ast.Eq: "==",
    ast.GtE: ">=",
}
_OPERATIONS: Final = (("sampling", SAMPLING_KERNELS, SCRATCH), ("draft", DRAFT_KERNELS, DRAFT_SCRATCH))
_SAMPLING_TYPES: Final = {"float32": "kFloat32", "int32": "kInt32", "int64": "kInt64"}


def shared_facts() -> dict[str, Any]:
    """For the manifest, whose hash the library bears."""
    return {
        "constants": _CONSTANTS,
        "rules": {rule.__name__: rule_expression(rule) for rule in RULES},
        **{
            operation: {
                "kernels": [f"{name}_kernel" for name in kernels],
                "scratch": [
                    {
                        "name": s.name,
                        "element_bytes": num_bytes_of(s.dtype),
                        "per_row": s.per_row,
                        "per_tile": s.per_tile,
                    }
                    for s in scratch
                ],
            }
            for operation, kernels, scratch in _OPERATIONS
        },
        "sampling_inputs": [{"name": row.name, "dtype": row.dtype} for row in STEP_SAMPLING_FIELDS],
    }


def rules_header() -> str:
    """`launch_rules.h`: the same facts as constants, functions and tables."""
    facts = shared_facts()
    inputs = [f'{{"{i["name"]}", TensorType::{_SAMPLING_TYPES[i["dtype"]]}, 1}}' for i in facts["sampling_inputs"]]
    return "\n".join(
        [
            "// Written by plugins.aot from dflash_trt/kernels/*_launch.py, launch_rules.py and core/sampling.py.",
            "#pragma once",
            "",
            "#include <algorithm>",
            "#include <cstdint>",
            "",
            "// The inputs of SampleAndAccept that say how to sample, as rows of contract.cpp.",
            f"#define DFLASH_TRT_SAMPLING_INPUTS {', '.join(inputs)}",
            "",
            "namespace dflash_trt::launch_rules",
            "{",
            *(f"constexpr int64_t {name} = {value};" for name, value in facts["constants"].items()),
            *(_function(rule) for rule in RULES),
            "struct Scratch { char const* name; int64_t element_bytes; int64_t per_row; int64_t per_tile; };",
            *(line for operation, *_ in _OPERATIONS for line in _tables(operation.upper(), facts[operation])),
            "} // namespace dflash_trt::launch_rules",
            "",
        ]
    )


def _tables(operation: str, facts: dict[str, Any]) -> list[str]:
    """The scratch tensors and the kernels of an operation."""
    rows = [f'    {{"{s["name"]}", {s["element_bytes"]}, {s["per_row"]}, {s["per_tile"]}}},' for s in facts["scratch"]]
    kernels = ", ".join(f'"{name}"' for name in facts["kernels"])
    return [
        f"constexpr Scratch {operation}_SCRATCH[] = {{",
        *rows,
        "};",
        f"constexpr char const* {operation}_KERNELS[] = {{{kernels}}};",
    ]


def rule_expression(rule: Callable[..., int]) -> str:
    """The value of a rule in C++, over the names of its parameters.

    Raises:
        BuildError: the function is more than integer arithmetic.
    """
    body = _definition(rule).body
    statement = body[-1]
    if len(body) > 2 or not isinstance(statement, ast.Return) or statement.value is None:
        raise _refusal(rule, "a docstring and one return")
    return _cpp(rule, statement.value)


def _function(rule: Callable[..., int]) -> str:
    parameters = ", ".join(f"int64_t {name}" for name in inspect.signature(rule).parameters)
    return f"constexpr int64_t {rule.__name__}({parameters}) {{ return {rule_expression(rule)}; }}"


def _definition(rule: Callable[..., int]) -> ast.FunctionDef:
    module = ast.parse(textwrap.dedent(inspect.getsource(rule)))
    definition = module.body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition


def _cpp(rule: Callable[..., int], node: ast.expr) -> str:
    known = {*inspect.signature(rule).parameters, *_CONSTANTS}
    match node:
        case ast.Constant(value=int(value)):
            return f"int64_t{{{value}}}"
        case ast.Name(id=name) if name in known:
            return name
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return f"({_cpp(rule, left)} {_OPERATORS[type(operator)]} {_cpp(rule, right)})"
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _OPERATORS:
            return f"({_cpp(rule, left)} {_OPERATORS[type(operator)]} {_cpp(rule, right)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({_cpp(rule, test)} ? {_cpp(rule, body)} : {_cpp(rule, orelse)})"
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[left, right], keywords=[]):
            return f"std::{name}({_cpp(rule, left)}, {_cpp(rule, right)})"
    raise _refusal(rule, f"arithmetic that C++ has too, not {ast.unparse(node)}")


def _refusal(rule: Callable[..., int], expected: str) -> BuildError:
    hint = "Write it with +, -, *, //, ==, >=, min, max and conditions."
    return BuildError.about(f"launch rule {rule.__name__}", expected=expected, found="more", hint=hint)
