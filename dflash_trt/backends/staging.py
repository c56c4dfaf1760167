"""Memory through which a step's inputs reach a device and its results come back, allocated once.

Inputs are packed on the host into one pinned block, copied without waiting, and read at addresses that never change,
so that CUDA graphs stay valid and TensorRT binds them once. Results lie side by side, so that one copy brings them.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.backends.padding import StepShape, largest_shape, max_pages_per_request
from dflash_trt.backends.step_inputs import InputBlock, StepPacker, step_result
from dflash_trt.core.batch import ExecutorLimits, StepBatch, StepResult
from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.step_spec import STEP_OUTPUTS, StepTensor
from dflash_trt.network.ops import Acceptance, StepInputs
from dflash_trt.network.step import StepOutputs

_BONUS: Final = StepTensor("bonus_tokens", "int32", ("R",), "the last emitted token: what samplers write besides")
_GRAIN: Final = 4  # elements, all of 4 bytes: sections begin at multiples of 16 bytes


class InputStaging:
    """The inputs of `core/step_spec.STEP_INPUTS`, on the host and on the device. See StepPacker for `scratch_page`."""

    def __init__(self, limits: ExecutorLimits, device: torch.device, *, scratch_page: int | None = None) -> None:
        max_pages = max_pages_per_request(limits)
        self._packer = StepPacker.of_limits(limits, scratch_page=scratch_page, is_pinned=device.type == "cuda")
        self._device = InputBlock(largest_shape(limits), max_pages=max_pages, device=device)
        self._copied = _new_event(device)

    @property
    def device_tensors(self) -> Mapping[str, Tensor]:
        """Flat, at their largest, by name; a step uses the first elements of each."""
        return self._device.flat

    def stage(self, batch: StepBatch, shape: StepShape) -> None:
        """Fill the host's block, when the copy of the step before is over."""
        if self._copied is not None and not self._copied.query():  # a step whose results were read is over
            self._copied.synchronize()
        self._packer.pack(batch, shape)

    def upload(self, shape: StepShape) -> None:
        """Copy to the device, on the current stream, without waiting."""
        self._device.used(shape).copy_(self._packer.host.used(shape), non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def inputs(self, shape: StepShape) -> StepInputs[Tensor]:
        """The device's tensors in the shapes of a step; the same addresses every time."""
        return self._device.inputs(shape)


class ResultStaging:
    """The outputs of a step, side by side in one block, so that one copy brings them to the host."""

    def __init__(self, limits: ExecutorLimits, device: torch.device) -> None:
        self._sections = _sections(largest_shape(limits))
        size = self._sections[-1][2]
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._copied = _new_event(device)

    @property
    def device_tensors(self) -> Mapping[str, Tensor]:
        """Flat, at their largest, by name; a step uses the first elements of each."""
        return {tensor.name: self._device[start:end] for tensor, start, end in self._sections}

    def outputs(self, shape: StepShape) -> tuple[Acceptance[Tensor], Tensor]:
        """Where sampling writes, and where the drafts go, int32 [R, K]; the same addresses for every shape."""
        return self._views(self._device, shape)

    def download(self) -> None:
        """Copy to the host, on the current stream, without waiting."""
        self._host.copy_(self._device, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def read(self, shape: StepShape, *, num_requests: int, has_drafts: bool | None = None) -> StepResult:
        """Wait for the copy; the first `num_requests` requests, which are not padding.

        `has_drafts` false leaves out the drafts of a step that makes more than were asked for.
        """
        if self._copied is not None:
            self._copied.synchronize()
        outputs, drafts = self._views(self._host, shape)
        real = {name: getattr(outputs, name)[:num_requests] for name in Acceptance.__dataclass_fields__}
        has_drafts = shape.num_draft_tokens > 0 if has_drafts is None else has_drafts
        return step_result(
            StepOutputs(acceptance=Acceptance(**real), draft_tokens=drafts[:num_requests] if has_drafts else None)
        )

    def _views(self, block: Tensor, shape: StepShape) -> tuple[Acceptance[Tensor], Tensor]:
        sizes, views = shape.sizes(max_pages=0), {}
        for tensor, start, _ in self._sections:
            section = block[start : start + tensor.num_elements(sizes)]
            views[tensor.name] = section.view(torch_dtype(tensor.dtype)).view(tensor.extents(sizes))
        drafts = views.pop("draft_tokens")
        return Acceptance(**views), drafts


def _new_event(device: torch.device) -> Any:
    """None on a CPU, where a copy is over when it returns. `record` uses the current stream."""
    make_event: Any = torch.cuda.Event  # untyped in PyTorch
    return make_event() if device.type == "cuda" else None


def _sections(shape: StepShape) -> list[tuple[StepTensor, int, int]]:
    """(tensor, start, end) of each output, in elements of 4 bytes."""
    tensors = (*STEP_OUTPUTS, _BONUS)
    sizes = shape.sizes(max_pages=0)
    ends = list(accumulate(-(-tensor.num_elements(sizes) // _GRAIN) * _GRAIN for tensor in tensors))
    return list(zip(tensors, [0, *ends], ends, strict=False))
