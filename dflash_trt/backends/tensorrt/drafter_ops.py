"""The ops of drafters: blocks of tokens, features in pages, and the choice of drafts."""

from collections.abc import Sequence

from dflash_trt.backends.tensorrt.dflash2_ops import block_conv, select_tokens, slot_index, times
from dflash_trt.backends.tensorrt.layers import Dim, Handle, ITensor, Layers
from dflash_trt.backends.tensorrt.plugins import PluginLowering
from dflash_trt.network.ops import Acceptance, Codebooks, Rows, StepInputs, TokenBlocks
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.state import RowCache


class DrafterOps:
    """A part of `Ops[Handle]`, for one network.

    Drafts that are made one by one are unrolled for the largest K: the passes of a chain, the walk of DSpark. A step of
    a smaller K makes them all and uses the first ones.
    """

    def __init__(
        self, layers: Layers, inputs: StepInputs[ITensor], lowering: PluginLowering, *, max_draft_len: int
    ) -> None:
        self._layers = layers
        self._inputs = inputs
        self._lowering = lowering
        self._max_draft_len = max_draft_len
        self._is_unrolled = False  # if drafts are made one by one
        self._features: dict[str, ITensor] = {}  # features of the step's tokens, [T, H], by state name

    def block_conv(self, x: ITensor, filters: ITensor, base: Handle) -> ITensor:
        rows, layers = self._inputs.logit_rows, self._layers
        num_requests, num_slots = layers.dim(rows, 0), layers.dim(rows, 1)
        return block_conv(layers, x, filters, base, num_requests=num_requests, num_slots=num_slots)

    def select_tokens(
        self, logits: ITensor, hidden: ITensor, codebooks: Codebooks[Handle], acceptance: Acceptance[ITensor]
    ) -> Proposal[ITensor]:
        num_slots, max_slots = num_drafts(self._layers, self._inputs), self._max_draft_len
        return select_tokens(
            self._layers, logits, hidden, codebooks, acceptance, self._inputs, num_slots=num_slots, max_slots=max_slots
        )

    def without_first(self, hidden: ITensor) -> ITensor:
        layers = self._layers
        width, size = layers.dim(self._inputs.logit_rows, 1), hidden.shape[-1]
        blocks = layers.reshape(hidden, (-1, width, size))
        return layers.reshape(layers.drop_ends(blocks, 1, first=1, last=0), (-1, size))

    def chain_blocks(self, acceptance: Acceptance[ITensor], drafts: Sequence[ITensor]) -> TokenBlocks[ITensor]:
        self._is_unrolled = True
        return chain_blocks(self._layers, acceptance, drafts, self._inputs.page_table)

    def previous_rows(self, x: ITensor, rows: Rows[ITensor], cache: RowCache[ITensor]) -> ITensor:
        assert rows.keeps_kv, "only the step's own tokens have rows in pages"
        self._features[cache.spec.name] = x
        return self._lowering.previous_rows(x, cache)

    def context_rows(self, cache: RowCache[ITensor], acceptance: Acceptance[ITensor]) -> ITensor:
        return accepted_rows(self._layers, self._features[cache.spec.name], acceptance, self._inputs)

    def stack_slots(self, slots: Sequence[ITensor]) -> ITensor:
        layers, width = self._layers, slots[0].shape[-1]
        return layers.reshape(layers.concat([layers.reshape(slot, (-1, 1, width)) for slot in slots], 1), (-1, width))

    def last_slot(self, x: ITensor, num_slots: int) -> ITensor:
        layers, width = self._layers, x.shape[-1]
        blocks = layers.reshape(x, (-1, num_slots, width))
        return layers.reshape(layers.slice(blocks, 1, num_slots - 1, 1), (-1, width))

    def slot_rows(self, x: ITensor, slot: int) -> ITensor:
        self._is_unrolled = True
        layers, width = self._layers, x.shape[-1]
        blocks = layers.reshape(x, (layers.dim(self._inputs.logit_rows, 0), -1, width))
        index = slot_index(layers, slot, layers.dim(blocks, 1))
        return layers.reshape(layers.gather(blocks, index, 1), (-1, width))

    def draft_tokens(
        self,
        logits: ITensor,
        acceptance: Acceptance[ITensor],
        draft_to_target: Handle | None,
        *,
        draft_topk: int,
        first_slot: int = 1,
    ) -> Proposal[ITensor]:
        layers, starts = self._layers, acceptance.next_context_lens
        if first_slot > 1:
            starts = layers.binary("SUM", starts, first_slot - 1)
        targets = None if draft_to_target is None else layers.tensor(draft_to_target)
        num_slots = 1 if self._is_unrolled else num_drafts(layers, self._inputs)
        return self._lowering.draft_tokens(logits, starts, targets, num_slots, draft_topk=draft_topk)

    def of_this_step(self, proposal: Proposal[ITensor]) -> Proposal[ITensor]:
        """As many drafts as its K."""
        if not self._is_unrolled:
            return proposal
        assert proposal.draft_topk_ids is not None and proposal.draft_topk_probs is not None, (
            "drafts of this backend have them"
        )
        layers, num_slots = self._layers, num_drafts(self._layers, self._inputs)
        num_probs = times(layers, num_slots, proposal.draft_topk_ids.shape[1] // self._max_draft_len)
        return Proposal(
            tokens=layers.slice(proposal.tokens, 1, 0, num_slots),
            draft_topk_ids=layers.slice(proposal.draft_topk_ids, 1, 0, num_probs),
            draft_topk_probs=layers.slice(proposal.draft_topk_probs, 1, 0, num_probs),
            confidence=None if proposal.confidence is None else layers.slice(proposal.confidence, 1, 0, num_slots),
        )


def num_drafts(layers: Layers, inputs: StepInputs[ITensor]) -> Dim:
    """K."""
    width = layers.dim(inputs.logit_rows, 1)
    return width - 1 if isinstance(width, int) else layers.binary("SUB", width, 1)


def accepted_rows(
    layers: Layers,
    x: ITensor,  # F [T, H]
    acceptance: Acceptance[ITensor],
    inputs: StepInputs[ITensor],
) -> ITensor:
    """`Ops.context_rows`, F [R, H]: of the last accepted tokens. A request without tokens has some row."""
    starts = layers.drop_ends(inputs.token_offsets, 0, first=0, last=1)
    num_kept = layers.binary("SUB", acceptance.next_context_lens, inputs.context_lens)
    row = layers.binary("SUB", layers.binary("SUM", starts, num_kept), 1)
    return layers.gather(x, layers.binary("MAX", row, 0))


def chain_blocks(
    layers: Layers, acceptance: Acceptance[ITensor], drafts: Sequence[ITensor], page_table: ITensor
) -> TokenBlocks[ITensor]:
    """See `Ops.chain_blocks`."""
    tokens = [layers.reshape(acceptance.bonus_tokens, (-1, 1)), *drafts]
    starts = layers.reshape(acceptance.next_context_lens, (-1, 1))
    slots = layers.reshape(layers.arange(len(tokens)), (1, -1))
    rows = Rows(
        positions=layers.reshape(layers.binary("SUM", starts, slots), (-1,)),
        token_offsets=None,
        context_lens=acceptance.next_context_lens,
        page_table=page_table,
        keeps_kv=False,
    )
    return TokenBlocks(token_ids=layers.reshape(layers.concat(tokens, 1), (-1,)), rows=rows)
