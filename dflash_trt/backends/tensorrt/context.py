"""One TensorRT execution context: bound to one optimization profile and to fixed buffers."""

from typing import Any, Protocol

import torch

from dflash_trt.backends.tensorrt.buffers import Shapes, StepBuffers
from dflash_trt.backends.tensorrt.network import NEXT_PREFIX
from dflash_trt.core.errors import CapacityError, EngineDirError


class Stream(Protocol):
    """The required part of a CUDA stream."""

    @property
    def cuda_stream(self) -> int: ...


class ProfileContext:
    """Runs steps of one profile. `is_in_place`: pages are written where they are, not into the other of two pools."""

    def __init__(
        self, engine: Any, profile_index: int, buffers: StepBuffers, stream: Stream, *, is_in_place: bool
    ) -> None:
        self._context = engine.create_execution_context()
        if self._context is None:
            hint = "Give the K/V pages less memory (--kv-cache-gib)."
            raise CapacityError.about(
                "TensorRT context", expected="its activation memory", found="not enough on the GPU", hint=hint
            )
        self._stream = stream
        self._buffers = buffers
        if profile_index != 0:
            self._must(self._context.set_optimization_profile_async(profile_index, stream.cuda_stream), "profile")
        for name, address in buffers.addresses().items():
            self._bind(name, address)
        if is_in_place:
            self._check_addresses()

    def enqueue(self, shapes: Shapes, *, written: dict[str, torch.Tensor]) -> None:
        """One step, on the stream. `written` are the pages' new homes by state name."""
        for name, pages in self._buffers.state.items():
            self._bind(name, pages.data_ptr())
            self._bind(NEXT_PREFIX + name, written[name].data_ptr())
        for name, shape in shapes.items():
            self._must(self._context.set_input_shape(name, shape), f"shape {shape} of {name}")
        self._must(self._context.execute_async_v3(self._stream.cuda_stream), "enqueue")

    def _check_addresses(self) -> None:
        """Pages must leave where they came from, whatever the engine says about aliases.

        Raises:
            EngineDirError: TensorRT keeps another address for an output than it was given.
        """
        for name, pages in self._buffers.state.items():
            self._bind(name, pages.data_ptr())
            self._bind(NEXT_PREFIX + name, pages.data_ptr())
        for name in self._buffers.state:
            addresses = [self._context.get_tensor_address(tensor) for tensor in (name, NEXT_PREFIX + name)]
            if addresses[0] != addresses[1]:
                hint = "Build with plugins: layers, which writes into a second pool, and report it with this message."
                found = f"{addresses[1]:#x}"
                raise EngineDirError.about(
                    f"address of {NEXT_PREFIX}{name}", expected=f"{addresses[0]:#x}", found=found, hint=hint
                )

    def _bind(self, name: str, address: int) -> None:
        self._must(self._context.set_tensor_address(name, address), f"address of {name}")

    def _must(self, is_done: bool, what: str) -> None:
        assert is_done, f"TensorRT refused the {what}, which the limits of the engine allow"
