"""`python -m plugins.aot OUT`: compile the kernels of the plugin library ahead of time, without a GPU.

Writes cubins for each architecture, a manifest, and the C++ that `plugins/` embeds them with. Equal sources and an
equal Triton give equal bytes. Knows processes and progress; what is compiled stands in `variants.py`.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Final, TextIO

from dflash_trt.core.errors import ConfigError, DFlashError
from dflash_trt.core.host_resources import available_cores
from plugins.aot.compile import (
    ARCHITECTURES,
    DEFAULT_ARCHITECTURES,
    WITHOUT_FP8,
    CompiledKernel,
    compile_variant,
    prepare_compiler,
)
from plugins.aot.manifest import write_kernels
from plugins.aot.variant import KernelVariant
from plugins.aot.variants import LibrarySpec, library_variants

CACHE: Final = "triton_cache"
Task = tuple[int, str]  # index of a variant, architecture
Progress = Callable[[str], None]


def compile_library(
    out: Path,
    spec: LibrarySpec,
    architectures: Sequence[str] = DEFAULT_ARCHITECTURES,
    *,
    num_jobs: int = 1,
    progress: Progress = lambda line: None,
) -> Path:
    """Compile every variant for every architecture that can run it, and return the manifest's path.

    Raises:
        ConfigError: an unknown architecture, or Triton would interpret.
        BuildError: a kernel does not compile.
    """
    _check_architectures(architectures)
    out.mkdir(parents=True, exist_ok=True)
    prepare_compiler(str((out / CACHE).resolve()))
    variants = library_variants(spec)
    tasks = [
        (i, architecture)
        for architecture in architectures
        for i, variant in enumerate(variants)
        if not (variant.has_fp8 and architecture in WITHOUT_FP8)
    ]
    compiled: dict[Task, CompiledKernel] = {}
    started = time.monotonic()
    for task, kernel in _compile_all(variants, tasks, spec=spec, num_jobs=num_jobs):
        compiled[task] = kernel
        note = "" if kernel.fits else f", left out: {kernel.shared_bytes} bytes of shared memory are more than it has"
        progress(
            f"[{len(compiled)}/{len(tasks)}] {kernel.variant} sm_{kernel.architecture}"
            f" {len(kernel.cubin) / 1024:.0f} KiB, {kernel.num_registers} registers, {kernel.stack_bytes} B of stack,"
            f" {kernel.blocks_per_multiprocessor} blocks at once, {time.monotonic() - started:.0f} s{note}"
        )
    return write_kernels(out, [compiled[task] for task in tasks], origin=_origin(architectures, spec))


def _compile_all(
    variants: Sequence[KernelVariant], tasks: Sequence[Task], *, spec: LibrarySpec, num_jobs: int
) -> Iterator[tuple[Task, CompiledKernel]]:
    """In any order. The first error ends it and leaves what has not begun."""
    if num_jobs == 1:
        for index, architecture in tasks:
            yield (index, architecture), compile_variant(variants[index], architecture)
        return
    with ProcessPoolExecutor(num_jobs, get_context("spawn"), _start_worker, (spec,)) as pool:
        pending: dict[Future[CompiledKernel], Task] = {pool.submit(_compile_task, task): task for task in tasks}
        try:
            while pending:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    yield pending.pop(future), future.result()
        finally:
            pool.shutdown(cancel_futures=True)


# Of a worker process: kernels are not pickled, every worker imports them.
_variants: list[KernelVariant] = []


def _start_worker(spec: LibrarySpec) -> None:
    _variants.extend(library_variants(spec))


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


def _origin(architectures: Sequence[str], spec: LibrarySpec) -> dict[str, object]:
    import triton

    from dflash_trt import __version__

    return {
        "dflash_trt": __version__,
        "triton": triton.__version__,
        "architectures": list(architectures),
        "spec": {name: list(values) for name, values in asdict(spec).items()},
    }


def _arguments() -> argparse.Namespace:
    def names(text: str) -> tuple[str, ...]:
        return tuple(name.strip() for name in text.split(",") if name.strip())

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(name) for name in names(text))

    parser = argparse.ArgumentParser(
        prog="python -m plugins.aot", description="Compile the kernels of the plugin library."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory for cubins, manifest and C++")
    parser.add_argument(
        "--arch", type=names, default=DEFAULT_ARCHITECTURES, metavar="LIST", help=f"of {', '.join(ARCHITECTURES)}"
    )
    for item in fields(LibrarySpec):
        default: tuple[object, ...] = item.default  # type: ignore[assignment]
        parser.add_argument(
            f"--{item.name.replace('_', '-')}",
            type=names if isinstance(default[0], str) else numbers,
            default=default,
            metavar="LIST",
            help=",".join(str(value) for value in default),
        )
    parser.add_argument("--jobs", type=int, default=available_cores(), help="processes (default: one per core)")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    try:
        spec = LibrarySpec(**{item.name: getattr(arguments, item.name) for item in fields(LibrarySpec)})
        manifest = compile_library(
            arguments.out, spec, arguments.arch, num_jobs=arguments.jobs, progress=lambda line: _say(sys.stderr, line)
        )
    except DFlashError as error:
        _say(sys.stderr, f"error: {error}")
        return error.exit_code
    _say(sys.stdout, str(manifest))
    return 0


def _say(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    stream.flush()
