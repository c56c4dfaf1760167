"""Host time of the plugins' launches: microseconds of each plugin's enqueue, and of a change of its shapes.

    TENSORRT_INCLUDE_DIR=... python -m scripts.bench_launches

The plugins are called as TensorRT calls them, with the kernels of all nodes in their table, and with a
stand-in for the CUDA driver that launches nothing. Cubins are placeholders: nothing is compiled and nothing runs.
"""

import os
import subprocess
import sys
from pathlib import Path

from dflash_trt.core.errors import BuildError, DFlashError
from plugins.aot.compile import DEFAULT_ARCHITECTURES, CompiledKernel
from plugins.aot.gated_delta_variants import DeltaKernels
from plugins.aot.latent_variants import LatentKernels
from plugins.aot.manifest import write_kernels
from plugins.aot.variant import KernelVariant
from plugins.aot.variants import CHAINS, LibrarySpec, library_variants
from tests.plugins.building import ROOT, BuiltLibrary, build_sources
from tests.plugins.delta_cases import state_spec
from tests.plugins.latent_cases import LATENT_DIM, NOPE_DIM, PAGE_SIZE, ROPE_DIM, VALUE_DIM

MAX_REQUESTS = 256
LATENTS = LatentKernels(
    latent_dim=LATENT_DIM,
    rope_dim=ROPE_DIM,
    nope_dim=NOPE_DIM,
    value_dim=VALUE_DIM,
    page_dtype="bfloat16",
    page_size=PAGE_SIZE,
    max_requests=MAX_REQUESTS,
)


def placeholder(variant: KernelVariant, architecture: str) -> CompiledKernel:
    """All that a launch needs of a kernel, but for its code."""
    return CompiledKernel(
        variant=variant.name,
        kernel=variant.kernel.__name__,
        architecture=architecture,
        entry=variant.kernel.__name__,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
        shared_bytes=0,
        num_registers=32,
        stack_bytes=0,
        arguments=variant.arguments,
        constants=variant.constants,
        grid=variant.grid,
        cubin=b"\x7fELF" + f"{variant.name} {architecture}".encode(),
        ptx="",
    )


def build_full_library(out: Path) -> tuple[BuiltLibrary, int]:
    """The library with the table of all nodes, and how many kernels that has."""
    deltas = DeltaKernels.of(state_spec(), max_requests=MAX_REQUESTS).variants("bfloat16")
    latents = LATENTS.variants("bfloat16")
    variants = [*library_variants(LibrarySpec(chains=CHAINS)), *deltas, *latents]
    kernels = [placeholder(variant, name) for name in DEFAULT_ARCHITECTURES for variant in variants]
    (out / "kernels").mkdir(parents=True, exist_ok=True)
    write_kernels(out / "kernels", kernels, origin={"placeholders": True})
    return build_sources(out), len(kernels)


def launch_times(library: BuiltLibrary) -> dict[str, tuple[float, float]]:
    """By node: microseconds of an enqueue, and of onShapeChange."""
    environment = dict(os.environ) | {"LD_LIBRARY_PATH": str(library.fake_driver.parent)}
    command = [str(library.host), str(library.plugin), "times"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise BuildError.about("plugin_host times", expected="times", found=done.stdout + done.stderr, hint="See it.")
    rows = (line.split() for line in done.stdout.splitlines())
    return {node: (float(enqueue_us), float(change_us)) for node, enqueue_us, change_us in rows}


def main() -> int:
    library, num_kernels = build_full_library(ROOT / "build" / "bench_launches")
    if library.host is None:
        sys.stderr.write(
            "error: TensorRT's headers: expected NvInferRuntime.h, found none. Set TENSORRT_INCLUDE_DIR.\n"
        )
        return 2
    try:
        times = launch_times(library)
    except DFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    print(f"{num_kernels} kernels")
    print(f"{'node':34} {'enqueue_us':>10} {'shape_change_us':>15}")
    for node, (enqueue_us, change_us) in times.items():
        print(f"{node:34} {enqueue_us:10.2f} {change_us:15.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
