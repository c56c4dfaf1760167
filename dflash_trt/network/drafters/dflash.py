"""DFlash: one pass over a block of masked tokens, conditioned on the target's hidden states through K/V.

Definition: arXiv 2602.06036 and z-lab's reference implementation (PyPI `dflash`). Context K/V depend only on the
taps, so they are computed once per token, for all layers in one GEMM, and live in pages beside the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic

from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.network.decoder import Layer, TargetWeights, bind_layer, last_of, rope_tables, run_layers
from dflash_trt.network.ops import Acceptance, KvDestination, Linear, Ops, Rows, T, TokenBlocks
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import StepState


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashDrafter(Generic[T]):
    """`embedding`, with its scale, and `lm_head` are the target's unless the drafter brings its own."""

    spec: DraftSpec
    embedding: T
    embedding_scale: float
    fc: Linear[T]
    context_norm: T
    context_kv: Linear[T]  # [k_0; v_0; k_1; v_1; ...] rows of all layers
    layers: tuple[Layer[T], ...]  # their [k; v] are slices of context_kv
    norm: T
    lm_head: Linear[T]
    draft_to_target: T | None

    @property
    def tap_layer_ids(self) -> Sequence[int]:
        return self.spec.target_layer_ids

    def observe(
        self,
        ops: Ops[T],
        token_ids: T,
        taps: Sequence[T],
        rows: Rows[T],
        acceptance: Acceptance[T],
        state: StepState[T],
    ) -> None:
        """Write the context K/V of the accepted tokens, of all layers. No input layernorm."""
        eps = self.spec.rms_norm_eps
        fused = ops.rms_norm(ops.linear(ops.concat(taps), self.fc), self.context_norm, eps)
        ropes = rope_tables(ops, self.layers, rows)
        destinations = [
            KvDestination(cache=cache, k_norm=layer.attention.k_norm, eps=eps, rope=ropes[layer.rope_index or 0])
            for layer, cache in zip(self.layers, state.draft_kv, strict=True)
        ]
        ops.store_kv(ops.linear(fused, self.context_kv), destinations, rows, acceptance.next_context_lens)

    def propose(
        self, ops: Ops[T], acceptance: Acceptance[T], state: StepState[T], num_draft_tokens: int
    ) -> Proposal[T]:
        """Run the block [bonus, MASK x K] and take its tokens.

        Slot j predicts the token at its own position: there is no logit shift. Slot 0, the anchor, needs no logits.
        A positive output multiplier, which some drafters carry, keeps the order of the logits: a greedy draft does not
        need it. It is left out of sampled drafts, too, which costs acceptance and changes no distribution.
        """
        blocks = ops.token_blocks(acceptance, fill=self.spec.block_filler)
        outputs = run_layers(ops, self.spec, self.layers, self.embedded(ops, blocks), blocks.rows, state.draft_kv)
        hidden = last_of(outputs)
        hidden = ops.rms_norm(ops.without_first(hidden), self.norm, self.spec.rms_norm_eps)
        logits = ops.all_gather_vocab(ops.linear(hidden, self.lm_head))
        if self.spec.logit_softcap is not None:
            logits = ops.softcap(logits, self.spec.logit_softcap)
        return ops.draft_tokens(logits, acceptance, self.draft_to_target, num_choices=self.spec.num_choices)

    def embedded(self, ops: Ops[T], blocks: TokenBlocks[T]) -> T:
        """The input of the first layer."""
        hidden = ops.embedding(self.embedding, blocks.token_ids, self.embedding_scale)
        return ops.scale(hidden, self.spec.input_embedding_scale)


def bind(spec: DraftSpec, target: TargetWeights[T], tensors: RankTensors[T]) -> DFlashDrafter[T]:
    """Raises KeyError on a missing tensor."""
    context_kv = tensors.linear("draft.kv")
    ends = list(accumulate(2 * gqa.shard(tensors.mapping).kv_size for gqa in spec.attentions))
    layers = tuple(
        bind_layer(tensors, spec, i, kv=tensors.rows_of(context_kv, start, stop))
        for i, (start, stop) in enumerate(zip([0, *ends], ends, strict=False))
    )
    has_own_vocabulary = spec.draft_vocab_size is not None
    has_own_head = has_own_vocabulary or "draft.lm_head" in tensors.quantized
    return DFlashDrafter(
        spec=spec,
        embedding=tensors["draft.embedding"] if spec.has_own_embedding else target.embedding,
        embedding_scale=1.0 if spec.has_own_embedding else target.embedding_scale,
        fc=tensors.linear("draft.fc"),
        context_norm=tensors["draft.context_norm"],
        context_kv=context_kv,
        layers=layers,
        norm=tensors["draft.norm"],
        lm_head=tensors.linear("draft.lm_head") if has_own_head else target.lm_head,
        draft_to_target=tensors["draft.draft_to_target"] if has_own_vocabulary else None,
    )
