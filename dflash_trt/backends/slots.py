"""The slots of requests on a device, and the two ends of a step that use them: assemble and store.

A step's decode rows are filled from here, so the host submits it without knowing what the step before it gave. All of
it is a few PyTorch operations at fixed addresses, which run on any device, and inside of a CUDA graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_trt.core.sampling import SamplingColumns
from dflash_trt.core.step_plan import ExecutorLimits
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
    """One slot for each request of the largest batch, and a last one for padding.

    With a `scratch_page` that is padding's page of the first group, in groups with a window their blank page.
    """

    def __init__(
        self, limits: ExecutorLimits, *, device: torch.device | None = None, scratch_page: int | None = None
    ) -> None:
        size = limits.max_batch_size + 1
        self.page_table = torch.zeros((size, limits.table_width), dtype=torch.int32, device=device)
        self._tables = self.page_table.view(size, limits.num_page_groups, limits.max_pages).transpose(0, 1)
        if scratch_page is not None:  # entries without a page are never read, but may be gathered
            for table, filler in zip(self._tables, _scratch_pages(limits, scratch_page), strict=True):
                table.fill_(filler)
        self.token_ids = torch.zeros(
            (size, limits.max_draft_len + 1), dtype=torch.int32, device=device
        )  # bonus, drafts
        num_choices = limits.max_draft_len * limits.num_choices
        self.choices = torch.zeros((size, num_choices), dtype=torch.int32, device=device)
        self.chances = torch.zeros((size, num_choices), dtype=torch.float32, device=device)
        self.context_lens = torch.zeros(size, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.page_table, self.token_ids, self.choices, self.chances, self.context_lens

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
        if inputs.choices is not None and inputs.chances is not None:
            num_choices = inputs.choices.shape[1]
            torch.index_select(self.choices[:, :num_choices], 0, slots, out=inputs.choices)
            torch.index_select(self.chances[:, :num_choices], 0, slots, out=inputs.chances)
            inputs.chances.masked_fill_(is_given[:, None], 0.0)  # drafts that the host gave were not drawn

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
            if proposal.choices is not None and proposal.chances is not None:
                num_choices = proposal.choices.shape[1]
                self.choices[:, :num_choices].index_copy_(0, slot_ids, proposal.choices)
                self.chances[:, :num_choices].index_copy_(0, slot_ids, proposal.chances)
        self.context_lens.index_copy_(0, slot_ids, next_context_lens)


def _scratch_pages(limits: ExecutorLimits, scratch_page: int) -> list[int]:
    """Of every page group."""
    return [scratch_page, *(group.blank_page for group in limits.page_windows)]
