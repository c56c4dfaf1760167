"""Ahead-of-time compilation of the plugin library's kernels, without a GPU.

Writes cubins for each architecture, a manifest, and the C++ that `plugins/` embeds them with. Equal sources and an
equal Triton give equal bytes. Knows processes, progress and the cache; what is compiled stands in `variants.py` and
`engine_kernels.py`.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from dflash_trt.core.errors import ConfigError
from plugins.aot.compile import (
    ARCHITECTURES,
    DEFAULT_ARCHITECTURES,
    WITHOUT_FP8,
    CompiledKernel,
    compile_variant,
    prepare_compiler,
)
from plugins.aot.engine_kernels import EngineKernels
from plugins.aot.manifest import write_kernels
from plugins.aot.variant import KernelVariant
from plugins.aot.variants import LibrarySpec

Contents = LibrarySpec | EngineKernels
Task = tuple[int, str]  # index of a variant, architecture
Progress = Callable[[str], None]


def default_cache() -> Path:
    """Where compiled kernels are kept between builds, whatever library they are for."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "dflash-trt" / "kernels"


def compile_library(
    out: Path,
    contents: Contents,
    architectures: Sequence[str] = DEFAULT_ARCHITECTURES,
    *,
    num_jobs: int = 1,
    cache: Path | None = None,
    progress: Progress = lambda line: None,
) -> Path:
    """Compile every variant for every architecture that can run it, and return the manifest's path.

    A kernel that `cache` has from an earlier build is not compiled again. Its key is Triton's: the source of the kernel
    and of all that it calls, its types, constants and options, the architecture, and the versions of the compilers.

    Raises:
        ConfigError: an unknown architecture, or Triton would interpret.
        BuildError: a kernel does not compile.
    """
    _check_architectures(architectures)
    out.mkdir(parents=True, exist_ok=True)
    prepare_compiler(str((cache or default_cache()).resolve()))
    variants = contents.variants()
    tasks = [
        (i, architecture)
        for architecture in architectures
        for i, variant in enumerate(variants)
        if not (variant.has_fp8 and architecture in WITHOUT_FP8)
    ]
    compiled: dict[Task, CompiledKernel] = {}
    started = time.monotonic()
    for task, kernel in _compile_all(variants, tasks, contents=contents, num_jobs=num_jobs):
        compiled[task] = kernel
        note = ", from the cache" if kernel.is_cached else ""
        if not kernel.fits:
            note += f", left out: {kernel.shared_bytes} bytes of shared memory are more than it has"
        progress(
            f"[{len(compiled)}/{len(tasks)}] {kernel.variant} sm_{kernel.architecture}"
            f" {len(kernel.cubin) / 1024:.0f} KiB, {kernel.num_registers} registers, {kernel.stack_bytes} B of stack,"
            f" {kernel.blocks_per_multiprocessor} blocks at once, {time.monotonic() - started:.0f} s{note}"
        )
    return write_kernels(out, [compiled[task] for task in tasks], origin=_origin(architectures, contents))


def _compile_all(
    variants: Sequence[KernelVariant], tasks: Sequence[Task], *, contents: Contents, num_jobs: int
) -> Iterator[tuple[Task, CompiledKernel]]:
    """In any order. The first error ends it and leaves what has not begun."""
    if num_jobs == 1:
        for index, architecture in tasks:
            yield (index, architecture), compile_variant(variants[index], architecture)
        return
    with ProcessPoolExecutor(num_jobs, get_context("spawn"), _start_worker, (contents,)) as pool:
        pending: dict[Future[CompiledKernel], Task] = {pool.submit(_compile_task, task): task for task in tasks}
        try:
            while pending:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    yield pending.pop(future), future.result()
        finally:
            pool.shutdown(cancel_futures=True)


# Of a worker process: kernels are not pickled, every worker imports them.
_variants: list[KernelVariant] = []


def _start_worker(contents: Contents) -> None:
    _variants.extend(contents.variants())


def _compile_task(task: Task) -> CompiledKernel:
    index, architecture = task
    return compile_variant(_variants[index], architecture)


def _check_architectures(architectures: Sequence[str]) -> None:
    unknown = [name for name in architectures if name not in ARCHITECTURES]
    if unknown or not architectures or len(set(architectures)) < len(architectures):
        raise ConfigError.about(
            "--arch",
            expected=f"different ones of {', '.join(ARCHITECTURES)}",
            found=", ".join(architectures) or "none",
            hint="H100 and H200 are 90a, B200 is 100a, B300 is 103a.",
        )


def _origin(architectures: Sequence[str], contents: Contents) -> dict[str, object]:
    import triton

    from dflash_trt import __version__

    return {
        "dflash_trt": __version__,
        "triton": triton.__version__,
        "architectures": list(architectures),
        "spec" if isinstance(contents, LibrarySpec) else "engine": asdict(contents),
    }
