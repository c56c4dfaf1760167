"""DSpark: DFlash's block, whose slots are drafted one after the other with logits that depend on the previous draft.

Definition: see `core/model/dspark.py`. The layers run once, over all slots; a slot of the walk costs two small products
and a choice of a token. The context is DFlash's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.dspark import DSparkHeads
from dflash_trt.network.decoder import TargetWeights, head_logits
from dflash_trt.network.drafters import dflash
from dflash_trt.network.ops import Acceptance, ExchangedRows, Linear, Ops, T
from dflash_trt.network.proposal import Proposal, joined
from dflash_trt.network.rank_tensors import RankTensors, parts_of
from dflash_trt.network.state import StepState


@dataclass(frozen=True, kw_only=True, slots=True)
class DSparkDrafter(dflash.DFlashDrafter[T]):
    """Observes as DFlash does."""

    heads: DSparkHeads
    previous: T  # W1, [V, r]
    bias: Linear[T]  # W2, [V or draft vocabulary, r]
    mixing: Linear[T] | None  # G or J; None for a vanilla head
    confidence: Linear[T] | None

    def propose(
        self, ops: Ops[T], acceptance: Acceptance[T], state: StepState[T], num_draft_tokens: int
    ) -> Proposal[T]:
        """Run the block, and walk through its slots from the anchor on."""
        from_anchor = self.heads.drafts_from_anchor
        blocks = ops.token_blocks(acceptance, fill=self.mask_token_id, drafts_from_anchor=from_anchor)
        slots = ExchangedRows(num_draft_tokens + (not from_anchor))
        hidden = ops.rms_norm(self.run_block(ops, blocks, state, slots), self.norm, self.spec.rms_norm_eps)
        drafting = hidden if from_anchor else ops.without_first(hidden)
        logits = head_logits(ops, drafting, self.lm_head, ExchangedRows(num_draft_tokens))
        embedded = ops.gather_rows(self.previous, acceptance.bonus_tokens)
        memory: T | None = None
        if self.heads.markov_type == "rnn" and not from_anchor:  # it also reads the anchor's slot
            _, memory = self._latent(ops, embedded, ops.slot_rows(hidden, 0), None)
        drafts, states, tokens = list[Proposal[T]](), list[T](), list[T]()
        for slot in range(num_draft_tokens):
            states.append(ops.slot_rows(drafting, slot))
            tokens.append(embedded)
            latent, memory = self._latent(ops, embedded, states[-1], memory)
            biased = ops.add(ops.slot_rows(logits, slot), ops.linear(latent, self.bias))
            options = {"draft_topk": self.spec.draft_topk, "first_slot": slot + 1}
            drafts.append(ops.draft_tokens(biased, acceptance, self.draft_to_target, **options))
            embedded = ops.gather_rows(self.previous, drafts[-1].tokens)
        proposal, confidence = joined(ops, drafts), self._confidence(ops, states, tokens)
        return proposal if confidence is None else replace(proposal, confidence=confidence)

    def _latent(self, ops: Ops[T], embedded: T, hidden: T, memory: T | None) -> tuple[T, T | None]:
        """m [R, r] and the next state of a slot, from W1[x] [R, r], h [R, H] and its state."""
        if self.mixing is None:
            return embedded, None
        if self.heads.markov_type == "gated":
            return ops.sigmoid_mul(embedded, ops.linear(ops.concat([hidden, embedded]), self.mixing)), None
        before = ops.scale(embedded, 0.0) if memory is None else memory
        mixed = ops.linear(ops.concat([before, embedded, hidden]), self.mixing)
        gate, candidate, output = ops.split(mixed, (self.heads.rank,) * 3)
        kept = ops.sigmoid_mul(before, gate)
        return ops.tanh(output), ops.add(kept, ops.sigmoid_mul(ops.tanh(candidate), ops.scale(gate, -1.0)))

    def _confidence(self, ops: Ops[T], states: Sequence[T], tokens: Sequence[T]) -> T | None:
        """float32 [R, K], of each slot's h and W1[x]."""
        if self.confidence is None:
            return None
        x = ops.stack_slots(states)
        if self.heads.confidence_reads_token:
            x = ops.concat([x, ops.stack_slots(tokens)])
        rows = ops.sigmoid(ops.linear(x, self.confidence))
        return ops.concat([ops.slot_rows(rows, slot) for slot in range(len(states))])


def bind(spec: DraftSpec, target: TargetWeights[T], tensors: RankTensors[T]) -> DSparkDrafter[T]:
    """Raises KeyError on a missing tensor."""
    assert spec.heads is not None
    mixing = {"vanilla": None, "gated": "draft.markov.gate", "rnn": "draft.markov.cell"}[spec.heads.markov_type]
    return DSparkDrafter(
        **parts_of(dflash.bind(spec, target, tensors)),
        heads=spec.heads,
        previous=tensors["draft.markov.previous.embedding"],
        bias=tensors.linear("draft.markov.bias"),
        mixing=None if mixing is None else tensors.linear(mixing),
        confidence=tensors.linear("draft.confidence") if spec.heads.has_confidence else None,
    )
