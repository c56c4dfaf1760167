"""Memory through which a step's inputs reach a device and its results come back, allocated once.

Plans are packed on the host into pinned blocks, copied without waiting, and read at addresses that never change, so
that CUDA graphs stay valid and TensorRT binds them once. Results lie side by side, so that one copy brings them. Host
blocks take turns: one step is packed and another one read while a third runs.
"""

from collections.abc import Mapping
from itertools import cycle
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from dflash_trt.backends.padding import StepShape
from dflash_trt.backends.slots import DeviceSlots, PlanInputs
from dflash_trt.backends.step_inputs import StepPacker, TensorBlock, bind_inputs, step_result, updated_entries
from dflash_trt.core.step_plan import ExecutorLimits, StepPlan, StepResult, StepRows
from dflash_trt.core.step_spec import ASSEMBLED, DRAFT_CONFIDENCE, PLAN_INPUTS, STEP_INPUTS, STEP_OUTPUTS, StepTensor
from dflash_trt.network.ops import Acceptance, StepInputs
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.step import StepOutputs

_BONUS: Final = StepTensor("bonus_tokens", "int32", ("R",), "the last emitted token: what samplers write besides")
_NUM_HOST_BLOCKS: Final = 3


class InputStaging:
    """Plans on the host and on the device, the slots, and the inputs that are assembled from both."""

    def __init__(self, limits: ExecutorLimits, device: torch.device) -> None:
        self._limits = limits
        is_pinned = device.type == "cuda"
        self._hosts = cycle([_HostBlock(limits, device, is_pinned=is_pinned) for _ in range(_NUM_HOST_BLOCKS)])
        self._host = next(self._hosts)
        assembled = [tensor for tensor in STEP_INPUTS if tensor.name in ASSEMBLED]
        self._plan = TensorBlock(PLAN_INPUTS, limits, device=device)
        self._assembled = TensorBlock(assembled, limits, device=device)
        self._entries = torch.zeros(self._host.entries.shape, dtype=torch.int64, device=device)
        self._page_ids = torch.zeros(self._host.page_ids.shape, dtype=torch.int32, device=device)
        self.slots = DeviceSlots(limits, device=device)
        self._uploaded: tuple[StepRows, StepShape] | None = None  # and what they were padded to
        self._is_new, self._num_updates = False, 0

    @property
    def device_tensors(self) -> Mapping[str, Tensor]:
        """The step's inputs, flat, at their largest, by name; a step uses the first elements of each."""
        return self._plan.flat | self._assembled.flat

    @property
    def device_bytes(self) -> int:
        """Memory that it takes on the device."""
        updates = (self._entries, self._page_ids)
        return sum(
            tensor.nbytes for tensor in (self._plan.memory, self._assembled.memory, *updates, *self.slots.tensors)
        )

    def stage(self, plan: StepPlan, shape: StepShape) -> None:
        """Fill the next host block, when the copy of the step that used it is over.

        Rows that repeat are on the device already.
        """
        updates, key = plan.page_updates, (plan.rows, shape)
        self._is_new, self._num_updates = key != self._uploaded, len(updates.slots)
        if not self._is_new and not self._num_updates:
            return
        self._uploaded, self._host = key, next(self._hosts)
        self._host.wait()
        if self._is_new:
            self._host.packer.pack(plan.rows, shape)
        if self._num_updates:
            self._host.entries.numpy()[: self._num_updates] = updated_entries(updates, self._limits)
            self._host.page_ids.numpy()[: self._num_updates] = updates.page_ids

    def upload(self) -> None:
        """Copy what is new to the device and update its page table, on the current stream, without waiting."""
        host, count = self._host, self._num_updates
        if self._is_new:
            self._plan.memory.copy_(host.packer.block.memory, non_blocking=True)
        if count:
            entries, page_ids = self._entries[:count], self._page_ids[:count]
            entries.copy_(host.entries[:count], non_blocking=True)
            page_ids.copy_(host.page_ids[:count], non_blocking=True)
            self.slots.update_pages(entries, page_ids)
        if host.copied is not None and (self._is_new or count):
            host.copied.record()

    def inputs(self, shape: StepShape) -> StepInputs[Tensor]:
        """The device's tensors in the shapes of a step; the same addresses every time."""
        return bind_inputs(self._plan.views(shape), self._assembled.views(shape))

    def assemble(self, shape: StepShape, page_tables: Tensor | None = None) -> None:
        """First part of a step on the device: fill inputs that depend on slots; see `DeviceSlots.assemble`."""
        self.slots.assemble(self.plan_inputs(shape), self.inputs(shape), page_tables)

    def plan_inputs(self, shape: StepShape) -> PlanInputs:
        """The device's copy of the plan."""
        return PlanInputs(**self._plan.views(shape))

    def store(
        self, shape: StepShape, bonus_tokens: Tensor, proposal: Proposal[Tensor] | None, context_lens: Tensor
    ) -> None:
        """The last part of a step on the device."""
        self.slots.store(self._plan.views(shape)["slot_ids"], bonus_tokens, proposal, context_lens)


class _HostBlock:
    """One step's inputs on the host."""

    def __init__(self, limits: ExecutorLimits, device: torch.device, *, is_pinned: bool) -> None:
        self.packer = StepPacker(limits, is_pinned=is_pinned)
        num_entries = limits.max_batch_size * limits.table_width
        self.entries = torch.zeros(num_entries, dtype=torch.int64, pin_memory=is_pinned)
        self.page_ids = torch.zeros(num_entries, dtype=torch.int32, pin_memory=is_pinned)
        self.copied = _new_event(device)

    def wait(self) -> None:
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()


class ResultStaging:
    """The outputs of a step, side by side in one block, so that one copy brings them to the host."""

    def __init__(self, limits: ExecutorLimits, device: torch.device) -> None:
        confidence = (DRAFT_CONFIDENCE,) if limits.has_draft_confidence else ()
        tensors = (*STEP_OUTPUTS, _BONUS, *confidence)
        self._device = TensorBlock(tensors, limits, device=device)
        is_pinned = device.type == "cuda"
        self._hosts = cycle([
            (TensorBlock(tensors, limits, is_pinned=is_pinned), _new_event(device, has_timing=True))
            for _ in range(_NUM_HOST_BLOCKS)
        ])  # fmt: skip

    @property
    def device_tensors(self) -> Mapping[str, Tensor]:
        """Flat, at their largest, by name; a step uses the first elements of each."""
        return self._device.flat

    @property
    def device_bytes(self) -> int:
        """Memory that it takes on the device."""
        return self._device.memory.nbytes

    def outputs(self, shape: StepShape) -> tuple[Acceptance[Tensor], Proposal[Tensor]]:
        """Destinations of sampling and of the drafts; the same addresses for every shape."""
        return _result_views(self._device, shape)

    def download(self, shape: StepShape, *, num_requests: int, has_drafts: bool) -> "StagedResult":
        """Copy to the host, on the current stream, without waiting.

        `num_requests` are not padding. `has_drafts` false leaves out the drafts of a step that makes more than were
        asked for.
        """
        host, copied = next(self._hosts)
        host.memory.copy_(self._device.memory, non_blocking=True)
        if copied is not None:
            copied.record()
        acceptance, drafts = _result_views(host, shape)
        real = {name: getattr(acceptance, name)[:num_requests] for name in Acceptance.__dataclass_fields__}
        confidence = None if drafts.confidence is None else drafts.confidence[:num_requests]
        proposal = Proposal(tokens=drafts.tokens[:num_requests], confidence=confidence) if has_drafts else None
        outputs = StepOutputs(acceptance=Acceptance(**real), proposal=proposal)
        return StagedResult(outputs, copied)


class StagedResult:
    """A result on its way to the host; read it before two more steps are submitted."""

    def __init__(self, outputs: StepOutputs[Tensor], copied: Any) -> None:
        self._outputs = outputs
        self.copied = copied

    def read(self) -> StepResult:
        """Wait for the copy."""
        if self.copied is not None:
            self.copied.synchronize()
        return step_result(self._outputs)


class ResultReader(Protocol):
    """Holds parts of a result that are still on the device."""

    def added_to(self, result: StepResult) -> StepResult: ...


class StagedStep:
    """A step on a device's stream; implements StepHandle. `started` was recorded before it."""

    def __init__(self, result: StagedResult, started: Any, *, reader: ResultReader | None = None) -> None:
        self._staged = result
        self._started = started
        self._reader = reader

    def result(self) -> StepResult:
        result = self._staged.read()
        return result if self._reader is None else self._reader.added_to(result)

    @property
    def elapsed_s(self) -> float:
        if self._started is None:
            return 0.0
        milliseconds: float = self._started.elapsed_time(self._staged.copied)
        return milliseconds / 1e3


class CopiedStep:
    """A step without rows; implements StepHandle. Both events are on its stream, or None on a CPU."""

    def __init__(self, started: Any, copied: Any) -> None:
        self._started = started
        self._copied = copied

    def result(self) -> StepResult:
        if self._copied is not None:
            self._copied.synchronize()
        return StepResult.of_no_rows()

    @property
    def elapsed_s(self) -> float:
        return 0.0 if self._started is None else float(self._started.elapsed_time(self._copied)) / 1e3


def new_timer(device: torch.device) -> Any:
    """An event that is recorded at the start of a step; None on a CPU."""
    event = _new_event(device, has_timing=True)
    if event is not None:
        event.record()
    return event


def _new_event(device: torch.device, *, has_timing: bool = False) -> Any:
    """None on a CPU, where a copy is over when it returns. `record` uses the current stream."""
    make_event: Any = torch.cuda.Event  # untyped in PyTorch
    return make_event(enable_timing=has_timing) if device.type == "cuda" else None


def _result_views(block: TensorBlock, shape: StepShape) -> tuple[Acceptance[Tensor], Proposal[Tensor]]:
    views = block.views(shape)
    drafts = Proposal(tokens=views.pop("draft_tokens"), confidence=views.pop(DRAFT_CONFIDENCE.name, None))
    return Acceptance(**views), drafts
