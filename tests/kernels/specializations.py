"""Kernels that Triton would compile, counted without a GPU: launches are specialized by Triton's own code, not run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

TARGET = GPUTarget("cuda", 90, 32)


@contextmanager
def recorded_specializations(
    stand_ins: Mapping[str, Callable[[dict[str, Any]], object]],
) -> Iterator[set[tuple[str, ...]]]:
    """The distinct specializations of all launches inside. `stand_ins` are called in place of some kernels."""
    seen: set[tuple[str, ...]] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = kernel.fn.__name__
        arguments, specialization, options = _binder(kernel)(*args, **kwargs)
        seen.add((name, str(specialization), str(sorted(options.items()))))
        if name in stand_ins:
            stand_ins[name](arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        yield seen


@cache
def _binder(kernel: Any) -> Callable[..., tuple[Any, list[Any], dict[str, Any]]]:
    """What a launch on a GPU computes the key of its compiled kernel with."""
    compiled: Any = JITFunction(kernel.fn, **kernel.kwargs)
    binder: Callable[..., tuple[Any, list[Any], dict[str, Any]]] = create_function_from_signature(
        compiled.signature, compiled.params, make_backend(TARGET)
    )
    return binder
