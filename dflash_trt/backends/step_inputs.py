"""Packs a StepPlan into a step's input tensors, and unpacks output tensors into a StepResult.

The packer writes arrays into memory that is allocated once. It knows `PLAN_INPUTS` and no tensor's use; `padding.py`
decides the shape that a plan is padded to, and `slots.py` makes the step's own inputs from it.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.padding import StepShape, exact_shape, largest_shape
from dflash_trt.backends.slots import DeviceSlots, PlanInputs
from dflash_trt.core.array import Array
from dflash_trt.core.batch import StepBatch, plan_of
from dflash_trt.core.dtype import num_bytes_of, torch_dtype
from dflash_trt.core.step_plan import (
    CHAINED,
    ExecutorLimits,
    JointRows,
    PageUpdates,
    PageWindow,
    StepPlan,
    StepResult,
    StepRows,
)
from dflash_trt.core.step_spec import ASSEMBLED, PLAN_INPUTS, STEP_INPUTS, StepTensor
from dflash_trt.network.ops import StepInputs
from dflash_trt.network.step import StepOutputs

_ALIGNMENT_BYTES = 256


def check_plan(plan: StepPlan, limits: ExecutorLimits) -> None:
    """Assert what the scheduler guarantees."""
    rows = plan.rows
    assert len(plan.page_copies) or rows.num_requests or plan.joint is not None, "nothing to do"
    assert rows.num_requests <= limits.max_batch_size
    assert rows.total_tokens == rows.num_tokens.sum() <= limits.max_num_tokens
    assert rows.num_draft_tokens <= limits.max_draft_len
    assert (rows.num_tokens > 0).all() and (rows.num_candidates < rows.num_tokens).all()
    assert (rows.num_candidates <= rows.num_draft_tokens).all()
    is_chained = rows.context_lens == CHAINED
    assert (rows.num_tokens[is_chained] == rows.num_candidates[is_chained] + 1).all()
    ends = (rows.context_lens + rows.num_tokens)[~is_chained]
    assert (ends <= min(limits.max_positions, plan.num_pages * limits.page_size)).all()
    assert plan.num_pages <= limits.max_pages


class StepShapes:
    """The shapes of plans; rows that repeat are checked and shaped once."""

    def __init__(self, limits: ExecutorLimits, shape_of: Callable[[StepPlan, ExecutorLimits], StepShape]) -> None:
        self._limits = limits
        self._shape_of = shape_of
        self._key: tuple[StepRows, JointRows | None] | None = None
        self._shape: StepShape | None = None

    def of(self, plan: StepPlan) -> StepShape:
        """Asserts what the scheduler guarantees."""
        key = plan.rows, plan.joint
        if self._shape is None or key != self._key:
            check_plan(plan, self._limits)
            self._key, self._shape = key, self._shape_of(plan, self._limits)
        return self._shape


def step_inputs(batch: StepBatch, *, page_windows: tuple[PageWindow, ...] = ()) -> StepInputs[Tensor]:
    """A batch in memory of its own, unpadded."""
    num_pages = max((len(request.page_ids) for request in batch.requests), default=1)
    limits = ExecutorLimits(
        max_batch_size=len(batch.requests),
        max_seq_len=num_pages,
        max_num_tokens=batch.num_tokens,
        max_draft_len=batch.num_draft_tokens,
        page_size=1,
        num_pages=num_pages,
        page_windows=page_windows,
    )
    plan = plan_of(batch, max_pages=limits.max_pages)
    inputs = HostInputs(limits)
    return inputs.assemble(plan, exact_shape(plan), DeviceSlots(limits))


class TensorBlock:
    """Memory for step tensors at their largest, side by side in one block that one copy can fill."""

    def __init__(
        self,
        tensors: Sequence[StepTensor],
        limits: ExecutorLimits,
        *,
        device: torch.device | None = None,
        is_pinned: bool = False,
    ) -> None:
        self._tensors = tensors
        self._limits = {
            "max_pages": limits.max_pages,
            "num_page_groups": limits.num_page_groups,
            "draft_topk": limits.draft_topk,
        }
        axes = largest_shape(limits).sizes(**self._limits)
        sizes = [num_bytes_of(tensor.dtype) * tensor.num_elements(axes) for tensor in tensors]
        starts = [0, *accumulate(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes)]
        self.memory = torch.zeros(starts[-1], dtype=torch.uint8, device=device, pin_memory=is_pinned)
        self.flat = {
            tensor.name: self.memory[start : start + size].view(torch_dtype(tensor.dtype))
            for tensor, start, size in zip(tensors, starts, sizes, strict=False)
        }

    def views(self, shape: StepShape) -> dict[str, Tensor]:
        """The tensors in the shapes of a step; the same addresses every time."""
        sizes = shape.sizes(**self._limits)
        views = {}
        for tensor in self._tensors:
            view = self.flat[tensor.name][: tensor.num_elements(sizes)]
            views[tensor.name] = view if len(tensor.axes) == 1 else view.view(tensor.extents(sizes))
        return views


class StepPacker:
    """Writes plans into `block`, whose tensors hold the last packed plan.

    Padding requests have no tokens. Token rows after the requests' are of no request.
    """

    def __init__(self, limits: ExecutorLimits, *, is_pinned: bool = False) -> None:
        self.block = TensorBlock(PLAN_INPUTS, limits, is_pinned=is_pinned)
        self._columns = {name: flat.numpy() for name, flat in self.block.flat.items()}
        self._padding = {tensor.name: tensor.padding for tensor in PLAN_INPUTS}
        self._scratch_slot = limits.max_batch_size
        self._packed: tuple[StepRows, StepShape] | None = None

    def pack(self, rows: StepRows, shape: StepShape) -> None:
        """Overwrite the tensors of the rows before; the same rows are there already."""
        if (rows, shape) == self._packed:
            return
        self._packed = rows, shape
        num_requests, num_padding = shape.num_requests, shape.num_requests - rows.num_requests
        counts, num_candidates, offsets = rows.num_tokens, rows.num_candidates, rows.token_offsets
        if num_padding:
            nothing = np.zeros(num_padding, counts.dtype)
            counts, num_candidates = (np.concatenate((column, nothing)) for column in (counts, num_candidates))
            offsets = np.concatenate((offsets, offsets[-1] + nothing))
        last = offsets[1:] - 1
        logit_rows = np.minimum((last - num_candidates)[:, None] + np.arange(shape.width), last[:, None])
        if num_padding:
            logit_rows[rows.num_requests :] = 0
        self._write("slot_ids", rows.slot_ids, num_requests, padding=self._scratch_slot)
        self._write("token_rows", np.repeat(np.arange(num_requests), counts), shape.num_tokens, padding=num_requests)
        self._write("token_ids", rows.token_ids, shape.num_tokens)
        self._write("token_offsets", offsets, num_requests + 1)
        self._write("context_lens", rows.context_lens, num_requests)
        self._write("num_candidates", num_candidates, num_requests)
        self._write("logit_rows", logit_rows.ravel(), num_requests * shape.width)
        for name, column in rows.sampling.items():
            self._write(name, column, num_requests, padding=self._padding[name])

    def _write(self, name: str, values: Array, size: int, *, padding: float = 0) -> None:
        column = self._columns[name]
        column[: len(values)] = values
        if len(values) < size:
            column[len(values) : size] = padding


def updated_entries(updates: PageUpdates, limits: ExecutorLimits) -> Array:
    """Indices into the flat page table, int64 [D]."""
    entries: Array = updates.slots * limits.table_width + updates.columns
    return entries


class HostInputs:
    """The inputs of a step on a CPU, where the host's memory is the device's."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self._limits = limits
        self._packer = StepPacker(limits)
        assembled = [tensor for tensor in STEP_INPUTS if tensor.name in ASSEMBLED]
        self._assembled = TensorBlock(assembled, limits)
        self._shape: StepShape | None = None

    def assemble(self, plan: StepPlan, shape: StepShape, slots: DeviceSlots) -> StepInputs[Tensor]:
        """The inputs of a plan; overwritten by the next one."""
        packed, inputs = self.pack(plan, shape, slots)
        slots.assemble(packed, inputs)
        return inputs

    def pack(self, plan: StepPlan, shape: StepShape, slots: DeviceSlots) -> tuple[PlanInputs, StepInputs[Tensor]]:
        """The host's part of it, for `DeviceSlots.assemble`; the same tensors for the same shape as before."""
        updates = plan.page_updates
        if len(updates.slots):
            entries = torch.from_numpy(updated_entries(updates, self._limits))
            slots.update_pages(entries, torch.from_numpy(updates.page_ids.astype(np.int32)))
        self._packer.pack(plan.rows, shape)
        if shape != self._shape:
            packed = self._packer.block.views(shape)
            self._shape, self._plan_inputs = shape, PlanInputs(**packed)
            self._step_inputs = bind_inputs(packed, self._assembled.views(shape))
        return self._plan_inputs, self._step_inputs


def bind_inputs(packed: dict[str, Tensor], assembled: dict[str, Tensor]) -> StepInputs[Tensor]:
    """The step's own inputs: those that come as they are, and those that are assembled."""
    tensors: dict[str, Any] = {
        name: tensor for name, tensor in packed.items() if name not in ("slot_ids", "token_rows")
    }
    return StepInputs(**tensors | assembled)


def step_result(outputs: StepOutputs[Tensor]) -> StepResult:
    """Bring outputs to the host; arrays of their own."""
    acceptance, proposal = outputs.acceptance, outputs.proposal
    num_requests = len(acceptance.num_accepted)
    confidence = None if proposal is None else proposal.confidence
    return StepResult(
        emitted_tokens=_array(acceptance.emitted_tokens),
        emitted_logprobs=_array(acceptance.emitted_logprobs),
        num_accepted=_array(acceptance.num_accepted),
        next_context_lens=_array(acceptance.next_context_lens),
        draft_tokens=np.zeros((num_requests, 0), np.int32) if proposal is None else _array(proposal.tokens),
        draft_confidence=None if confidence is None else _array(confidence),
    )


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.numpy(force=True)
    return array.copy()
