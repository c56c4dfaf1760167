"""The software GPU's CUDA as a library: built against an environment with PyTorch's CUDA build, and what it tells."""

import atexit
import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final

import torch

HERE: Final = Path(__file__).parent
FLAGS: Final = ("-std=c++20", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
# Libraries of PyTorch whose calls of CUDA are answered here, and how the names of such calls begin.
_CALLERS: Final = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so")
_PREFIXES: Final = ("cuda", "__cuda", "cublas", "nccl", "cu")
_NOT_OURS: Final = ("cudnn", "cusparse", "cufft", "curand", "cusolver", "cupti")  # their own libraries answer
_SYMBOL_TYPES: Final = ("T", "W", "D", "B")


def build_library() -> Path:
    """Compile what is not in the cache yet: a folder with libsoftware_gpu.so, and as libcuda.so.1 for Triton.

    Raises:
        RuntimeError: PyTorch is not a CUDA build, or the compiler fails; its words are in the message.
    """
    if torch.version.cuda is None:
        raise RuntimeError(f"PyTorch: expected a CUDA build, found {torch.__version__}. Use an environment of its own.")
    sources = sorted(HERE.glob("*.cpp"))
    content = b"".join(path.read_bytes() for path in [*sources, *sorted(HERE.glob("*.h"))])
    key = hashlib.sha256(content + " ".join((*FLAGS, torch.__version__)).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-trt" / f"runtime-{key[:16]}"
    library = folder / "libsoftware_gpu.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        includes = [f"-I{path}" for path in _include_dirs()]
        objects = [folder / f"{path.stem}.o" for path in sources]
        compile_all = [
            ["c++", *FLAGS, *includes, "-c", str(path), "-o", str(out)]
            for path, out in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, compile_all))
        rest = folder / "not_imitated.cpp"
        rest.write_text(_not_imitated(objects))
        linked = library.with_suffix(f".{os.getpid()}")
        link = ["c++", "-std=c++20", "-fPIC", "-shared", str(rest), *map(str, objects), "-ldl", "-o", str(linked)]
        _run(link)
        linked.rename(library)
    driver = folder / "libcuda.so.1"
    if not driver.exists():
        driver.symlink_to(library.name)
    return library


def environment(gpu: str = "h200", *, num_devices: int = 1, executes: bool = False) -> dict[str, str]:
    """What a process needs so that its PyTorch has such a GPU. `executes`: kernels compute, else they are counted."""
    library = build_library()
    paths = [*([str(HERE / "site")] if executes else []), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": ":".join(filter(None, paths)),
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "SOFTWARE_GPU": gpu,
        "SOFTWARE_GPU_COUNT": str(num_devices),
        "SOFTWARE_GPU_EXECUTES": str(int(executes)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


class SoftwareCuda:
    """What the library of this process tells.

    Counts are by name: calls, kernels, bytes copied; with "in graphs: " before it, what launched graphs hold.
    """

    def __init__(self) -> None:
        """Raises OSError where the process was not started with `environment`."""
        self.library = ctypes.CDLL("libsoftware_gpu.so")
        self.library.software_gpu_problem_at.restype = ctypes.c_char_p
        for name in ("software_gpu_used_bytes", "software_gpu_peak_bytes", "software_gpu_num_problems"):
            getattr(self.library, name).restype = ctypes.c_size_t

    @property
    def problems(self) -> list[str]:
        """What CUDA forbids, each once, in the order of their first time."""
        count = self.library.software_gpu_num_problems()
        return [self.library.software_gpu_problem_at(i).decode() for i in range(count)]

    def counts(self) -> Mapping[str, int]:
        found: dict[str, int] = {}

        @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)
        def add(name: bytes, count: int) -> None:
            found[name.decode()] = count

        self.library.software_gpu_each_count(add)
        return found

    def num_launches(self) -> tuple[int, int]:
        """Of the host, each graph as one; and of the device, the kernels of graphs included. Since the last reset."""
        from_host, on_device = ctypes.c_long(), ctypes.c_long()
        self.library.software_gpu_num_launches(ctypes.byref(from_host), ctypes.byref(on_device))
        return from_host.value, on_device.value

    def watch(self, told: Callable[[str], None]) -> None:
        """Call `told` from now on, in the thread that causes it, for each problem, and for each call that makes the
        host wait, copies pageable memory, or allocates or frees memory.
        """
        self._watcher = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda what: told(what.decode()))
        self.library.software_gpu_watch(self._watcher)
        atexit.register(self.library.software_gpu_watch, None)  # libtorch still calls when Python is gone

    def reset_counts(self) -> None:
        self.library.software_gpu_reset_counts()

    def used_bytes(self, device: int = 0) -> int:
        return int(self.library.software_gpu_used_bytes(device))

    def peak_bytes(self, device: int = 0) -> int:
        return int(self.library.software_gpu_peak_bytes(device))


@cache
def software_cuda() -> SoftwareCuda:
    return SoftwareCuda()


def _site_packages() -> Path:
    return Path(torch.__file__).parents[1]


def _include_dirs() -> list[Path]:
    """Of the packages that PyTorch's CUDA build brings; the toolkit's for what they lack."""
    found = sorted(_site_packages().glob("nvidia/*/include"))
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    return [*found, toolkit] if toolkit.is_dir() else found


def _symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """Type and name of each symbol."""
    listed = subprocess.run(["nm", *options, str(path)], capture_output=True, text=True, check=True).stdout
    fields = [line.split() for line in listed.splitlines()]
    return [(field[-2], field[-1].partition("@")[0]) for field in fields if len(field) >= 2]


def _not_imitated(objects: list[Path]) -> str:
    """A function for every other call of CUDA that PyTorch makes: a problem by name, the first time."""
    ours = {name for path in objects for kind, name in _symbols(path) if kind in _SYMBOL_TYPES}
    wanted = {
        name
        for caller in _CALLERS
        for kind, name in _symbols(Path(torch.__file__).parent / "lib" / caller, "-D", "--undefined-only")
        if name.startswith(_PREFIXES)
        and not name.startswith(("cudnn", "cusparse", "cufft", "curand", "cusolver", "cupti"))
    }
    calls = [
        f'extern "C" __attribute__((visibility("default"))) int {name}() '
        f'{{ static int once = 0; if (!once++) software_gpu_problem("not imitated: {name}"); return 0; }}'
        for name in sorted(wanted - ours)
    ]
    return "\n".join(['extern "C" void software_gpu_problem(const char*);', *calls, ""])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def main() -> None:
    """Runs Python with the GPU of SOFTWARE_GPU: `python -m software_gpu.runtime.library PROGRAM ARGUMENT...`."""
    own = environment(
        os.environ.get("SOFTWARE_GPU", "h200"),
        num_devices=int(os.environ.get("SOFTWARE_GPU_COUNT", "1")),
        executes=os.environ.get("SOFTWARE_GPU_EXECUTES") == "1",
    )
    os.execvpe(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | own)


if __name__ == "__main__":
    main()
