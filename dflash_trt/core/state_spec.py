"""State that an engine keeps between steps, as specs with a shape and a size.

No other module knows the geometry.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from dflash_trt.core.dtype import DType, num_bytes_of
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.quantization import LayerKvScales


@dataclass(frozen=True, kw_only=True, slots=True)
class _OwnState:
    """A state of its layer's own: by token position, unless its kind is by slot, and whole on every rank."""

    name: str  # unique in an engine

    @property
    def bytes_per_slot(self) -> int:
        return 0

    @property
    def window(self) -> int | None:
        """The window whose pages it keeps; None for all, and for states that are in no page."""
        return None

    @property
    def num_tensors(self) -> int:
        return 1

    @property
    def owner(self) -> Self:
        """The state whose tensors the layer reads."""
        return self

    def shard(self, mapping: Mapping) -> Self:
        """One rank's shard."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedKv(_OwnState):
    """Paged K and V of one layer, by token position.

    FP8 pages have `scales`: they hold e4m3(K / scales.k) and e4m3(V / scales.v). With a `window` W, no query reads keys
    W or more positions before it.
    """

    page_axes: ClassVar[tuple[str, ...]] = ("2", "page_size", "kv_heads", "D")

    num_kv_heads: int
    head_dim: int
    dtype: DType
    scales: LayerKvScales | None = None
    window: int | None = None

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """[k or v, position in the page, kv_heads, D]."""
        return (2, page_size, self.num_kv_heads, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        return math.prod(self.page_shape(1)) * num_bytes_of(self.dtype)

    def shard(self, mapping: Mapping) -> Self:
        """One rank's heads."""
        return replace(self, num_kv_heads=mapping.num_kv_heads_of(self.num_kv_heads))


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedLatent(_OwnState):
    """Paged latents of one MLA layer, by token position: the latent, then the rotated key.

    All heads read all of them, so every rank holds a copy, or with `num_parts` ranks every num_parts-th position. FP8
    pages hold e4m3(row / scales.k).
    """

    page_axes: ClassVar[tuple[str, ...]] = ("page_size", "row")

    latent_dim: int
    rope_dim: int
    dtype: DType
    scales: LayerKvScales | None = None
    num_parts: int = 1

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """[position in the page, latent and rotated key]."""
        return (page_size // self.num_parts, self.latent_dim + self.rope_dim)

    @property
    def bytes_per_token(self) -> int:
        """One rank's."""
        return (self.latent_dim + self.rope_dim) * num_bytes_of(self.dtype) // self.num_parts

    def shard(self, mapping: Mapping) -> Self:
        return replace(self, num_parts=mapping.dcp_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedKv:
    """The pages of an earlier layer, which the layer reads and never writes."""

    bytes_per_token: ClassVar[int] = 0
    bytes_per_slot: ClassVar[int] = 0
    window: ClassVar[int | None] = None

    name: str  # unique in an engine
    source: PagedKv

    @property
    def owner(self) -> PagedKv:
        return self.source

    def shard(self, mapping: Mapping) -> "SharedKv":
        return replace(self, source=self.source.shard(mapping))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrent(_OwnState):
    """Recurrent state of one layer, a gated delta net, by slot.

    `state` is the net after `position` tokens, and `window` begins with the last inputs of its convolution before that
    position. Behind them come the inputs, `keys`, `deltas` and log `decays` of the tokens that the last step computed
    from there: records, of which the next step folds those that were accepted into the state. A re-run folds none.
    """

    bytes_per_token: ClassVar[int] = 0

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_size: int
    num_records: int
    dtype: DType  # convolution inputs

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim

    @property
    def num_tensors(self) -> int:
        return len(self.tensors())

    def tensors(self) -> dict[str, tuple[tuple[int, ...], DType]]:
        """Shape and dtype of each part of a slot."""
        heads, key_dim, value_dim = self.num_value_heads, self.key_head_dim, self.value_head_dim
        return {
            "state": ((heads, key_dim, value_dim), "float32"),
            "keys": ((self.num_records, self.num_key_heads, key_dim), "float32"),
            "deltas": ((self.num_records, heads, value_dim), "float32"),
            "decays": ((self.num_records, heads), "float32"),
            "window": ((self.conv_size - 1 + self.num_records, self.num_channels), self.dtype),
            "position": ((), "int32"),
        }

    @property
    def bytes_per_slot(self) -> int:
        return sum(math.prod(shape) * num_bytes_of(dtype) for shape, dtype in self.tensors().values())

    def shard(self, mapping: Mapping) -> Self:
        """One rank's key heads, and the value heads that read them."""
        num_key_heads, num_value_heads = (n // mapping.tp_size for n in (self.num_key_heads, self.num_value_heads))
        return replace(self, num_key_heads=num_key_heads, num_value_heads=num_value_heads)


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedRows(_OwnState):
    """One row of activations by token position, whole on every rank: the features of a chain's context."""

    page_axes: ClassVar[tuple[str, ...]] = ("page_size", "row")

    width: int
    dtype: DType

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """[position in the page, width]."""
        return (page_size, self.width)

    @property
    def bytes_per_token(self) -> int:
        return self.width * num_bytes_of(self.dtype)


PagedState = PagedKv | PagedLatent
LayerState = PagedState | SharedKv | Recurrent | PagedRows


def page_group_of(state: LayerState, windows: Sequence[int]) -> int:
    """Index of the page group that has a state's pages, or the pages of the layer it shares.

    Group 0 keeps all positions, also of states without a group of their own; the groups of `windows` follow.
    """
    window = state.owner.window
    return 1 + windows.index(window) if window is not None and window in windows else 0


def paged(states: Iterable[LayerState]) -> tuple[PagedState, ...]:
    """Keys and values by token position, each once."""
    return tuple(state for state in states if isinstance(state, PagedKv | PagedLatent))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStates:
    """States of a target and its drafter: one per layer, then a chain's features."""

    target: tuple[LayerState, ...]
    draft: tuple[LayerState, ...] = ()

    def __iter__(self) -> Iterator[LayerState]:
        yield from self.target
        yield from self.draft

    @property
    def is_recurrent(self) -> bool:
        """True if a prefix of a sequence is more than its pages."""
        return self.bytes_per_slot > 0

    @property
    def bytes_per_token(self) -> int:
        return sum(state.bytes_per_token for state in self)

    @property
    def replicated_bytes_per_token(self) -> int:
        """The part of it that every rank holds whole."""
        return sum(state.bytes_per_token for state in self if isinstance(state, PagedLatent) and state.num_parts == 1)

    def windows(self, max_positions: int) -> tuple[int, ...]:
        """Windows that a sequence outgrows: the page groups after group 0, which keeps all positions."""
        windows = {state.window for state in self if state.window is not None}
        return tuple(sorted(window for window in windows if window < max_positions))

    def bytes_per_token_of(self, window: int | None, windows: tuple[int, ...]) -> int:
        """Bytes per token in the page group of `window`.

        States without a group of their own are in group None.
        """

        own = [(state.window if state.window in windows else None, state.bytes_per_token) for state in self]
        return sum(num_bytes for found, num_bytes in own if found == window)

    @property
    def bytes_per_slot(self) -> int:
        return sum(state.bytes_per_slot for state in self)

    def shard(self, mapping: Mapping) -> "EngineStates":
        return EngineStates(
            target=tuple(state.shard(mapping) for state in self.target),
            draft=tuple(state.shard(mapping) for state in self.draft),
        )
