"""One kernel variant for one GPU architecture: a cubin, made without a GPU, and what launching it takes.

Knows how Triton's compiler is called and what its output must look like. Refuses output that the library could not
launch: other entry parameters than declared, scratch memory, clusters, more shared memory than the GPU has.
"""

import hashlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from typing import Any, Final

from dflash_trt.core.errors import BuildError, ConfigError
from dflash_trt.kernels.compiling import fenced_stages
from plugins.aot.variant import KernelVariant

# Shared memory of one block, opted in. CUDA C++ Programming Guide, technical specifications per compute capability.
_KIB: Final = 1024
SHARED_BYTES: Final = {
    "80": 163 * _KIB,
    "86": 99 * _KIB,
    "89": 99 * _KIB,
    "90a": 227 * _KIB,
    "100a": 227 * _KIB,
    "103a": 227 * _KIB,
    "120a": 99 * _KIB,
}
_SYSTEM_BYTES: Final = _KIB  # of shared memory, taken by CUDA, per block
_NUM_REGISTERS: Final = 65536  # of a multiprocessor; a thread's come in eights
_NUM_THREADS: Final = {"86": 1536, "89": 1536, "120a": 1536}  # of a multiprocessor; 2048 of the others
_NUM_BLOCKS: Final = {"86": 16, "89": 24, "120a": 24}  # of a multiprocessor; 32 of the others
ARCHITECTURES: Final = tuple(SHARED_BYTES)
_TENSOR_MEMORY_COLUMNS: Final = 512  # of a multiprocessor of SM100: PTX ISA, "Tensor Memory"
WITHOUT_FP8: Final = ("80", "86")  # no conversions from and to it
DEFAULT_ARCHITECTURES: Final = ("90a", "100a", "103a")
NUM_SCRATCH_POINTERS: Final = 2  # Triton appends them to the declared arguments; both areas are empty here
_PTX_TYPES: Final = {"i32": "u32", "i64": "u64", "fp32": "f32"}


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """`arguments` are (name, type, is a multiple of 16); `grid` as in KernelVariant."""

    variant: str
    kernel: str
    architecture: str
    entry: str
    num_warps: int
    num_stages: int
    shared_bytes: int
    num_registers: int  # of a thread
    stack_bytes: int  # of a thread: what did not fit into registers
    arguments: tuple[tuple[str, str, bool], ...]
    constants: tuple[tuple[str, int], ...]
    grid: tuple[str, str, str]
    cubin: bytes
    ptx: str  # that the cubin was assembled from
    is_cached: bool = False  # from an earlier build

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.cubin).hexdigest()

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= SHARED_BYTES[self.architecture]

    @property
    def blocks_per_multiprocessor(self) -> int:
        """How many run on one at once, by registers, threads, shared memory and the hardware's own limit."""
        threads = 32 * self.num_warps
        by_registers = _NUM_REGISTERS // (-(-self.num_registers // 8) * 8 * threads)
        by_shared = (SHARED_BYTES[self.architecture] + _SYSTEM_BYTES) // (self.shared_bytes + _SYSTEM_BYTES)
        by_threads = _NUM_THREADS.get(self.architecture, 2048) // threads
        return min(by_registers, by_shared, by_threads, _NUM_BLOCKS.get(self.architecture, 32))


def prepare_compiler(cache_dir: str) -> None:
    """Say where Triton caches, and that cubins name no source lines. Call before anything is compiled.

    Raises:
        ConfigError: Triton would interpret its kernels.
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise ConfigError.about(
            "TRITON_INTERPRET",
            expected="unset, to compile kernels",
            found=os.environ["TRITON_INTERPRET"],
            hint="Unset it, or compile in a process of its own.",
        )
    # Line tables would put this machine's paths into the cubins: equal sources must give equal bytes.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    os.environ["TRITON_CACHE_DIR"] = cache_dir


class _Compiling:
    """Triton's driver in a process that compiles only: kernels ask it for their architecture (`tl.target_info`)."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target


def compile_variant(variant: KernelVariant, architecture: str) -> CompiledKernel:
    """A few tenths of a second to several seconds.

    Raises:
        BuildError: the compiler refused the kernel, or its output cannot be launched.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    triton.runtime.driver.set_active(_Compiling(GPUTarget("cuda", int(architecture.removesuffix("a")), 32)))
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    where = f"kernel {variant.name} for sm_{architecture}"
    target = triton.runtime.driver.active.get_current_target()
    if variant.is_fenced:
        variant = replace(variant, num_stages=fenced_stages(variant.num_stages, target.arch))
    try:
        compiled = triton.compile(variant.source(), target=target, options=variant.options)
    except (RuntimeError, triton.TritonError) as error:
        raise BuildError.about(where, expected="a cubin", found=str(error).strip(), hint="Fix the kernel.") from error
    _check(where, variant, architecture, compiled)
    num_registers, stack_bytes = _registers_and_stack(compiled.asm["cubin"])
    return CompiledKernel(
        variant=variant.name,
        kernel=variant.kernel.__name__,
        architecture=architecture,
        entry=compiled.metadata.name,
        num_warps=compiled.metadata.num_warps,
        num_stages=variant.num_stages,
        shared_bytes=compiled.metadata.shared,
        num_registers=num_registers,
        stack_bytes=stack_bytes,
        arguments=variant.arguments,
        constants=variant.constants,
        grid=variant.grid,
        cubin=compiled.asm["cubin"],
        ptx=compiled.asm["ptx"],
        is_cached=hits == [True],
    )


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """As NVIDIA's own tool reads them; it is in Triton's package."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2])


def _check(where: str, variant: KernelVariant, architecture: str, compiled: Any) -> None:
    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    entry = re.search(rf"\.entry {re.escape(metadata.name)}\((.*?)\)(.*?)\{{", ptx, flags=re.DOTALL)
    target = re.search(r"^\.target (\w+)", ptx, flags=re.MULTILINE)
    declared = [word.split(":")[0] for word in variant.signature.values()] + ["*"] * NUM_SCRATCH_POINTERS
    expected: dict[str, object] = {
        "target": f"sm_{architecture}",
        "parameters": [_PTX_TYPES.get(word, "u64") for word in declared],
        "threads": str(32 * metadata.num_warps),
        "scratch bytes": (0, 0),
        "blocks in a cluster": 1,
        "cooperative launch": False,
        "dependent launch": False,
        "tensor descriptors": [],
        "fits tensor memory": True,
        "cubin": b"\x7fELF",
    }
    found: dict[str, object] = {
        "target": target.group(1) if target else None,
        "parameters": re.findall(r"\.param \.(\w+)", entry.group(1)) if entry else None,
        "threads": "".join(re.findall(r"\.reqntid (\d+)", entry.group(2))) if entry else None,
        "scratch bytes": (metadata.global_scratch_size, metadata.profile_scratch_size),
        "blocks in a cluster": metadata.num_ctas,
        "cooperative launch": metadata.launch_cooperative_grid,
        "dependent launch": metadata.launch_pdl,
        "tensor descriptors": list(metadata.tensordesc_meta or ()),
        "fits tensor memory": metadata.tmem_size <= _TENSOR_MEMORY_COLUMNS,
        "cubin": compiled.asm["cubin"][:4],
    }
    for what, value in expected.items():
        if found[what] != value:
            raise BuildError.about(
                f"{where}, {what}",
                expected=repr(value),
                found=repr(found[what]),
                hint="The library cannot launch it; change the kernel, or use a Triton version that is tested.",
            )
