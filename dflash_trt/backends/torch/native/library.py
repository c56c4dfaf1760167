"""The loaded library of CPU kernels: its functions, with argument types (`src/kernels.h`).

A kernel trusts the addresses that it gets: `linear.py` and `ops.py`, the only callers, check shapes and dtypes.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

from dflash_trt.backends.torch.native.build import UnavailableError, UnsupportedCpuError, library_path

_LOG = logging.getLogger(__name__)

_VERSION: Final = 6  # src/kernels.h has the same


class Arguments(ctypes.Structure):
    """Arguments of one kernel, dflash_trt_cpu_`kernel`: addresses of tensors that the caller keeps."""

    kernel: ClassVar[str]


class Linear(Arguments):
    """DflashTrtLinear."""

    kernel: ClassVar = "linear"
    _fields_: ClassVar = [
        ("x", c_void_p),
        ("num_rows", c_int64),
        ("packed", c_void_p),
        ("num_out", c_int64),
        ("num_in", c_int64),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("num_threads", c_int32),
        ("form", c_int32),
    ]


class FourBitLinear(Arguments):
    """DflashTrtFourBitLinear."""

    kernel: ClassVar = "four_bit_linear"
    _fields_: ClassVar = [
        ("x", c_void_p),
        ("num_rows", c_int64),
        ("codes", c_void_p),
        ("block_scales", c_void_p),
        ("num_out", c_int64),
        ("num_in", c_int64),
        ("block", c_int64),
        ("values", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("num_threads", c_int32),
        ("rounds_inputs", c_int32),
        ("has_powers", c_int32),
    ]


class RmsNorm(Arguments):
    """DflashTrtRmsNorm."""

    kernel: ClassVar = "rms_norm"
    _fields_: ClassVar = [
        ("x", c_void_p),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("weight", c_void_p),
        ("num_weights", c_int64),
        ("eps", c_float),
        ("out", c_void_p),
    ]


class SiluMul(Arguments):
    """DflashTrtSiluMul."""

    kernel: ClassVar = "silu_mul"
    _fields_: ClassVar = [("gate_up", c_void_p), ("num_rows", c_int64), ("width", c_int64), ("out", c_void_p)]


class Add(Arguments):
    """DflashTrtAdd."""

    kernel: ClassVar = "add"
    _fields_: ClassVar = [("a", c_void_p), ("b", c_void_p), ("size", c_int64), ("out", c_void_p)]


class CopyRows(Arguments):
    """DflashTrtCopyRows."""

    kernel: ClassVar = "copy_rows"
    _fields_: ClassVar = [
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("factor", c_float),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("is_bfloat16", c_int32),
    ]


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


class Rotate(Arguments):
    """DflashTrtRotate."""

    kernel: ClassVar = "rotate"
    _fields_: ClassVar = [
        ("x", c_void_p),
        ("row_stride", c_int64),
        ("num_rows", c_int64),
        ("num_heads", c_int64),
        ("head_dim", c_int64),
        ("rotation", Rotation),
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


class Attention(Arguments):
    """DflashTrtAttention."""

    kernel: ClassVar = "attend"
    _fields_: ClassVar = [
        ("rows", c_void_p),
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
        ("rounds_kv", c_int32),
    ]


class StoreKv(Arguments):
    """DflashTrtStoreKv."""

    kernel: ClassVar = "store_kv"
    _fields_: ClassVar = [
        ("rows", c_void_p),
        ("rotation", Rotation),
        ("kv", c_void_p),
        ("kv_stride", c_int64),
        ("pages", c_void_p),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("limits", c_void_p),
        ("rounds_kv", c_int32),
    ]


class Accept(Arguments):
    """DflashTrtAcceptance."""

    kernel: ClassVar = "accept"
    _fields_: ClassVar = [
        ("logits", c_void_p),
        ("vocab_size", c_int64),
        ("num_requests", c_int64),
        ("width", c_int64),
        ("sampled", c_void_p),
        ("token_ids", c_void_p),
        ("logit_rows", c_void_p),
        ("num_candidates", c_void_p),
        ("token_offsets", c_void_p),
        ("context_lens", c_void_p),
        ("emitted_tokens", c_void_p),
        ("emitted_logprobs", c_void_p),
        ("num_accepted", c_void_p),
        ("bonus_tokens", c_void_p),
        ("next_context_lens", c_void_p),
    ]


class Confidence(Arguments):
    """DflashTrtConfidence."""

    kernel: ClassVar = "confidence"
    _fields_: ClassVar = [("scores", c_void_p), ("num_rows", c_int64), ("width", c_int64), ("out", c_void_p)]


class Blocks(Arguments):
    """DflashTrtBlocks."""

    kernel: ClassVar = "blocks"
    _fields_: ClassVar = [
        ("bonus_tokens", c_void_p),
        ("starts", c_void_p),
        ("num_requests", c_int64),
        ("width", c_int64),
        ("fill", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
    ]


class BlockConv(Arguments):
    """DflashTrtBlockConv."""

    kernel: ClassVar = "block_conv"
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


class Candidates(Arguments):
    """DflashTrtCandidates."""

    kernel: ClassVar = "candidates"
    _fields_: ClassVar = [
        ("logits", c_void_p),
        ("num_rows", c_int64),
        ("vocab_size", c_int64),
        ("top_k", c_int64),
        ("scores", c_void_p),
        ("tokens", c_void_p),
    ]


class Selection(Arguments):
    """DflashTrtSelection."""

    kernel: ClassVar = "select"
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


class Assemble(Arguments):
    """DflashTrtAssemble."""

    kernel: ClassVar = "assemble"
    _fields_: ClassVar = [
        ("num_requests", c_int64),
        ("num_pages", c_int64),
        ("num_groups", c_int64),
        ("draft_topk", c_int64),
        ("slot_ids", c_void_p),
        ("token_offsets", c_void_p),
        ("given_lens", c_void_p),
        ("given_token_ids", c_void_p),
        ("slot_lens", c_void_p),
        ("slot_token_ids", c_void_p),
        ("slot_width", c_int64),
        ("slot_tables", c_void_p),
        ("max_pages", c_int64),
        ("slot_topk_ids", c_void_p),
        ("slot_topk_probs", c_void_p),
        ("slot_topk", c_int64),
        ("context_lens", c_void_p),
        ("positions", c_void_p),
        ("token_ids", c_void_p),
        ("page_tables", c_void_p),
        ("topk_ids", c_void_p),
        ("topk_probs", c_void_p),
    ]


class Store(Arguments):
    """DflashTrtStore."""

    kernel: ClassVar = "store"
    _fields_: ClassVar = [
        ("num_requests", c_int64),
        ("num_drafts", c_int64),
        ("slot_ids", c_void_p),
        ("bonus_tokens", c_void_p),
        ("drafts", c_void_p),
        ("next_context_lens", c_void_p),
        ("slot_lens", c_void_p),
        ("slot_token_ids", c_void_p),
        ("slot_width", c_int64),
    ]


class Call(ctypes.Structure):
    """DflashTrtCall."""

    _fields_: ClassVar = [("kernel", c_void_p), ("arguments", c_void_p)]


_KERNELS: Final = tuple(each.kernel for each in Arguments.__subclasses__())
_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "pack": (c_void_p, c_int64, c_int64, c_void_p),
    "pack_codes": (c_void_p, c_int64, c_int64, c_void_p),
    "pack_four_bits": (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "run": (c_void_p, c_int64),
}


class Recorder(threading.local):
    """The calls that a thread makes now, when it keeps them (`programs.py`)."""

    calls: list[Arguments] | None = None


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The functions of `src/kernels.h`. Calls release the interpreter."""

    path: Path  # its name says the instruction set
    has_bfloat16: bool  # `linear` takes rows of bfloat16
    pack: Any
    pack_codes: Any
    pack_four_bits: Any
    _run: Any
    _functions: dict[str, Any]  # by kernel
    recorder: Recorder = field(default_factory=Recorder)

    def call(self, arguments: Arguments) -> None:
        """Now, whether or not it is recorded."""
        if self.recorder.calls is not None:
            self.recorder.calls.append(arguments)
        self._functions[arguments.kernel](ctypes.byref(arguments))

    def calls(self, recorded: Sequence[Arguments]) -> ctypes.Array[Call]:
        """For `run`; keep `recorded` while it is used."""
        return (Call * len(recorded))(
            *(Call(ctypes.cast(self._functions[each.kernel], c_void_p), ctypes.addressof(each)) for each in recorded)
        )

    def run(self, calls: ctypes.Array[Call]) -> None:
        self._run(ctypes.addressof(calls), len(calls))


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
        functions = {name: getattr(library, f"dflash_trt_cpu_{name}") for name in (*_KERNELS, *_FUNCTIONS)}
    except (OSError, AttributeError) as error:
        raise UnavailableError(f"{path} cannot be loaded ({error}); delete it to have it made again") from error
    if found != _VERSION:
        raise UnavailableError(f"{path} has interface {found} instead of {_VERSION}; delete it to have it made again")
    for name, function in functions.items():
        function.argtypes, function.restype = _FUNCTIONS.get(name, (c_void_p,)), c_int32 if name == "pack" else None
    pack, pack_codes, pack_four_bits, run = (functions.pop(name) for name in _FUNCTIONS)
    has_bfloat16 = bool(library.dflash_trt_cpu_has_bfloat16())
    return CpuKernels(path, has_bfloat16, pack, pack_codes, pack_four_bits, run, functions)
