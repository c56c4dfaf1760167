"""The plugin library's collectives among threads, each with a library and a communicator of its own.

    python -m tests.plugins.collectives_of_threads LIBRARY NCCL DIRECTORY

A library has one communicator per process, so every thread loads a copy of it from DIRECTORY. NCCL is a stand-in that
sums what it is given, so what is tested is the C++: which function, which type, count and order. It runs in a process
of its own, because the stand-in answers to the name libnccl.so.2. Prints one JSON object.
"""

import ctypes
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

NUM_ROWS, NUM_COLUMNS = 8, 7  # rows that 2 and 4 ranks share evenly
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Floats = np.ndarray[Any, np.dtype[np.float32]]


class Shape(ctypes.Structure):
    _fields_ = (("float_type", ctypes.c_int32), ("num_ranks", ctypes.c_int32), ("num_elements", ctypes.c_int64))


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


# By the library's number: dtype of the memory, and conversions from and to float32.
TYPES: dict[int, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    0: (np.float32, lambda x: x, lambda x: x),
    1: (np.float16, lambda x: x.astype(np.float16), lambda x: x.astype(np.float32)),
    2: (
        np.uint16,
        lambda x: (x.view(np.uint32) >> 16).astype(np.uint16),
        lambda x: (x.astype(np.uint32) << 16).view(np.float32),
    ),
}


def values_of(rank: int) -> Floats:
    """Integers, so that sums are exact in every type, and no two ranks have the same."""
    return (np.arange(NUM_ROWS * NUM_COLUMNS, dtype=np.float32) % 11 + 13 * rank).reshape(NUM_ROWS, NUM_COLUMNS)


def outcome_of(name: str, parts: Sequence[Floats], rank: int) -> Floats:
    """What a rank gets where the ranks bring `parts`."""
    found = np.stack(parts)
    own = found.reshape(len(parts), len(parts), -1, NUM_COLUMNS)[:, rank]
    if name in ("all_gather", "all_to_all"):
        return found if name == "all_gather" else own
    summed: Floats = (found if name == "all_reduce" else own).sum(0)
    return summed


class Rank:
    def __init__(self, library: Path, nccl: Any, unique_id: UniqueId, num_ranks: int, rank: int) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.dflash_trt_last_error.restype = ctypes.c_char_p
        self.num_ranks, self.rank = num_ranks, rank
        communicator = ctypes.c_void_p()
        assert nccl.ncclCommInitRank(ctypes.byref(communicator), num_ranks, unique_id, rank) == 0
        self.communicator = communicator

    def collective(
        self, name: str, float_type: int, *, num_ranks: int | None = None, num_rows: int = NUM_ROWS
    ) -> str | list[float]:
        """The result in float32, or the error."""
        dtype, to_type, to_float = TYPES[float_type]
        x = np.ascontiguousarray(to_type(values_of(self.rank)))
        out = np.zeros(outcome_of(name, [x] * self.num_ranks, self.rank).shape, dtype)
        shape = Shape(float_type, num_ranks or self.num_ranks, num_rows * NUM_COLUMNS)
        function = getattr(self.library, f"dflash_trt_{name}")
        addresses = ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data)
        if function(ctypes.byref(shape), *addresses, None) != 0:
            return str(self.library.dflash_trt_last_error().decode())
        assert np.array_equal(x, to_type(values_of(self.rank)))
        found: list[float] = to_float(out).reshape(-1).tolist()
        return found


def run(library: Path, nccl: Any, directory: Path, num_ranks: int) -> dict[str, Any]:
    unique_id = UniqueId()
    assert nccl.ncclGetUniqueId(ctypes.byref(unique_id)) == 0

    def work(rank: int) -> dict[str, Any]:
        copy = Path(shutil.copy(library, directory / f"rank{rank}of{num_ranks}.so"))
        member = Rank(copy, nccl, unique_id, num_ranks, rank)
        answers: dict[str, Any] = {"without": member.collective("all_reduce", 0)}
        assert member.library.dflash_trt_set_communicator(member.communicator) == 0
        answers["uneven"] = member.collective("reduce_scatter", 0, num_rows=NUM_ROWS - 1)
        answers["of another world"] = member.collective("all_reduce", 0, num_ranks=num_ranks + 1)
        for name in COLLECTIVES:
            answers[name] = [member.collective(name, float_type) for float_type in TYPES]
        assert member.library.dflash_trt_set_communicator(None) == 0
        answers["after"] = member.collective("all_gather", 0)
        return answers

    with ThreadPoolExecutor(num_ranks) as threads:
        return dict(enumerate(threads.map(work, range(num_ranks))))


def main(library: Path, nccl_path: Path, directory: Path) -> dict[str, Any]:
    alone = Rank.__new__(Rank)
    alone.library = ctypes.CDLL(str(shutil.copy(library, directory / "alone.so")))
    alone.library.dflash_trt_last_error.restype = ctypes.c_char_p
    missing = alone.library.dflash_trt_set_communicator(ctypes.c_void_p(1)), alone.library.dflash_trt_last_error()
    nccl = ctypes.CDLL(str(nccl_path), ctypes.RTLD_GLOBAL)
    ranks = {num_ranks: run(library, nccl, directory, num_ranks) for num_ranks in (2, 4)}
    return {"missing": [missing[0], missing[1].decode()], "ranks": ranks}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*(Path(argument) for argument in sys.argv[1:4]))))
