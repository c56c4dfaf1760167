"""DFlash: one pass over a block of masked tokens, which read the target's hidden states as K/V.

Definition: arXiv 2602.06036 and z-lab's reference implementation (PyPI `dflash`). Context K/V depend only on the taps,
so they are computed once per token, for all layers in one GEMM, and live in pages next to the target's.
"""

from dataclasses import dataclass
from itertools import accumulate

from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.network.decoder import (
    TargetRun,
    TargetWeights,
    bind_around_mixer,
    embedded,
    head_logits,
    last_of,
    rope_tables,
    run_layers,
)
from dflash_trt.network.drafters.base import DrafterWeights, DraftLayer, bind_attention, bind_weights
from dflash_trt.network.ops import Acceptance, ExchangedRows, KvDestination, Linear, Ops, T, TokenBlocks
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import StepState


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashDrafter(DrafterWeights[T]):
    """`embedding_scale` is the target's, too, unless the drafter brings its own embedding."""

    embedding_scale: float
    mask_token_id: int
    context_norm: T
    context_kv: Linear[T]  # [k_0; v_0; k_1; v_1; ...] rows of all layers
    layers: tuple[DraftLayer[T], ...]  # their [k; v] are slices of context_kv

    def observe(
        self, ops: Ops[T], token_ids: T, target: TargetRun[T], acceptance: Acceptance[T], state: StepState[T]
    ) -> None:
        """Write the context K/V of the accepted tokens, of all layers. No input layernorm."""
        eps = self.spec.rms_norm_eps
        fused = ops.rms_norm(ops.linear(ops.concat(target.taps), self.fc), self.context_norm, eps)
        ropes = rope_tables(ops, self.layers, target.rows)
        destinations = [
            KvDestination(cache=cache, k_norm=layer.mixer.k_norm, eps=eps, rope=rope)
            for layer, cache, rope in zip(self.layers, state.draft_kv, ropes, strict=True)
        ]
        ops.store_kv(ops.linear(fused, self.context_kv), destinations, target.rows, acceptance.next_context_lens)

    def propose(
        self, ops: Ops[T], acceptance: Acceptance[T], state: StepState[T], num_draft_tokens: int
    ) -> Proposal[T]:
        """Run the block [bonus, MASK x K] and take its tokens.

        Slot j predicts the token at its own position: there is no logit shift. Slot 0, the anchor, needs no logits.
        A positive output multiplier, which some drafters carry, keeps the order of the logits: a greedy draft does not
        need it. It is left out of sampled drafts, too, which costs acceptance and changes no distribution.
        """
        blocks = ops.token_blocks(acceptance, fill=self.mask_token_id)
        hidden = ops.without_first(self.run_block(ops, blocks, state, ExchangedRows(num_draft_tokens + 1)))
        hidden = ops.rms_norm(hidden, self.norm, self.spec.rms_norm_eps)
        logits = head_logits(ops, hidden, self.lm_head, ExchangedRows(num_draft_tokens))
        if self.spec.logit_softcap is not None:
            logits = ops.softcap(logits, self.spec.logit_softcap)
        return ops.draft_tokens(logits, acceptance, self.draft_to_target, draft_topk=self.spec.draft_topk)

    def run_block(self, ops: Ops[T], blocks: TokenBlocks[T], state: StepState[T], slots: ExchangedRows) -> T:
        """The output [R*S, H] of the last layer."""
        # No name keeps the first layer's input: it ends with that layer.
        outputs = run_layers(
            ops,
            self.spec,
            self.layers,
            self.embedded_slots(ops, blocks, slots),
            blocks.rows,
            state.draft_kv,
            exchanged=slots,
        )
        return last_of(outputs)

    def embedded_slots(self, ops: Ops[T], blocks: TokenBlocks[T], slots: ExchangedRows) -> T:
        """The input of the first layer."""
        hidden = embedded(ops, self.embedding, blocks.token_ids, self.embedding_scale, slots)
        return ops.scale(hidden, self.spec.input_embedding_scale)


def bind(spec: DraftSpec, target: TargetWeights[T], tensors: RankTensors[T]) -> DFlashDrafter[T]:
    """Raises KeyError on a missing tensor."""
    assert spec.mask_token_id is not None
    context_kv = tensors.linear("draft.kv")
    ends = list(accumulate(2 * gqa.shard(tensors.mapping).kv_size for gqa in spec.attentions))
    kvs = (tensors.rows_of(context_kv, start, stop) for start, stop in zip([0, *ends], ends, strict=False))
    layers = tuple(
        DraftLayer(mixer=bind_attention(spec, tensors, i, kv), **bind_around_mixer(tensors, spec, i))
        for i, kv in enumerate(kvs)
    )
    return DFlashDrafter(
        **bind_weights(spec, target, tensors),
        embedding_scale=1.0 if spec.has_own_embedding else target.embedding_scale,
        mask_token_id=spec.mask_token_id,
        context_norm=tensors["draft.context_norm"],
        context_kv=context_kv,
        layers=layers,
    )
