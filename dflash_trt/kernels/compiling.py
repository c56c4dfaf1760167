"""Compiles kernels in threads before serving: by steps in which none of them runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

_ATEN: Final = torch.ops.aten
_UNWRITTEN: Final = frozenset({
    _ATEN.empty.memory_format,
    _ATEN.empty_like.default,
    _ATEN.empty_strided.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
})  # fmt: skip


@contextlib.contextmanager
def kernels_compiled_alone(num_threads: int) -> Iterator[Compiling]:
    """Inside, launches compile their kernels in `num_threads` threads and do not run.

    The end waits for all. With 0 threads nothing is compiled. Outputs of kernels keep their contents, and new tensors
    are zeros, so PyTorch's operators read valid indices.
    """
    run: Any = JITFunction.run

    def compile_alone(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options) if num_threads else None

    with ThreadPoolExecutor(max(1, num_threads)) as threads, triton.AsyncCompileMode(threads) as mode:
        compiling = Compiling(mode)
        with (
            _replaced(JITFunction, "run", compile_alone),
            _replaced(triton.knobs.compilation, "listener", compiling.note),
            _Zeroed(),  # type: ignore[no-untyped-call]  # as PyTorch's own
        ):
            yield compiling


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """An attribute has another value inside."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Compiling:
    """The kernels that were launched so far."""

    def __init__(self, mode: triton.AsyncCompileMode) -> None:
        self._mode = mode
        self._num_compiled = 0

    def note(self, *, cache_hit: bool, **_: Any) -> None:
        """Triton's listener."""
        self._num_compiled += not cache_hit

    def take_over(self) -> None:
        """Hand finished kernels to Triton; until then each launch prepares its kernel again."""
        for kernel in self._mode.future_kernels.values():
            if kernel.kernel is None and kernel.future.done():
                kernel.result()

    def has_all_cached(self) -> bool:
        """Wait for all; True if none of them had to be compiled."""
        for kernel in self._mode.future_kernels.values():
            kernel.result()
        return self._num_compiled == 0


class _Zeroed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """New tensors are zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func in _UNWRITTEN else found


_HAS_FENCES_SINCE: Final = (3, 9)
_TCGEN05: Final = range(100, 120)  # architectures whose tensor core reads shared memory through the asynchronous proxy


def fenced_stages(num_stages: int, architecture: int) -> int:
    """`num_stages`, but 1 where Triton omits a fence: SM100 and SM103, before Triton 3.9.

    In loops that load latents ahead there is no fence.proxy.async between cp.async and tcgen05.mma, which then may read
    stale data (PTX ISA, "Async Proxy"; pytorch/pytorch#181248).
    """
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return 1 if architecture in _TCGEN05 and version < _HAS_FENCES_SINCE else num_stages


@cache
def active_architecture() -> int:
    """The architecture that this process compiles kernels for: 90 is SM90; 0 if they are interpreted."""
    if triton.knobs.runtime.interpret:
        return 0
    return int(triton.runtime.driver.active.get_current_target().arch)
