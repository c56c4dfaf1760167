"""Drafters' ops over the GPU kernels: token blocks, features in pages, and the selection of drafts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_trt.backends.cuda.handles import Value, rows_of, tensor_of
from dflash_trt.kernels import sampling_launch, selector_launch
from dflash_trt.kernels.paged_rows_launch import last_rows, previous_rows
from dflash_trt.network.ops import Acceptance, Codebooks, Rows, StepInputs, TokenBlocks
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.state import RowCache


class DrafterOps:
    """A part of `Ops[Value]`, for one step."""

    def __init__(self, inputs: StepInputs[Tensor], *, num_draft_tokens: int) -> None:
        self._inputs = inputs
        self._num_draft_tokens = num_draft_tokens

    def token_blocks(
        self, acceptance: Acceptance[Any], *, fill: int, drafts_from_anchor: bool = False
    ) -> TokenBlocks[Any]:
        return self._blocks(acceptance, fill=fill, width=self._num_draft_tokens + (not drafts_from_anchor))

    def chain_blocks(self, acceptance: Acceptance[Any], drafts: Sequence[Value]) -> TokenBlocks[Any]:
        blocks = self._blocks(acceptance, fill=0, width=len(drafts) + 1)
        if drafts:
            token_ids = torch.cat([acceptance.bonus_tokens[:, None], *(tensor_of(draft) for draft in drafts)], dim=1)
            blocks = TokenBlocks(token_ids=token_ids.flatten(), rows=blocks.rows)
        return blocks

    def _blocks(self, acceptance: Acceptance[Any], *, fill: int, width: int) -> TokenBlocks[Any]:
        inputs, starts = self._inputs, acceptance.next_context_lens
        shape = (len(acceptance.bonus_tokens), width)
        token_ids, positions = (torch.empty(shape, dtype=torch.int32, device=starts.device) for _ in range(2))
        sampling_launch.draft_block(acceptance.bonus_tokens, starts, token_ids, positions, mask_token_id=fill)
        rows = rows_of(positions.flatten(), inputs.token_offsets, starts, inputs.page_table, keeps_kv=False)
        return TokenBlocks(token_ids=token_ids.flatten(), rows=rows)

    def previous_rows(self, x: Value, rows: Rows[Any], cache: RowCache[Any]) -> Tensor:
        assert rows.keeps_kv, "only the step's own tokens have rows in pages"
        return previous_rows(tensor_of(x), cache.tensor, rows.index[0].requests, rows.positions)

    def context_rows(self, cache: RowCache[Any], acceptance: Acceptance[Any]) -> Tensor:
        starts = acceptance.next_context_lens
        table = self._inputs.page_table
        first = table.view(-1, len(starts), table.shape[-1])[0]  # features are never windowed
        return last_rows(cache.tensor, first, starts)

    def stack_slots(self, slots: Sequence[Value]) -> Tensor:
        return torch.stack([tensor_of(slot) for slot in slots], dim=1).flatten(0, 1)

    def last_slot(self, x: Value, num_slots: int) -> Tensor:
        rows = tensor_of(x)
        return rows.view(-1, num_slots, rows.shape[-1])[:, -1].contiguous()

    def slot_rows(self, x: Value, slot: int) -> Tensor:
        rows = tensor_of(x)
        return rows.reshape(len(self._inputs.context_lens), -1, rows.shape[-1])[:, slot]

    def without_first(self, hidden: Value) -> Tensor:
        x = tensor_of(hidden)
        blocks = x.view(-1, self._num_draft_tokens + 1, x.shape[-1])
        return blocks[:, 1:].reshape(-1, x.shape[-1])

    def draft_tokens(
        self,
        logits: Value,
        acceptance: Acceptance[Any],
        draft_to_target: Value | None,
        *,
        draft_topk: int,
        first_slot: int = 1,
    ) -> Proposal[Any]:
        inputs, mapped = self._inputs, None if draft_to_target is None else tensor_of(draft_to_target)
        starts = acceptance.next_context_lens if first_slot == 1 else acceptance.next_context_lens + (first_slot - 1)
        tokens, draft_topk_ids, draft_topk_probs = sampling_launch.draft_tokens(
            tensor_of(logits),
            inputs.temperature,
            inputs.seed,
            inputs.draft_stream,
            starts,
            mapped,
            draft_topk=draft_topk,
        )
        return Proposal(tokens=tokens, draft_topk_ids=draft_topk_ids, draft_topk_probs=draft_topk_probs)

    def block_conv(self, x: Value, filters: Value, base: Value) -> Tensor:
        num_slots = self._num_draft_tokens + 1
        return selector_launch.block_conv(tensor_of(x), tensor_of(filters), tensor_of(base), num_slots=num_slots)

    def select_tokens(
        self, logits: Value, hidden: Value, codebooks: Codebooks[Any], acceptance: Acceptance[Any]
    ) -> Proposal[Any]:
        inputs, starts = self._inputs, acceptance.next_context_lens
        tokens, draft_topk_ids, draft_topk_probs = selector_launch.select_tokens(
            tensor_of(logits),
            tensor_of(hidden),
            (tensor_of(codebooks.predecessor), tensor_of(codebooks.successor)),
            (acceptance.bonus_tokens, inputs.temperature, inputs.seed, inputs.draft_stream, starts),
            top_k=codebooks.top_k,
        )
        return Proposal(tokens=tokens, draft_topk_ids=draft_topk_ids, draft_topk_probs=draft_topk_probs)
