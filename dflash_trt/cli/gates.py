"""Gates of `eval` and `bench speedup`: bounds on measured numbers, for CI."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.core.exit_codes import ExitCode

if TYPE_CHECKING:
    from dflash_trt.bench.comparison import Gate


def gate_rows(gates: "Sequence[Gate]") -> list[dict[str, Any]]:
    """As JSON."""
    return [{name: getattr(gate, name) for name in ("name", "bound", "value", "has_passed")} for gate in gates]


def gate_lines(gates: "Sequence[Gate]") -> Iterator[str]:
    """A line for each, in red if it is missed."""
    for gate in gates:
        bound = f"{'at most' if gate.is_upper else 'at least'} {gate.bound:g}"
        value = "none" if gate.value is None else f"{gate.value:.4g}"
        line = f"gate {gate.name} ({bound}): {value} {'passed' if gate.has_passed else 'FAILED'}"
        yield line if gate.has_passed else click.style(line, fg="red")


def exit_code(gates: "Sequence[Gate]") -> ExitCode:
    return ExitCode.DONE if all(gate.has_passed for gate in gates) else ExitCode.REQUEST_FAILED
