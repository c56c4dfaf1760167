"""The executor's C++ as a library, compiled once into a cache, and its C interface."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
FLAGS: Final = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-Wall",
    "-Wextra",
)
_ERROR_BYTES: Final = 4096


class PtxError(RuntimeError):
    """What a GPU would have refused, or answered with undefined behaviour; names the line, the block and the warp."""


def build_library() -> Path:
    """Compile what is not in the cache yet.

    Raises:
        RuntimeError: the compiler fails; its words are in the message.
    """
    sources = sorted(HERE.glob("*.cpp"))
    content = b"".join(path.read_bytes() for path in sorted([*sources, *HERE.glob("*.h")]))
    key = hashlib.sha256(
        content
        + " ".join(FLAGS).encode()
        + Path("/proc/cpuinfo").read_bytes().split(b"flags", 1)[-1].split(b"\n", 1)[0]
    ).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-trt"
    library = folder / f"software-gpu-{key[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        objects = [Path(work) / f"{path.stem}.o" for path in sources]
        commands = [
            ["c++", *FLAGS, "-c", str(path), "-o", str(out)] for path, out in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = Path(work) / library.name
        _run(["c++", "-shared", *map(str, objects), "-o", str(linked)])
        linked.rename(library)
    return library


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


@cache
def load_library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_library()))
    library.software_gpu_load.restype = ctypes.c_void_p
    library.software_gpu_load.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]
    library.software_gpu_parameters.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    library.software_gpu_launch.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int,
        ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64), ctypes.c_char_p, ctypes.c_int,
    ]  # fmt: skip
    return library


class PtxKernel:
    """One entry of a module of PTX."""

    def __init__(self, ptx: str, entry: str) -> None:
        """Raises PtxError for an instruction that is not implemented."""
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.ptx, self.entry = ptx, entry
        self._library = load_library()
        self._loaded = self._library.software_gpu_load(ptx.encode(), entry.encode(), error, _ERROR_BYTES)
        if not self._loaded:
            raise PtxError(error.value.decode())
        offsets, sizes = (ctypes.c_int * 256)(), (ctypes.c_int * 256)()
        count = self._library.software_gpu_parameters(self._loaded, offsets, sizes, 256)
        self.parameters = list(zip(offsets[:count], sizes[:count], strict=True))  # (offset, bytes)
        self.num_instructions = 0  # of warps, in all launches

    def launch(
        self,
        grid: tuple[int, int, int],
        num_threads: int,
        shared_bytes: int,
        parameters: bytes,
        *,
        allocations: Sequence[tuple[int, int]] = (),  # (begin, end); none: every address may be touched
        is_late: bool = True,
        finds_races: bool = False,
        max_instructions: int = 2_000_000_000,
    ) -> None:
        """Run all blocks to their end. Asynchronous work is done at the last moment its waits allow, or at the first.

        Raises:
            PtxError: see its docstring.
        """
        error, executed = ctypes.create_string_buffer(_ERROR_BYTES), ctypes.c_uint64()
        flat = [address for allocation in allocations for address in allocation]
        failed = self._library.software_gpu_launch(
            self._loaded, (ctypes.c_uint32 * 3)(*grid), num_threads, shared_bytes, parameters,
            (ctypes.c_uint64 * len(flat))(*flat), len(allocations), is_late, finds_races, max_instructions,
            ctypes.byref(executed), error, _ERROR_BYTES,
        )  # fmt: skip
        self.num_instructions += executed.value
        if failed:
            raise PtxError(error.value.decode())
