"""Integer arithmetic of Python as C++.

Knows the operators that both languages have for numbers that are not negative; names and calls are the caller's.
"""

import ast
from collections.abc import Callable
from typing import Final

from dflash_trt.core.errors import BuildError

Leaf = Callable[[ast.expr], str | None]  # the C++ of a name, an index or a call; None for what it does not know

_OPERATORS: Final[dict[type[ast.AST], str]] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "/",
    ast.Mod: "%",
    ast.BitAnd: "&",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.GtE: ">=",
    ast.Gt: ">",
    ast.LtE: "<=",
    ast.Lt: "<",
    ast.And: "&&",
    ast.Or: "||",
}


def cpp_expression(what: str, node: ast.expr, leaf: Leaf) -> str:
    """The expression in C++; `what` it belongs to, for errors.

    Raises:
        BuildError: it is more than arithmetic on what `leaf` knows.
    """

    def cpp(node: ast.expr) -> str:
        found = leaf(node)
        if found is not None:
            return found
        match node:
            case ast.Constant(value=int(value)):
                return f"int64_t{{{value}}}"
            case ast.Constant(value=float(value)):
                return f"{value!r}F"
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                return f"({cpp(left)} {_OPERATORS[type(operator)]} {cpp(right)})"
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _OPERATORS:
                return f"({cpp(left)} {_OPERATORS[type(operator)]} {cpp(right)})"
            case ast.BoolOp(op=operator, values=values):
                return f"({f' {_OPERATORS[type(operator)]} '.join(map(cpp, values))})"
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return f"({cpp(test)} ? {cpp(body)} : {cpp(orelse)})"
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=[left, right], keywords=[]):
                return f"std::{name}({cpp(left)}, {cpp(right)})"
        raise BuildError.about(
            what,
            expected=f"arithmetic that C++ has too, not {ast.unparse(node)}",
            found="more",
            hint="Write it with +, -, *, //, %, &, comparisons, min, max and conditions.",
        )

    return cpp(node)
