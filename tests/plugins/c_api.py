"""The plugin library's C API (plugins/include/dflash_trt_kernels.h) over torch tensors, shaped like a plugin node."""

import ctypes
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_trt.kernels.programs import PROGRAMS
from dflash_trt.kernels.programs.program import Program
from tests.plugins.output_shapes import output_shapes

FLOAT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Node(ctypes.Structure):
    _fields_ = (
        ("plugin", ctypes.c_char_p),
        ("float_type", ctypes.c_int32),
        ("shapes", ctypes.POINTER(ctypes.POINTER(ctypes.c_int64))),
        ("fields", ctypes.POINTER(ctypes.c_double)),
    )


class LibraryError(Exception):
    pass


class PluginLibrary:
    """`library(name, inputs, fields)` is what the plugin node of that name computes; pages are written in place."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name in ("last_error", "architectures", "manifest_sha256", "contract"):
            getattr(self._library, f"dflash_trt_{name}").restype = ctypes.c_char_p

    def __call__(self, name: str, inputs: dict[str, Tensor], fields: dict[str, float]) -> list[Tensor]:
        program = _program(name)
        assert all(tensor.is_contiguous() for tensor in inputs.values())
        outputs = _outputs(program, inputs, fields)
        workspace = torch.empty(
            self.workspace_bytes(name, inputs, fields), dtype=torch.uint8, device=outputs[0].device
        ).random_()  # it holds anything
        node = _node(program, inputs, fields)
        stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
        given = _addresses([inputs[name] for name in program.input_names])
        made, scratch = _addresses(outputs), ctypes.c_void_p(workspace.data_ptr())
        self._check(self._library.dflash_trt_run(ctypes.byref(node), given, made, scratch, ctypes.c_void_p(stream)))
        return [] if name == "WriteDraftContext" else outputs  # its output has no value

    @property
    def architectures(self) -> str:
        return self._text("architectures")

    @property
    def manifest_sha256(self) -> str:
        return self._text("manifest_sha256")

    @property
    def contract(self) -> dict[str, Any]:
        contract: dict[str, Any] = json.loads(self._text("contract"))
        return contract

    def workspace_bytes(self, name: str, inputs: dict[str, Tensor], fields: dict[str, float]) -> int:
        node, num_bytes = _node(_program(name), inputs, fields), ctypes.c_size_t()
        self._check(self._library.dflash_trt_workspace(ctypes.byref(node), ctypes.byref(num_bytes)))
        return num_bytes.value

    def _check(self, result: int) -> None:
        if result != 0:
            raise LibraryError(self._text("last_error"))

    def _text(self, name: str) -> str:
        text: bytes = getattr(self._library, f"dflash_trt_{name}")()
        return text.decode()


def _program(name: str) -> Program:
    return next(program for program in PROGRAMS if program.name == name)


def _node(program: Program, inputs: dict[str, Tensor], fields: dict[str, float]) -> Node:
    names = (*program.integer_fields, *program.real_fields)
    assert set(inputs) == set(program.input_names) and set(fields) == set(names)
    shapes = [inputs[name].shape for name in program.input_names]
    return Node(
        program.name.encode(),
        FLOAT_TYPES[inputs[program.input_names[0]].dtype],
        (ctypes.POINTER(ctypes.c_int64) * len(shapes))(*((ctypes.c_int64 * len(shape))(*shape) for shape in shapes)),
        (ctypes.c_double * len(names))(*(fields[name] for name in names)),
    )


def _outputs(program: Program, inputs: dict[str, Tensor], fields: dict[str, float]) -> list[Tensor]:
    """New ones that no kernel has written: NaN and -1, but for zeros in the rows that `AttendLatents` leaves alone."""
    first = inputs[program.input_names[0]]
    types = {"F": first.dtype, "int32": torch.int32, "float32": torch.float32}
    shapes = output_shapes(program, {name: tensor.shape for name, tensor in inputs.items()}, fields)
    outputs = [
        torch.full(shape, -1, dtype=types[rule.dtype], device=first.device)
        for rule, shape in zip(program.outputs, shapes, strict=True)
    ]
    for rule, output in zip(program.outputs, outputs, strict=True):
        if output.is_floating_point():
            output.fill_(0.0 if (program.name, rule.name) == ("AttendLatents", "attended") else torch.nan)
    return outputs


def _addresses(tensors: list[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
