"""What every --help has: examples at its end, and the defaults that a configuration file may replace."""

from typing import Any

from dflash_trt.core.config import BuildConfig


def examples(*commands: str) -> str:
    """The epilog of a command; each example is a line, as it is typed."""
    lines = "\n".join(f"  {command}" for command in commands)
    return f"\b\nExample{'s' if len(commands) > 1 else ''}:\n{lines}"  # \b: click leaves the lines as they are


def with_default(help: str, name: str) -> str:
    """The help of an option of `build` that has no default of its own: the configuration file may have the value."""
    return f"{help}  [default: {_default(name)}]"


def _default(name: str) -> Any:
    default = BuildConfig.model_fields[name].default
    assert default is not None, name
    return default
