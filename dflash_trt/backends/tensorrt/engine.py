"""Opens a TensorRT plan; checks module, driver, plugin library, plan and every I/O tensor.

Nothing is imported or touched before it is needed, and each thing that may be missing has an error that names it.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from dflash_trt.backends.tensorrt.module import load_tensorrt, make_logger
from dflash_trt.backends.tensorrt.network import (
    IoTensor,
    StepNetworkSpec,
    score_outputs_of,
    state_outputs_of,
    step_outputs_of,
)
from dflash_trt.backends.tensorrt.plan_stream import read_plan
from dflash_trt.backends.tensorrt.plugin_library import load_plugin_library
from dflash_trt.backends.tensorrt.profiles import profile_inputs
from dflash_trt.core.dtype import tensorrt_dtype
from dflash_trt.core.errors import EngineDirError, problem, raise_all

_REBUILD = "Build the engine again on this machine: dflash-trt build ... --backend tensorrt --overwrite"


def require_gpu() -> None:
    """Constructing a TensorRT runtime without a driver crashes the process, so this is asked first.

    Raises:
        EngineDirError: PyTorch sees no CUDA device.
    """
    if not torch.cuda.is_available():
        built = f"PyTorch {torch.__version__}" + ("" if torch.version.cuda else ", built without CUDA")
        raise EngineDirError.about(
            "TensorRT engine",
            expected="an NVIDIA GPU with a driver",
            found=f"none ({built})",
            hint="Run it on the GPU it was built for, or build with --backend torch for this machine.",
        )


def deserialize(plan: Path, *, plugin_library: Path) -> tuple[Any, tuple[Any, ...]]:
    """(the ICudaEngine, what must live as long as it).

    Raises:
        EngineDirError: no GPU, no TensorRT, no plugin library, or a plan that this TensorRT refuses.
    """
    require_gpu()
    trt = load_tensorrt("tensorrt", error=EngineDirError)
    load_plugin_library(trt, plugin_library, error=EngineDirError)
    logger = make_logger(trt)
    runtime = trt.Runtime(logger)
    engine = read_plan(trt, runtime, plan)
    if engine is None:
        found = "; ".join(logger.errors) or "a refusal without a message"
        raise EngineDirError.about(
            str(plan), expected=f"a plan for TensorRT {trt.__version__} and this GPU", found=found, hint=_REBUILD
        )
    return engine, (runtime, logger)


def check_engine_io(engine: Any, spec: StepNetworkSpec) -> None:
    """Names, directions, dtypes and shapes against the step table.

    That pages are written where they are is no matter of I/O: `canary` looks.

    Raises:
        EngineDirError: every mismatch.
    """
    inputs, outputs = expected_io(spec)
    found = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    problems = list(_name_problems({tensor.name for tensor in (*inputs, *outputs)}, found))
    for direction, tensors in (("INPUT", inputs), ("OUTPUT", outputs)):
        for tensor in tensors:
            if tensor.name in found:
                problems.extend(_tensor_problems(engine, tensor, direction))
    raise_all(EngineDirError, "engine inputs and outputs", problems)


def expected_io(spec: StepNetworkSpec) -> tuple[tuple[IoTensor, ...], tuple[IoTensor, ...]]:
    """All inputs and all outputs, the state's included."""
    return profile_inputs(spec), (*step_outputs_of(spec), *score_outputs_of(spec), *state_outputs_of(spec))


def _name_problems(expected: set[str], found: Iterable[str]) -> Iterator[str]:
    for name in sorted(expected - set(found)):
        yield problem(f"tensor {name}", expected="in the engine", found="none", hint=_REBUILD)
    for name in sorted(set(found) - expected):
        yield problem(f"tensor {name}", expected="no such tensor", found="one", hint=_REBUILD)


def _tensor_problems(engine: Any, tensor: IoTensor, direction: str) -> Iterator[str]:
    name = tensor.name
    facts = (
        ("direction", direction, engine.get_tensor_mode(name).name),
        ("dtype", tensorrt_dtype(tensor.dtype), engine.get_tensor_dtype(name).name),
        ("location", "DEVICE", engine.get_tensor_location(name).name),
    )
    for what, expected, found in facts:
        if expected != found:
            yield problem(f"tensor {name} {what}", expected=expected, found=found, hint=_REBUILD)
    shape = tuple(engine.get_tensor_shape(name))
    is_output = direction == "OUTPUT"  # TensorRT may know an output's size better than the table says
    sizes_agree = len(shape) == len(tensor.shape) and all(
        want == have or (is_output and want == -1) for want, have in zip(tensor.shape, shape, strict=True)
    )
    if not sizes_agree:
        expected_shape = f"[{', '.join(map(str, tensor.shape))}]"
        yield problem(f"tensor {name} shape", expected=expected_shape, found=str(list(shape)), hint=_REBUILD)
