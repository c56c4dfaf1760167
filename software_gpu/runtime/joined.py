"""The whole software GPU in this process: Triton's kernels run from their PTX, PyTorch's operators on the CPU."""

import ctypes
from typing import Any

from triton.compiler import compiler

from software_gpu.ptx.library import load_library
from software_gpu.runtime import torch_ops
from software_gpu.runtime.library import SoftwareCuda, software_cuda


def install() -> SoftwareCuda:
    """Before anything runs on the GPU, in a process that was started with `environment(executes=True)`."""
    cuda, executor = software_cuda(), load_library()
    entries = (executor.software_gpu_load, executor.software_gpu_parameters, executor.software_gpu_launch)
    cuda.library.software_gpu_use_executor(*(ctypes.cast(entry, ctypes.c_void_p) for entry in entries))
    cuda.library.software_gpu_add_ptx.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
    make = compiler.CompiledKernel.__init__

    def keep_ptx(compiled: Any, *args: Any, **options: Any) -> None:
        make(compiled, *args, **options)
        cubin = compiled.asm["cubin"]
        cuda.library.software_gpu_add_ptx(cubin, len(cubin), compiled.asm["ptx"].encode())

    compiler.CompiledKernel.__init__ = keep_ptx
    torch_ops.install()
    return cuda
