"""A chain of passes of one layer, each from the previous pass's token and feature: shared by EAGLE-3 and MTP heads.

The row of a token joins its embedding and the feature of the previous token, so K/V of a position depend only on the
tokens up to it, and pages can be shared; the first token has no row. A request's first row of a step needs a feature of
the previous step, which pages keep.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.network.decoder import TargetRun, TargetWeights, bind_around_mixer, head_logits, rope_tables
from dflash_trt.network.drafters.base import DrafterWeights, DraftLayer, bind_attention, bind_weights
from dflash_trt.network.ops import OF_TOKENS, Acceptance, ExchangedRows, KvDestination, Linear, Ops, T, TokenBlocks
from dflash_trt.network.proposal import Proposal, joined
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import Cache, StepState


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainLayer(DraftLayer[T]):
    """A decoder layer and the norm of the features that it reads."""

    feeds_norms_to_linears: ClassVar[bool] = False

    feature_norm: T


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainDrafter(DrafterWeights[T], ABC):
    """A chain over one layer. With `has_normed_features`, its features are normed like the input of its logits."""

    kv: Linear[T]  # [k; v]: the layer's, for the context
    layer: ChainLayer[T]
    has_normed_features: bool

    @abstractmethod
    def context_features(self, ops: Ops[T], target: TargetRun[T]) -> T:
        """Features [T, H] of the step's tokens."""

    @abstractmethod
    def layer_inputs(self, ops: Ops[T], token_ids: T, features: T, exchanged: ExchangedRows) -> tuple[T, T]:
        """The residual stream before the layer's attention [N, H], and the input of its projections."""

    @property
    def layers(self) -> Sequence[ChainLayer[T]]:
        return (self.layer,)

    def observe(
        self, ops: Ops[T], token_ids: T, target: TargetRun[T], acceptance: Acceptance[T], state: StepState[T]
    ) -> None:
        """Write the features of the step's tokens, and K/V of the accepted ones."""
        assert state.draft_features is not None
        before = ops.previous_rows(self.context_features(ops, target), target.rows, state.draft_features)
        _, x = self.layer_inputs(ops, token_ids, before, OF_TOKENS)
        [cache], [rope] = state.draft_kv, rope_tables(ops, self.layers, target.rows)
        k_norm = self.layer.mixer.k_norm
        destination = KvDestination(cache=cache, k_norm=k_norm, eps=self.spec.rms_norm_eps, rope=rope)
        ops.store_kv(ops.linear(x, self.kv), [destination], target.rows, acceptance.next_context_lens)

    def propose(
        self, ops: Ops[T], acceptance: Acceptance[T], state: StepState[T], num_draft_tokens: int
    ) -> Proposal[T]:
        """K passes over the block [bonus, drafts so far], whose last slot gives the next draft.

        A pass computes K and V of all slots again: they live for one call, and a row more costs a GEMM of a few rows
        next to nothing. The feed-forward and the head see one row of a request.
        """
        assert state.draft_features is not None
        eps, drafts = self.spec.rms_norm_eps, list[Proposal[T]]()
        features = [ops.context_rows(state.draft_features, acceptance)]
        for slot in range(num_draft_tokens):
            blocks = ops.chain_blocks(acceptance, [draft.tokens for draft in drafts])
            hidden = self._run_layer(ops, blocks, ops.stack_slots(features), state.draft_kv[0], num_slots=slot + 1)
            normed = ops.rms_norm(hidden, self.norm, eps)
            features.append(normed if self.has_normed_features else hidden)
            logits = head_logits(ops, normed, self.lm_head, ExchangedRows(per_request=1))
            options = {"draft_topk": self.spec.draft_topk, "first_slot": slot + 1}
            drafts.append(ops.draft_tokens(logits, acceptance, self.draft_to_target, **options))
        return joined(ops, drafts)

    def _run_layer(self, ops: Ops[T], blocks: TokenBlocks[T], features: T, cache: Cache[T], *, num_slots: int) -> T:
        """The output [R, H] of the last slots."""
        layer, eps = self.layer, self.spec.rms_norm_eps
        residual, x = self.layer_inputs(ops, blocks.token_ids, features, ExchangedRows(num_slots))
        [rope] = rope_tables(ops, self.layers, blocks.rows)
        mixed = ops.all_reduce(layer.mixer.run(ops, x, blocks.rows, cache, rope=rope, eps=eps))
        hidden = ops.last_slot(ops.add(residual, mixed), num_slots)
        return ops.add(hidden, layer.feed_forward.run(ops, hidden, layer.mlp_norm, eps, ExchangedRows(per_request=1)))


def bind_chain(spec: DraftSpec, target: TargetWeights[T], tensors: RankTensors[T]) -> dict[str, Any]:
    """The fields of `ChainDrafter` that are weights. Raises KeyError on a missing tensor."""
    kv = tensors.linear("draft.kv")
    layer = ChainLayer(
        mixer=bind_attention(spec, tensors, 0, kv),
        feature_norm=tensors["draft.context_norm"],
        **bind_around_mixer(tensors, spec, 0),
    )
    return bind_weights(spec, target, tensors) | {"kv": kv, "layer": layer}
