"""EAGLE-3 and 3.1: a chain of passes of one layer, each from the previous pass's token and feature.

Definition: arXiv 2503.01840, SafeAILab's implementation and PyPI `speculators`. The row of a token joins its embedding
and the feature of the previous token, so K/V of a position depend only on the tokens up to it, and pages can be shared;
the first token has no row. A request's first row of a step needs a feature of the previous step, which pages keep.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.eagle3 import EagleChain
from dflash_trt.network.decoder import TargetRun, TargetWeights, bind_around_mixer, rope_tables
from dflash_trt.network.drafters.base import DrafterWeights, DraftLayer, bind_attention, bind_weights
from dflash_trt.network.ops import Acceptance, KvDestination, Linear, Ops, T, TokenBlocks
from dflash_trt.network.proposal import Proposal, joined
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import Cache, StepState


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainLayer(DraftLayer[T]):
    """A decoder layer with two input norms; `attention_norm` is the embedding's."""

    feeds_norms_to_linears: ClassVar[bool] = False

    feature_norm: T


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Drafter(DrafterWeights[T]):
    """A chain over one layer."""

    chain: EagleChain
    fc_norms: tuple[T, ...]  # none, one for all taps, or one for each
    kv: Linear[T]  # [k; v]: the layer's, for the context
    layer: ChainLayer[T]

    @property
    def layers(self) -> Sequence[ChainLayer[T]]:
        return (self.layer,)

    def observe(
        self, ops: Ops[T], token_ids: T, target: TargetRun[T], acceptance: Acceptance[T], state: StepState[T]
    ) -> None:
        """Write the features of the step's tokens, and K/V of the accepted ones."""
        assert state.draft_features is not None
        before = ops.previous_rows(self._fused(ops, target.taps), target.rows, state.draft_features)
        _, x = self._joined(ops, token_ids, before)
        [cache], [rope] = state.draft_kv, rope_tables(ops, self.layers, target.rows)
        k_norm = self.layer.mixer.k_norm
        destination = KvDestination(cache=cache, k_norm=k_norm, eps=self.spec.rms_norm_eps, rope=rope)
        ops.store_kv(ops.linear(x, self.kv), [destination], target.rows, acceptance.next_context_lens)

    def propose(
        self, ops: Ops[T], acceptance: Acceptance[T], state: StepState[T], num_draft_tokens: int
    ) -> Proposal[T]:
        """K passes over the block [bonus, drafts so far], whose last slot gives the next draft.

        A pass computes K and V of all slots again: they live for one call, and a row more costs a GEMM of a few rows
        next to nothing. The MLP and the head see one row of a request.
        """
        assert state.draft_features is not None
        eps, drafts = self.spec.rms_norm_eps, list[Proposal[T]]()
        features = [ops.context_rows(state.draft_features, acceptance)]
        for slot in range(num_draft_tokens):
            blocks = ops.chain_blocks(acceptance, [draft.tokens for draft in drafts])
            hidden = self._run_layer(ops, blocks, ops.stack_slots(features), state.draft_kv[0], num_slots=slot + 1)
            normed = ops.rms_norm(hidden, self.norm, eps)
            features.append(normed if self.chain.has_normed_features else hidden)
            logits = ops.all_gather_vocab(ops.linear(normed, self.lm_head))
            options = {"draft_topk": self.spec.draft_topk, "first_slot": slot + 1}
            drafts.append(ops.draft_tokens(logits, acceptance, self.draft_to_target, **options))
        return joined(ops, drafts)

    def _fused(self, ops: Ops[T], taps: Sequence[T]) -> T:
        """Features [T, H] of the taps [T, H of the target]."""
        eps = self.spec.rms_norm_eps
        if self.chain.fc_norm == "per_tap":
            taps = [ops.rms_norm(tap, norm, eps) for tap, norm in zip(taps, self.fc_norms, strict=True)]
        joined = ops.concat(taps)
        if self.chain.fc_norm == "joint":
            joined = ops.rms_norm(joined, self.fc_norms[0], eps)
        return ops.linear(joined, self.fc)

    def _joined(self, ops: Ops[T], token_ids: T, features: T) -> tuple[T, T]:
        """The normed features [N, H], and the input of attention [N, 2H]: normed embeddings, then these."""
        eps = self.spec.rms_norm_eps
        # Unscaled, also of a Gemma target: heads are trained so (`speculators`), and the norm undoes any scale.
        embedded = ops.embedding(self.embedding, token_ids)
        embedded = ops.rms_norm(embedded, self.layer.attention_norm, eps)
        normed = ops.rms_norm(features, self.layer.feature_norm, eps)
        return normed, ops.concat([embedded, normed])

    def _run_layer(self, ops: Ops[T], blocks: TokenBlocks[T], features: T, cache: Cache[T], *, num_slots: int) -> T:
        """The output [R, H] of the last slots."""
        layer, eps = self.layer, self.spec.rms_norm_eps
        normed, x = self._joined(ops, blocks.token_ids, features)
        [rope] = rope_tables(ops, self.layers, blocks.rows)
        mixed = ops.all_reduce(layer.mixer.run(ops, x, blocks.rows, cache, rope=rope, eps=eps))
        hidden = ops.add(normed if self.chain.has_normed_residual else features, mixed)
        hidden = ops.last_slot(hidden, num_slots)
        return ops.add(hidden, layer.feed_forward.run(ops, hidden, layer.mlp_norm, eps))


def bind(spec: DraftSpec, target: TargetWeights[T], tensors: RankTensors[T]) -> Eagle3Drafter[T]:
    """Raises KeyError on a missing tensor."""
    assert spec.chain is not None
    kv = tensors.linear("draft.kv")
    norms = spec.chain.fc_norms(len(spec.target_layer_ids), spec.target_hidden_size)
    return Eagle3Drafter(
        **bind_weights(spec, target, tensors),
        chain=spec.chain,
        fc_norms=tuple(tensors[name] for name in norms),
        kv=kv,
        layer=ChainLayer(
            mixer=bind_attention(spec, tensors, 0, kv),
            feature_norm=tensors["draft.context_norm"],
            **bind_around_mixer(tensors, spec, 0),
        ),
    )
