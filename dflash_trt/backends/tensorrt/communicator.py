"""The NCCL communicator of an engine's ranks, and contexts that have it.

Made with NCCL's own functions in the libnccl.so.2 that PyTorch has loaded, so that TensorRT and the plugin library,
which ask for it by name, get the same one.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from dflash_trt.core.config import CollectiveMode
from dflash_trt.core.errors import EngineDirError, RankError

CAPSULE_NAME: Final = b"ncclComm_t"  # the name that IExecutionContext.set_communicator expects
_LIBRARY: Final = "libnccl.so.2"
_FLOAT32, _SUM = 7, 0  # values of ncclDataType_t and ncclRedOp_t

ShareBytes = Callable[[Callable[[], bytes], int], bytes]  # (make, size): bytes that rank 0 makes, on every rank


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class Communicator:
    """A communicator of all ranks. It must be closed after every context and CUDA graph that use it."""

    def __init__(self, nccl: Any, handle: ctypes.c_void_p, *, rank: int, num_ranks: int) -> None:
        """Made by `join`."""
        self.num_ranks = num_ranks
        self._nccl = nccl
        self._handle: ctypes.c_void_p | None = handle
        self._rank = rank

    @classmethod
    def join(cls, share: ShareBytes, *, rank: int, num_ranks: int) -> "Communicator":
        """Returns when all ranks have joined, each on its current GPU.

        Raises:
            RankError: no NCCL, or it failed.
        """
        nccl = _load_nccl()

        def make_id() -> bytes:
            made = _UniqueId()
            _check(nccl, nccl.ncclGetUniqueId(ctypes.byref(made)), "ncclGetUniqueId")
            return bytes(made)

        unique_id = _UniqueId.from_buffer_copy(share(make_id, ctypes.sizeof(_UniqueId)))
        handle = ctypes.c_void_p()
        _check(nccl, nccl.ncclCommInitRank(ctypes.byref(handle), num_ranks, unique_id, rank), "ncclCommInitRank")
        return cls(nccl, handle, rank=rank, num_ranks=num_ranks)

    @property
    def address(self) -> int:
        """The ncclComm_t."""
        assert self._handle is not None and self._handle.value is not None, "the communicator is closed"
        return self._handle.value

    def capsule(self) -> Any:
        """The ncclComm_t as TensorRT's Python API takes it."""
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(self.address, CAPSULE_NAME, None)

    def check_sum(self, device: torch.device, stream: int) -> None:
        """Sum rank + 1 over the ranks, on each of them.

        Proves that the ranks are in one world and that NCCL moves data between them. It proves nothing about the
        collectives inside an engine.

        Raises:
            RankError: another sum.
        """
        x = torch.full((1,), float(self._rank + 1), device=device)
        summed = torch.zeros_like(x)
        addresses = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(summed.data_ptr())
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # `stream` may be another one
        count = ctypes.c_size_t(1)
        arguments = (*addresses, count, _FLOAT32, _SUM, ctypes.c_void_p(self.address), ctypes.c_void_p(stream))
        _check(self._nccl, self._nccl.ncclAllReduce(*arguments), "ncclAllReduce")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        expected, found = self.num_ranks * (self.num_ranks + 1) / 2, summed.item()
        if found != expected:
            raise RankError.about(
                f"sum over {self.num_ranks} ranks",
                expected=f"{expected:g}",
                found=f"{found:g} on rank {self._rank}",
                hint="Check the GPUs' links with nccl-tests, and run again with NCCL_DEBUG=INFO.",
            )

    def close(self) -> None:
        """Leave the world. Calling it again does nothing."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            _check(self._nccl, self._nccl.ncclCommDestroy(handle), "ncclCommDestroy")

    def given_to(self, engine: Any, *, mode: CollectiveMode, plugin_library: Path | None) -> Any:
        """The engine whose contexts exchange over this communicator, by TensorRT's layers or by plugins.

        Raises:
            EngineDirError: the plugin library refused it.
        """
        if mode == "native":
            return EngineOfRanks(engine, self)
        assert plugin_library is not None, "collectives of plugins need a plugin library"
        library = ctypes.CDLL(str(plugin_library))  # the one that TensorRT has loaded from there
        library.dflash_trt_last_error.restype = ctypes.c_char_p
        if library.dflash_trt_set_communicator(ctypes.c_void_p(self.address)) != 0:
            raise EngineDirError(f"plugin library {plugin_library}: {library.dflash_trt_last_error().decode()}")
        return engine


class EngineOfRanks:
    """An ICudaEngine that gives all its contexts the communicator.

    Creating a context waits for the other ranks, which must create theirs in the same order.
    """

    def __init__(self, engine: Any, communicator: Communicator) -> None:
        self._engine = engine
        self._communicator = communicator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def create_execution_context(self, *arguments: Any) -> Any:
        """Raise EngineDirError if TensorRT refuses the communicator: collectives would silently do nothing."""
        context = self._engine.create_execution_context(*arguments)
        if context is not None and not context.set_communicator(self._communicator.capsule()):
            raise EngineDirError.about(
                "TensorRT set_communicator",
                expected="True",
                found="False: this engine's collectives would do nothing",
                hint="Build the engine again with --collectives plugin, and report it with TensorRT's log.",
            )
        return context


def _load_nccl() -> Any:
    """By its soname, which finds the one that is loaded already, and for all libraries loaded later."""
    try:
        nccl = ctypes.CDLL(_LIBRARY, ctypes.RTLD_GLOBAL)
    except OSError as error:
        hint = "Install a PyTorch with CUDA, whose nvidia-nccl package has it."
        raise RankError.about("NCCL", expected=_LIBRARY, found=str(error), hint=hint) from error
    nccl.ncclCommInitRank.argtypes = (ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int)
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    return nccl


def _check(nccl: Any, result: int, call: str) -> None:
    if result != 0:
        found = nccl.ncclGetErrorString(result).decode()
        hint = "Run again with NCCL_DEBUG=INFO to see which rank failed, and why."
        raise RankError.about(call, expected="success", found=found, hint=hint)
