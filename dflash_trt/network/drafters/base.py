"""The interface of a drafting algorithm, and its layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Protocol, cast

from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.network import drafters
from dflash_trt.network.decoder import Layer, TargetRun, TargetWeights
from dflash_trt.network.mixers import gqa
from dflash_trt.network.ops import Acceptance, Linear, Ops, T
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import StepState


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLayer(Layer[T]):
    """A layer of a drafter: all of them attend over K and V."""

    mixer: gqa.GqaWeights[T]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterWeights(Generic[T]):
    """Weights that every drafter has; embedding and head are the target's unless it brings its own."""

    spec: DraftSpec
    embedding: T
    fc: Linear[T]
    norm: T
    lm_head: Linear[T]
    draft_to_target: T | None


class Drafter(Protocol[T]):
    """One algorithm over its weights, a frozen dataclass. Its state is what `DraftSpec.states` lists."""

    @property
    def layers(self) -> Sequence[DraftLayer[T]]:
        """In the order of `StepState.draft_kv`."""
        ...

    def observe(
        self, ops: Ops[T], token_ids: T, target: TargetRun[T], acceptance: Acceptance[T], state: StepState[T]
    ) -> None:
        """Add the accepted tokens of the step to the state: token ids [T] and the target's taps [T, H].

        Taps are outputs of the target's layers, as `DraftSpec.target_layer_ids` lists them.
        """
        ...

    def propose(
        self, ops: Ops[T], acceptance: Acceptance[T], state: StepState[T], num_draft_tokens: int
    ) -> Proposal[T]:
        """K drafts after the bonus token of every request."""
        ...


def bind_drafter(spec: DraftSpec, target: TargetWeights[T], tensors: RankTensors[T]) -> Drafter[T]:
    """The drafter of the file that `spec.algorithm` names. Raises KeyError on a missing tensor."""
    module: Any = import_module(f"{drafters.__name__}.{spec.algorithm}")
    return cast(Drafter[T], module.bind(spec, target, tensors))


def bind_attention(spec: DraftSpec, tensors: RankTensors[T], index: int, kv: Linear[T]) -> gqa.GqaWeights[T]:
    """The mixer of a layer whose [k; v] are rows of `draft.kv`."""
    return gqa.bind(spec.attentions[index].shard(tensors.mapping), tensors, f"{spec.role}.layers.{index}", kv)


def bind_weights(spec: DraftSpec, target: TargetWeights[T], tensors: RankTensors[T]) -> dict[str, Any]:
    """The fields of `DrafterWeights`."""
    has_own_vocabulary = spec.draft_vocab_size is not None
    has_own_head = has_own_vocabulary or "draft.lm_head" in tensors
    return {
        "spec": spec,
        "embedding": tensors["draft.embedding"] if spec.has_own_embedding else target.embedding,
        "fc": tensors.linear("draft.fc"),
        "norm": tensors["draft.norm"],
        "lm_head": tensors.linear("draft.lm_head") if has_own_head else target.lm_head,
        "draft_to_target": tensors["draft.draft_to_target"] if has_own_vocabulary else None,
    }
