"""`DeviceSlots` in host memory, whose two ends of a step are a kernel each."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_trt.backends.slots import DeviceSlots, PlanInputs
from dflash_trt.backends.torch.native.library import Assemble, CpuKernels, Store
from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.network.ops import StepInputs
from dflash_trt.network.proposal import Proposal


class NativeSlots(DeviceSlots):
    """For plans without padding."""

    def __init__(self, limits: ExecutorLimits, kernels: CpuKernels) -> None:
        super().__init__(limits)
        self._kernels, self._num_groups, self._max_pages = kernels, limits.num_page_groups, limits.max_pages

    def assemble(self, plan: PlanInputs, inputs: StepInputs[Tensor], page_tables: Tensor | None = None) -> None:
        assert page_tables is None and plan.slot_ids.dtype == torch.int64
        topk_ids, topk_probs = inputs.draft_topk_ids, inputs.draft_topk_probs
        self._kernels.call(
            Assemble(
                len(inputs.context_lens),
                inputs.page_table.shape[1],
                self._num_groups,
                0 if topk_ids is None else topk_ids.shape[1],
                plan.slot_ids.data_ptr(),
                plan.token_offsets.data_ptr(),
                plan.context_lens.data_ptr(),
                plan.token_ids.data_ptr(),
                self.context_lens.data_ptr(),
                self.token_ids.data_ptr(),
                self.token_ids.shape[1],
                self.page_table.data_ptr(),
                self._max_pages,
                self.draft_topk_ids.data_ptr(),
                self.draft_topk_probs.data_ptr(),
                self.draft_topk_ids.shape[1],
                inputs.context_lens.data_ptr(),
                inputs.positions.data_ptr(),
                inputs.token_ids.data_ptr(),
                inputs.page_table.data_ptr(),
                None if topk_ids is None else topk_ids.data_ptr(),
                None if topk_probs is None else topk_probs.data_ptr(),
            )
        )

    def store(
        self, slot_ids: Tensor, bonus_tokens: Tensor, proposal: Proposal[Tensor] | None, next_context_lens: Tensor
    ) -> None:
        if proposal is not None and proposal.draft_topk_ids is not None:
            super().store(slot_ids, bonus_tokens, proposal, next_context_lens)
            return
        drafts = None if proposal is None else proposal.tokens.contiguous()
        given = (bonus_tokens, next_context_lens) if drafts is None else (bonus_tokens, next_context_lens, drafts)
        assert slot_ids.dtype == torch.int64 and all(x.dtype == torch.int32 and x.is_contiguous() for x in given)
        self._kernels.call(
            Store(
                len(slot_ids),
                0 if drafts is None else drafts.shape[1],
                slot_ids.data_ptr(),
                bonus_tokens.data_ptr(),
                None if drafts is None else drafts.data_ptr(),
                next_context_lens.data_ptr(),
                self.context_lens.data_ptr(),
                self.token_ids.data_ptr(),
                self.token_ids.shape[1],
            )
        )
