"""The state of an engine as the network sees it: a backend's tensors beside the specs that they follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_trt.core.state_spec import PagedKv, PagedLatent, PagedRows, Recurrent

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cache(Generic[T]):
    """One state of the engine, updated in place: [pages, *spec.page_shape(page_size)].

    `group` is its page group: whose pages, and which of the step's page tables.
    """

    tensor: T
    spec: PagedKv
    group: int = 0


@dataclass(frozen=True, slots=True)
class LatentCache(Generic[T]):
    """Latents of one layer, updated in place: [pages, *spec.page_shape(page_size)]."""

    tensor: T
    spec: PagedLatent


@dataclass(frozen=True, slots=True)
class RecurrentCache(Generic[T]):
    """The recurrent state of one layer: [slots, *shape] of each of `spec.tensors()`."""

    tensors: Mapping[str, T]
    spec: Recurrent


PagedCache = Cache[T] | LatentCache[T]
LayerCache = PagedCache[T] | RecurrentCache[T]


@dataclass(frozen=True, slots=True)
class RowCache(Generic[T]):
    """Rows by token position: [pages, *spec.page_shape(page_size)]."""

    tensor: T
    spec: PagedRows


@dataclass(frozen=True, kw_only=True, slots=True)
class StepState(Generic[T]):
    """State per layer: K/V pages, and recurrent states in a target. A chain has features, too."""

    target_kv: Sequence[LayerCache[T]]
    draft_kv: Sequence[Cache[T]]
    draft_features: RowCache[T] | None = None
