"""EAGLE-3 and 3.1: a chain whose features are a projection of the taps (`chain.py`).

Definition: arXiv 2503.01840, SafeAILab's implementation and PyPI `speculators`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.eagle3 import EagleChain
from dflash_trt.network.decoder import TargetRun, TargetWeights, embedded
from dflash_trt.network.drafters.chain import ChainDrafter, bind_chain
from dflash_trt.network.ops import ExchangedRows, Ops, T
from dflash_trt.network.rank_tensors import RankTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Drafter(ChainDrafter[T]):
    """The layer's `attention_norm` is the embedding's."""

    chain: EagleChain
    fc_norms: tuple[T, ...]  # none, one for all taps, or one for each

    def context_features(self, ops: Ops[T], target: TargetRun[T]) -> T:
        eps = self.spec.rms_norm_eps
        taps: Sequence[T] = target.taps
        if self.chain.fc_norm == "per_tap":
            taps = [ops.rms_norm(tap, norm, eps) for tap, norm in zip(taps, self.fc_norms, strict=True)]
        joined = ops.concat(taps)
        if self.chain.fc_norm == "joint":
            joined = ops.rms_norm(joined, self.fc_norms[0], eps)
        return ops.linear(joined, self.fc)

    def layer_inputs(self, ops: Ops[T], token_ids: T, features: T, exchanged: ExchangedRows) -> tuple[T, T]:
        """The features [N, H], normed or not, and [N, 2H]: normed embeddings, then normed features."""
        eps = self.spec.rms_norm_eps
        # Unscaled, also of a Gemma target: heads are trained so (`speculators`), and the norm undoes any scale.
        tokens = embedded(ops, self.embedding, token_ids, 1.0, exchanged)
        tokens = ops.rms_norm(tokens, self.layer.attention_norm, eps)
        normed = ops.rms_norm(features, self.layer.feature_norm, eps)
        return normed if self.chain.has_normed_residual else features, ops.concat([tokens, normed])


def bind(spec: DraftSpec, target: TargetWeights[T], tensors: RankTensors[T]) -> Eagle3Drafter[T]:
    """Raises KeyError on a missing tensor."""
    assert spec.chain is not None
    norms = spec.chain.fc_norms(len(spec.target_layer_ids), spec.target_hidden_size)
    return Eagle3Drafter(
        **bind_chain(spec, target, tensors),
        has_normed_features=spec.chain.has_normed_features,
        chain=spec.chain,
        fc_norms=tuple(tensors[name] for name in norms),
    )
