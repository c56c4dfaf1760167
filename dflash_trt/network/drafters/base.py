"""The interface of a drafting algorithm."""

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Protocol, cast

from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.network import drafters
from dflash_trt.network.decoder import TargetWeights
from dflash_trt.network.ops import Acceptance, Ops, Rows, T
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import StepState


class Drafter(Protocol[T]):
    """One algorithm over its weights, a frozen dataclass. Its state is what `DraftSpec.states` lists."""

    @property
    def tap_layer_ids(self) -> Sequence[int]:
        """Target layers whose outputs `observe` takes, 0-based, in this order."""
        ...

    def observe(
        self,
        ops: Ops[T],
        token_ids: T,
        taps: Sequence[T],
        rows: Rows[T],
        acceptance: Acceptance[T],
        state: StepState[T],
    ) -> None:
        """Take the ids [T] and the taps [T, H] of the step's tokens into the state, as far as they were accepted."""
        ...

    def propose(
        self, ops: Ops[T], acceptance: Acceptance[T], state: StepState[T], num_draft_tokens: int
    ) -> Proposal[T]:
        """K drafts behind the bonus token of every request."""
        ...


def bind_drafter(spec: DraftSpec, target: TargetWeights[T], tensors: RankTensors[T]) -> Drafter[T]:
    """The drafter of the file that `spec.algorithm` names. Raises KeyError on a missing tensor."""
    algorithms = {module.name for module in iter_modules(drafters.__path__)} - {"base"}
    assert spec.algorithm in algorithms, f"{spec.algorithm} is none of {sorted(algorithms)}"
    module: Any = import_module(f"{drafters.__name__}.{spec.algorithm}")
    return cast(Drafter[T], module.bind(spec, target, tensors))
