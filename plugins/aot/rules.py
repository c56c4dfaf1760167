"""Launch rules in C++, for the plugin library and its manifest.

Knows which constants and functions are exported; computes nothing with them. Refuses a rule that is more than integer
arithmetic.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, Final

from dflash_trt.core.errors import BuildError
from dflash_trt.kernels import launch_rules
from plugins.aot.expressions import cpp_expression

RULES: Final[tuple[Callable[..., int], ...]] = (
    launch_rules.work_slots,
    launch_rules.heads_reciprocal,
    launch_rules.num_partials,
    launch_rules.num_stats,
    launch_rules.max_lag,
    launch_rules.max_lead,
    launch_rules.is_verify_step,
    launch_rules.most_verify_rows,
    launch_rules.fixed_split_length,
    launch_rules.latent_slots,
    launch_rules.latent_key_block,
    launch_rules.min_direct_rows,
    launch_rules.row_tiles,
    launch_rules.tile_tokens,
    launch_rules.int8_tile_tokens,
    launch_rules.max_tiles,
    launch_rules.row_bytes,
    launch_rules.block_row_bytes,
)
CONSTANTS: Final[dict[str, int]] = {name: value for name, value in vars(launch_rules).items() if name.isupper()}


def shared_facts() -> dict[str, Any]:
    """For the manifest, whose hash the library bears."""
    return {"constants": CONSTANTS, "rules": {rule.__name__: rule_expression(rule) for rule in RULES}}


def rules_header() -> str:
    """`launch_rules.h`: the same facts as constants and functions."""
    return "\n".join(
        [
            "// Written by plugins.aot from dflash_trt/kernels/launch_rules.py.",
            "#pragma once",
            "",
            "#include <algorithm>",
            "#include <cstdint>",
            "",
            "namespace dflash_trt::launch_rules",
            "{",
            *(f"constexpr int64_t {name} = {value};" for name, value in CONSTANTS.items()),
            *(_function(rule) for rule in RULES),
            "} // namespace dflash_trt::launch_rules",
            "",
        ]
    )


def rule_expression(rule: Callable[..., int]) -> str:
    """The value of a rule in C++, over the names of its parameters.

    Raises:
        BuildError: the function is more than integer arithmetic.
    """
    body = _definition(rule).body
    statement = body[-1]
    if len(body) > 2 or not isinstance(statement, ast.Return) or statement.value is None:
        raise _refusal(rule, "a docstring and one return")
    known = {*inspect.signature(rule).parameters, *CONSTANTS}

    def leaf(node: ast.expr) -> str | None:
        return node.id if isinstance(node, ast.Name) and node.id in known else None

    return cpp_expression(_what(rule), statement.value, leaf)


def _function(rule: Callable[..., int]) -> str:
    parameters = ", ".join(f"int64_t {name}" for name in inspect.signature(rule).parameters)
    return f"constexpr int64_t {rule.__name__}({parameters}) {{ return {rule_expression(rule)}; }}"


def _definition(rule: Callable[..., int]) -> ast.FunctionDef:
    module = ast.parse(textwrap.dedent(inspect.getsource(rule)))
    definition = module.body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition


def _refusal(rule: Callable[..., int], expected: str) -> BuildError:
    return BuildError.about(_what(rule), expected=expected, found="more", hint="Write it as one expression.")


def _what(rule: Callable[..., int]) -> str:
    return f"launch rule {rule.__name__}"
