"""Engine state in the network's terms: a backend's tensors with their specs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_trt.core.state_spec import PagedKv, PagedLatent, PagedRows, PagedState, Recurrent

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
    group: int = 0


@dataclass(frozen=True, slots=True)
class RecurrentCache(Generic[T]):
    """The recurrent state of one layer: [slots, *shape] of each of `spec.tensors()`."""

    tensors: Mapping[str, T]
    spec: Recurrent


PagedCache = Cache[T] | LatentCache[T]
LayerCache = PagedCache[T] | RecurrentCache[T]


def paged_cache(tensor: T, spec: PagedState, group: int) -> PagedCache[T]:
    """Pages of this state; see `Cache`."""
    return Cache(tensor, spec, group) if isinstance(spec, PagedKv) else LatentCache(tensor, spec, group)


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

    @property
    def pages(self) -> list[T]:
        """Pages of every layer, the target's first."""
        caches = (*self.target_kv, *self.draft_kv)
        return [cache.tensor for cache in caches if not isinstance(cache, RecurrentCache)]

    @property
    def paged(self) -> list[tuple[int, T]]:
        """All that pages hold, each once, with its page group: the target's layers, the drafter's, then features."""
        caches = [cache for cache in (*self.target_kv, *self.draft_kv) if not isinstance(cache, RecurrentCache)]
        by_name = {cache.spec.name: (cache.group, cache.tensor) for cache in caches}
        features = [] if self.draft_features is None else [(0, self.draft_features.tensor)]
        return [*by_name.values(), *features]

    @property
    def slots(self) -> list[T]:
        """Parts of every recurrent state."""
        caches = [cache for cache in self.target_kv if isinstance(cache, RecurrentCache)]
        return [tensor for cache in caches for tensor in cache.tensors.values()]
