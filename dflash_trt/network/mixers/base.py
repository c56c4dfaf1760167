"""The interface of a mixer."""

from importlib import import_module
from typing import Any, Protocol, cast

from dflash_trt.core.model import mixer
from dflash_trt.network import mixers
from dflash_trt.network.ops import Ops, Rows, T
from dflash_trt.network.rank_tensors import RankTensors


class Mixer(Protocol[T]):
    """One layer's mixer over the weights of a rank, a frozen dataclass."""

    @property
    def spec(self) -> mixer.Mixer:
        """The rank's own part."""
        ...

    def run(self, ops: Ops[T], x: T, rows: Rows[T], cache: Any, *, rope: Any, eps: float) -> T:
        """Normed [N, H] -> [N, H] of one rank: to be summed. `cache` is the layer's state.

        `rope` is the table of `spec.rotary`, from `Ops.rope_table`.
        """
        ...


def bind_mixer(spec: mixer.Mixer, tensors: RankTensors[T], prefix: str) -> Mixer[T]:
    """The mixer of the file that `spec.kind` names, a rank's part. Raises KeyError on a missing tensor."""
    module: Any = import_module(f"{mixers.__name__}.{spec.kind}")
    return cast(Mixer[T], module.bind(spec, tensors, prefix))
