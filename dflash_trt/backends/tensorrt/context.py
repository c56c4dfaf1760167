"""TensorRT execution contexts: one per optimization profile, and one per captured graph.

A deterministic engine has one profile for all steps.

A captured graph belongs to the context it was captured from, whose shapes must not change afterwards: later steps of
another shape could resize what its kernels read (TensorRT's developer guide, "CUDA graphs"). All contexts share one
block of activation memory, since steps follow each other on one stream.
"""

from collections.abc import Iterable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from dflash_trt.backends.padding import StepShape
from dflash_trt.backends.tensorrt.buffers import Shapes
from dflash_trt.core.errors import CapacityError

_ALIGNMENT: Final = 256  # bytes


class Stream(Protocol):
    """The required part of a CUDA stream."""

    @property
    def cuda_stream(self) -> int: ...


class Activations:
    """The memory that contexts compute in: as much as the largest profile asks for."""

    def __init__(self, engine: Any, *, device: torch.device) -> None:
        """Raises CapacityError when the device has not so much left."""
        self._sizes = [
            engine.get_device_memory_size_for_profile_v2(index) for index in range(engine.num_optimization_profiles)
        ]
        try:
            self._memory = torch.empty(max(self._sizes) + _ALIGNMENT, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise CapacityError.about(
                "TensorRT context",
                expected=f"{max(self._sizes)} bytes of activations",
                found=str(error),
                hint="Build with a smaller max_num_tokens, or free the GPU.",
            ) from error

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def give(self, context: Any, profile_index: int) -> None:
        start = self._memory.data_ptr()
        context.set_device_memory(start + -start % _ALIGNMENT, self._sizes[profile_index])


class StepContext:
    """One execution context: of one profile, with its addresses bound."""

    def __init__(
        self,
        engine: Any,
        strategy: Any,  # ExecutionContextAllocationStrategy.USER_MANAGED of the engine's module
        profile_index: int,
        activations: Activations,
        stream: Stream,
    ) -> None:
        """Raises CapacityError when TensorRT makes no context."""
        self._context = engine.create_execution_context(strategy)
        if self._context is None:
            hint = "Free memory of the GPU, or build with a smaller max_batch_size: every bucket of it has a context."
            raise CapacityError.about("TensorRT context", expected="one more", found="none", hint=hint)
        self._stream = stream
        if profile_index != 0:
            self._must(self._context.set_optimization_profile_async(profile_index, stream.cuda_stream), "profile")
        activations.give(self._context, profile_index)

    def bind(self, tensors: dict[str, Tensor]) -> None:
        """Addresses by name of the engine's tensor; they hold until they are bound anew."""
        for name, tensor in tensors.items():
            self._must(self._context.set_tensor_address(name, tensor.data_ptr()), f"address of {name}")

    def set_shapes(self, shapes: Shapes) -> None:
        """Shapes by name of the engine's input; they hold until others are set."""
        for name, shape in shapes.items():
            self._must(self._context.set_input_shape(name, shape), f"shape {shape} of {name}")

    def enqueue(self, shapes: Shapes) -> None:
        """One step, on the stream."""
        self.set_shapes(shapes)
        self._must(self._context.execute_async_v3(self._stream.cuda_stream), "enqueue")

    def _must(self, is_done: bool, what: str) -> None:
        assert is_done, f"TensorRT refused the {what}, which the limits of the engine allow"


class StepContexts:
    """Contexts of an engine: one per shape of `captured`, and one per profile for steps without a graph."""

    def __init__(
        self, engine: Any, strategy: Any, stream: Stream, *, captured: Iterable[StepShape], device: torch.device
    ) -> None:
        """Raises CapacityError when the device has no room for them."""
        self.activations = Activations(engine, device=device)

        def make(profile_index: int) -> StepContext:
            return StepContext(engine, strategy, profile_index, self.activations, stream)

        # In the order the builder adds them: that of decode steps, if there is one, before that of mixed steps.
        self._by_profile = [make(index) for index in range(engine.num_optimization_profiles)]
        self._by_shape = {shape: make(0) for shape in captured}

    def of(self, shape: StepShape) -> StepContext:
        return self._by_shape.get(shape) or self._by_profile[0 if shape.is_decode else -1]

    @property
    def captured(self) -> list[StepShape]:
        return list(self._by_shape)

    def bind(self, tensors: dict[str, Tensor]) -> None:
        for context in (*self._by_profile, *self._by_shape.values()):
            context.bind(tensors)

    def set_shapes(self, shapes: Shapes) -> None:
        """Shapes of inputs that have the same in every step."""
        for context in (*self._by_profile, *self._by_shape.values()):
            context.set_shapes(shapes)
