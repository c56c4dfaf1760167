"""What every kind of mixer tells of itself: weights, state, its shard, and what a plan counts."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.frozen import Frozen
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.rope import Rotary
from dflash_trt.core.state_spec import LayerState
from dflash_trt.core.weight_spec import WeightTable

if TYPE_CHECKING:
    from dflash_trt.core.model.gqa import Gqa


class MixerFlops(NamedTuple):
    """FLOPs of one way to compute a mixer between its projections."""

    per_key: int = 0  # that a token sees
    per_token: int = 0
    per_position: int = 0  # up to a request's last token


class Mixer(Frozen):
    """A mixer's sizes, which count the whole model before sharding. A kind is a subclass that `LayerSpec` lists.

    `kind` names the file of `network/mixers` that runs it. A subclass also has `mask`, the keys that a token sees.
    """

    is_paged: ClassVar[bool] = True  # its state is by token position, else by slot

    kind: str

    @property
    def rotary(self) -> Rotary | None:
        return None

    @property
    def attends_as(self) -> "Gqa | None":
        """How it attends over K and V, if it does."""
        return None

    @property
    @abstractmethod
    def sharded_sizes(self) -> dict[str, int]:
        """Sizes that tensor parallelism divides, by name."""

    @property
    def replicated_sizes(self) -> dict[str, int]:
        """Sizes that it divides, or of which it gives each part to several ranks, by name."""
        return {}

    @abstractmethod
    def shard(self, mapping: Mapping) -> Self:
        """One rank's shard."""

    def state_owner(self, index: int) -> int:
        """The layer whose state layer `index`, which has this mixer, reads."""
        return index

    @abstractmethod
    def state(self, name: str, dtype: FloatDType, scales: Any = None, **needs: Any) -> LayerState:
        """State of the layer. A kind takes what its own has of `DecoderSpec.states`."""

    @abstractmethod
    def weights(self, prefix: str, hidden_size: int) -> WeightTable:
        """Canonical weights."""

    @property
    @abstractmethod
    def flops(self) -> tuple[MixerFlops, ...]:
        """One for each way to compute it; a request takes the cheapest."""

    @property
    @abstractmethod
    def moved_features(self) -> int:
        """Elements per token that it writes and reads once between its input and its output."""

    @abstractmethod
    def held_features(self, *, expands_latents: bool, has_nodes: bool, float32_size: int) -> int:
        """Elements per token that it holds at once there, where a float32 is `float32_size` of them.

        Many rows expand latents to K and V; TensorRT's plugin nodes have outputs of their own.
        """
