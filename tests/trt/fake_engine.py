"""An ICudaEngine on the host: real addresses, real profiles, the interpreter instead of a GPU."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from dflash_trt.backends.tensorrt.engine import expected_io
from dflash_trt.backends.tensorrt.network import IoTensor
from dflash_trt.backends.tensorrt.profiles import Profile, profile_inputs, step_profiles
from dflash_trt.engine_dir import EngineLimits
from tests.trt.host_memory import view_at
from tests.trt.interpreter import NetworkInterpreter, RunNode
from tests.trt.networks import DefinedStep

USER_MANAGED = "USER_MANAGED"
ACTIVATION_BYTES = (1 << 12, 1 << 14)  # of the profiles
_NAMES = {
    "float32": "FLOAT",
    "bfloat16": "BF16",
    "float16": "HALF",
    "float8_e4m3fn": "FP8",
    "int32": "INT32",
    "int64": "INT64",
}


class FakeEngine:
    """What the executor asks of an ICudaEngine. Fields may be changed to make a mismatched engine."""

    def __init__(self, defined: DefinedStep, limits: EngineLimits, *, run_node: RunNode | None = None) -> None:
        inputs, outputs = expected_io(defined.spec)
        self.tensors: dict[str, tuple[str, IoTensor]] = {tensor.name: ("INPUT", tensor) for tensor in inputs}
        self.tensors |= {tensor.name: ("OUTPUT", tensor) for tensor in outputs}
        self.dtypes = {name: _NAMES[tensor.dtype] for name, (_, tensor) in self.tensors.items()}
        self.shapes = {name: tensor.shape for name, (_, tensor) in self.tensors.items()}
        self.interpreter = defined.interpreter(run_node)
        self.profiles = step_profiles(defined.spec, limits)
        self.inputs = profile_inputs(defined.spec)
        self.contexts: list[FakeContext] = []

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return _named(self.tensors[name][0])

    def get_tensor_dtype(self, name: str) -> Any:
        return _named(self.dtypes[name])

    def get_tensor_location(self, name: str) -> Any:
        return _named("DEVICE")

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return ACTIVATION_BYTES[profile_index]

    def create_execution_context(self, strategy: str) -> "FakeContext":
        assert strategy == USER_MANAGED
        self.contexts.append(FakeContext(self.interpreter, self.inputs, self.profiles))
        return self.contexts[-1]


@dataclass
class FakeContext:
    """Reads inputs from the bound addresses and writes outputs to them, as one execution would."""

    interpreter: NetworkInterpreter
    inputs: tuple[IoTensor, ...]
    profiles: tuple[Profile, ...]
    profile: int = 0
    num_runs: int = 0
    addresses: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    memory: tuple[int, int] = (0, 0)  # address and size of what it computes in
    ran: set[tuple[tuple[str, tuple[int, ...]], ...]] = field(default_factory=set)  # the shapes it ever had

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self.memory = (memory, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Refuses what the profile does not allow, as TensorRT does."""
        tensor = next(tensor for tensor in self.inputs if tensor.name == name)
        least, _, most = self.profiles[self.profile].shapes_of(tensor)
        self.shapes[name] = shape
        sizes = list(zip(least, shape, most, strict=True))
        return all(low <= size <= high for low, size, high in sizes)

    def execute_async_v3(self, stream: int) -> bool:
        """Refuses to run without the memory its profile asks for: TensorRT would write somewhere."""
        address, size = self.memory
        if not address or address % 256 or size < ACTIVATION_BYTES[self.profile]:
            return False
        self.num_runs += 1
        self.ran.add(tuple(sorted(self.shapes.items())))
        given = {
            tensor.name: view_at(
                self.addresses[tensor.name], self.shapes.get(tensor.name, tensor.shape), getattr(torch, tensor.dtype)
            ).clone()
            for tensor in self.inputs
        }
        for name, value in self.interpreter.run(given).items():
            view_at(self.addresses[name], tuple(value.shape), value.dtype).copy_(value)
        return True


def _named(name: str) -> Any:
    return Enum("Named", {name: 0})[name]
