"""The slots of requests on a device, and the two ends of a step that use them: assemble and store.

A step's decode rows are filled from here, so the host submits it without knowing what the step before it gave. All of
it is a few PyTorch operations at fixed addresses, which run on any device, and inside of a CUDA graph.

Snapshots of recurrent state are slots after the requests', filled and read by plain copies. The whole slot is copied,
records included, so a snapshot is valid whether the last row stored a folded state or records still to be folded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dflash_trt.backends.padding import StepShape
from dflash_trt.core.array import Array
from dflash_trt.core.sampling import SamplingColumns
from dflash_trt.core.step_plan import ExecutorLimits, StateCopies
from dflash_trt.network.ops import StepInputs
from dflash_trt.network.proposal import Proposal


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs(SamplingColumns[Tensor]):
    """The tensors of `core/step_spec.PLAN_INPUTS`, same names."""

    slot_ids: Tensor
    token_rows: Tensor
    token_ids: Tensor
    token_offsets: Tensor
    context_lens: Tensor
    logit_rows: Tensor
    num_candidates: Tensor


class DeviceSlots:
    """One slot for each request of the largest batch, and a last one for padding."""

    def __init__(self, limits: ExecutorLimits, *, device: torch.device | None = None) -> None:
        size = limits.max_batch_size + 1
        self.page_table = torch.zeros((size, limits.table_width), dtype=torch.int32, device=device)
        self._tables = self.page_table.view(size, limits.num_page_groups, limits.max_pages).transpose(0, 1)
        self.token_ids = torch.zeros(
            (size, limits.max_draft_len + 1), dtype=torch.int32, device=device
        )  # bonus, drafts
        draft_topk = limits.max_draft_len * limits.draft_topk
        self.draft_topk_ids = torch.zeros((size, draft_topk), dtype=torch.int32, device=device)
        self.draft_topk_probs = torch.zeros((size, draft_topk), dtype=torch.float32, device=device)
        self.context_lens = torch.zeros(size, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.page_table, self.token_ids, self.draft_topk_ids, self.draft_topk_probs, self.context_lens

    def update_pages(self, entries: Tensor, page_ids: Tensor) -> None:
        """Write page ids, int32 [D], to entries of the flat page table, int64 [D]."""
        self.page_table.view(-1).index_copy_(0, entries, page_ids)

    def assemble(
        self,
        plan: PlanInputs,
        inputs: StepInputs[Tensor],
        page_tables: Tensor | None = None,  # int32 [G, R, P], with any strides
    ) -> None:
        """Fill the assembled tensors of `inputs`: chained rows from their slots, the others from `plan`.

        `page_tables` are filled in place of the page table of `inputs`.
        """
        num_requests, num_pages = len(inputs.context_lens), inputs.page_table.shape[1]
        slots, is_given = plan.slot_ids, plan.context_lens >= 0
        torch.where(is_given, plan.context_lens, self.context_lens[slots], out=inputs.context_lens)
        by_group = inputs.page_table.view(-1, num_requests, num_pages) if page_tables is None else page_tables
        torch.index_select(self._tables[:, :, :num_pages], 1, slots, out=by_group)
        is_padding = plan.token_rows >= num_requests
        rows = plan.token_rows.clamp(max=num_requests - 1)
        index = torch.arange(len(rows), device=rows.device) - plan.token_offsets[rows]
        inputs.positions.copy_((inputs.context_lens[rows] + index).masked_fill_(is_padding, 0))
        stored = self.token_ids[slots[rows], index.clamp(min=0, max=self.token_ids.shape[1] - 1)]
        torch.where(is_given[rows] | is_padding, plan.token_ids, stored, out=inputs.token_ids)
        if inputs.draft_topk_ids is not None and inputs.draft_topk_probs is not None:
            draft_topk = inputs.draft_topk_ids.shape[1]
            torch.index_select(self.draft_topk_ids[:, :draft_topk], 0, slots, out=inputs.draft_topk_ids)
            torch.index_select(self.draft_topk_probs[:, :draft_topk], 0, slots, out=inputs.draft_topk_probs)
            inputs.draft_topk_probs.masked_fill_(is_given[:, None], 0.0)  # the host's drafts were not sampled

    def store(
        self,
        slot_ids: Tensor,  # int64 [R]
        bonus_tokens: Tensor,  # int32 [R]
        proposal: Proposal[Tensor] | None,
        next_context_lens: Tensor,  # int32 [R]
    ) -> None:
        """The last operation of a step: the inputs of the next chained rows."""
        self.token_ids[:, 0].index_copy_(0, slot_ids, bonus_tokens)
        if proposal is not None:
            self.token_ids[:, 1 : 1 + proposal.tokens.shape[1]].index_copy_(0, slot_ids, proposal.tokens)
            if proposal.draft_topk_ids is not None and proposal.draft_topk_probs is not None:
                draft_topk = proposal.draft_topk_ids.shape[1]
                self.draft_topk_ids[:, :draft_topk].index_copy_(0, slot_ids, proposal.draft_topk_ids)
                self.draft_topk_probs[:, :draft_topk].index_copy_(0, slot_ids, proposal.draft_topk_probs)
        self.context_lens.index_copy_(0, slot_ids, next_context_lens)


_ALIGNMENT: Final = 64  # entries, 256 bytes: what TensorRT asks of an input; kernels need 16


class PageTables:
    """Memory for the tables of all groups at their largest; a step uses the first R * P entries of each."""

    def __init__(self, limits: ExecutorLimits, *, device: torch.device) -> None:
        self._max_pages = limits.max_pages
        size = -(-limits.max_batch_size * limits.max_pages // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.zeros((limits.num_page_groups, size), dtype=torch.int32, device=device)

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """The memory of each group."""
        return self._memory.unbind()

    def views(self, shape: StepShape) -> Tensor:  # int32 [G, R, P]
        """Page tables of a step of this shape; the same addresses every time."""
        sizes = shape.sizes(max_pages=self._max_pages)
        rows, pages = sizes["R"], sizes["P"]
        return self._memory[:, : rows * pages].view(-1, rows, pages)


class SlotSnapshots:
    """Copies between slots, on the current stream of a GPU; snapshot i is slot `first_slot + i`."""

    def __init__(self, tensors: Sequence[Tensor], *, first_slot: int) -> None:
        """`tensors` have a row for each slot."""
        self._tensors = tensors
        self._first_slot = first_slot

    def restore(self, copies: StateCopies) -> None:
        """Fill slots from snapshots, before a step."""
        self._copy(copies.snapshots + self._first_slot, copies.slots)

    def save(self, copies: StateCopies) -> None:
        """Copy slots to snapshots, after a step."""
        self._copy(copies.slots, copies.snapshots + self._first_slot)

    def _copy(self, sources: Array, destinations: Array) -> None:
        if not len(sources):
            return
        device = self._tensors[0].device
        read, written = (upload(torch.from_numpy(slots), device) for slots in (sources, destinations))
        for tensor in self._tensors:
            tensor.index_copy_(0, written, tensor.index_select(0, read))


def upload(values: Tensor, device: torch.device | None) -> Tensor:
    """A copy on `device` that the host does not wait for: PyTorch keeps its pinned block until then.

    Returns `values` for a CPU (or None).
    """
    if device is None or device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)
