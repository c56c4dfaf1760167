"""The loaded library of CPU kernels: its functions, with argument types (`src/kernels.h`).

A function that takes addresses trusts them: `linear.py` and `ops.py`, its only callers, check shapes and dtypes.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

from dflash_trt.backends.torch.native.build import UnavailableError, UnsupportedCpuError, library_path

_LOG = logging.getLogger(__name__)

_VERSION: Final = 2  # src/kernels.h has the same
_ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "pack": (c_void_p, c_int64, c_int64, c_void_p),
    "linear": (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int32),
    "rms_norm": (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_float, c_void_p),
    "silu_mul": (c_void_p, c_int64, c_int64, c_void_p),
    "rotate": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p),
    "attend": (c_void_p, c_void_p),
    "store_kv": (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p),
    "block_conv": (c_void_p,),
    "candidates": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p),
    "select": (c_void_p,),
}


class Rotation(ctypes.Structure):
    """DflashTrtRotation."""

    _fields_: ClassVar = [
        ("norm", c_void_p),
        ("norm_stride", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("positions", c_void_p),
        ("eps", c_float),
    ]


class TokenRows(ctypes.Structure):
    """DflashTrtTokenRows."""

    _fields_: ClassVar = [
        ("num_rows", c_int64),
        ("num_requests", c_int64),
        ("positions", c_void_p),
        ("token_offsets", c_void_p),
        ("context_lens", c_void_p),
        ("page_table", c_void_p),
        ("page_table_stride", c_int64),
        ("page_size", c_int64),
        ("keeps_kv", c_int32),
    ]


class Attention(ctypes.Structure):
    """DflashTrtAttention."""

    _fields_: ClassVar = [
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("pages", c_void_p),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("window", c_int64),
        ("chunk", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("is_causal", c_int32),
        ("is_window_anchored", c_int32),
        ("first_key", c_int32),
        ("num_threads", c_int32),
    ]


class BlockConv(ctypes.Structure):
    """DflashTrtBlockConv."""

    _fields_: ClassVar = [
        ("x", c_void_p),
        ("num_rows", c_int64),
        ("num_slots", c_int64),
        ("filters", c_void_p),
        ("filter_stride", c_int64),
        ("base", c_void_p),
        ("num_taps", c_int64),
        ("num_groups", c_int64),
        ("group_size", c_int64),
        ("out", c_void_p),
    ]


class Selection(ctypes.Structure):
    """DflashTrtSelection."""

    _fields_: ClassVar = [
        ("scores", c_void_p),
        ("tokens", c_void_p),
        ("noise", c_void_p),
        ("hidden", c_void_p),
        ("predecessor", c_void_p),
        ("successor", c_void_p),
        ("first_tokens", c_void_p),
        ("num_requests", c_int64),
        ("num_slots", c_int64),
        ("top_k", c_int64),
        ("rank", c_int64),
        ("out", c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The functions of `src/kernels.h`, without their prefix. Calls release the interpreter."""

    path: Path  # its name says the instruction set
    pack: Any
    linear: Any
    rms_norm: Any
    silu_mul: Any
    rotate: Any
    attend: Any
    store_kv: Any
    block_conv: Any
    candidates: Any
    select: Any


@dataclass(frozen=True, slots=True)
class NoKernels:
    """Why this process has none."""

    reason: str


@cache
def cpu_kernels() -> CpuKernels | NoKernels:
    """Those of this machine, compiled at the first call on it."""
    try:
        return load_kernels(library_path())
    except UnavailableError as error:
        level = logging.INFO if isinstance(error, UnsupportedCpuError) else logging.WARNING
        _LOG.log(level, "the CPU kernels are not used, and PyTorch takes up to twice as long: %s", error)
        return NoKernels(str(error))


def load_kernels(path: Path) -> CpuKernels:
    """Raises UnavailableError where the file is not a library that this process can use."""
    import torch  # noqa: F401  (its OpenMP runtime is the library's)

    try:
        library = ctypes.CDLL(str(path))
        found = library.dflash_trt_cpu_version()
        functions = {name: getattr(library, f"dflash_trt_cpu_{name}") for name in _ARGUMENTS}
    except (OSError, AttributeError) as error:
        raise UnavailableError(f"{path} cannot be loaded ({error}); delete it to have it made again") from error
    if found != _VERSION:
        raise UnavailableError(f"{path} has interface {found} instead of {_VERSION}; delete it to have it made again")
    for name, function in functions.items():
        function.argtypes, function.restype = _ARGUMENTS[name], c_int32 if name == "pack" else None
    return CpuKernels(path=path, **functions)
