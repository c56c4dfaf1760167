"""MTP heads: a chain whose features are the target's last hidden states, after its final norm (`chain.py`).

Definition: arXiv 2412.19437, section 2.2; transformers 5.14 (`modeling_layers.MtpModel`) and speculators 0.9
(`models/mtp`). A head trained for one token drafts more in a chain, as other engines do.
"""

from dataclasses import dataclass

from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.network.decoder import TargetRun, TargetWeights, embedded
from dflash_trt.network.drafters.chain import ChainDrafter, bind_chain
from dflash_trt.network.ops import ExchangedRows, Ops, T
from dflash_trt.network.rank_tensors import RankTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpDrafter(ChainDrafter[T]):
    """`fc` projects an embedding and a feature; embedding and head are the target's."""

    target_norm: T
    embedding_norm: T

    def context_features(self, ops: Ops[T], target: TargetRun[T]) -> T:
        return ops.rms_norm(target.hidden, self.target_norm, self.spec.rms_norm_eps)

    def layer_inputs(self, ops: Ops[T], token_ids: T, features: T, exchanged: ExchangedRows) -> tuple[T, T]:
        eps = self.spec.rms_norm_eps
        tokens = embedded(ops, self.embedding, token_ids, 1.0, exchanged)
        tokens = ops.rms_norm(tokens, self.embedding_norm, eps)
        normed = ops.rms_norm(features, self.layer.feature_norm, eps)
        hidden = ops.linear(ops.concat([tokens, normed]), self.fc)
        return hidden, ops.rms_norm(hidden, self.layer.attention_norm, eps)


def bind(spec: DraftSpec, target: TargetWeights[T], tensors: RankTensors[T]) -> MtpDrafter[T]:
    """Raises KeyError on a missing tensor."""
    return MtpDrafter(
        **bind_chain(spec, target, tensors),
        has_normed_features=True,
        target_norm=target.norm,
        embedding_norm=tensors["draft.embedding_norm"],
    )
