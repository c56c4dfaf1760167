"""State that an engine keeps between steps, as specs with a shape and a size. No other module knows their geometry."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dflash_trt.core.dtype import DType, num_bytes_of
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.quantization import LayerKvScales


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedKv:
    """Paged K and V of one layer, by token position.

    FP8 pages have `scales`: they hold e4m3(K / scales.k) and e4m3(V / scales.v).
    """

    name: str  # unique in an engine
    num_kv_heads: int
    head_dim: int
    dtype: DType
    scales: LayerKvScales | None = None

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """[k or v, position in the page, kv_heads, D]."""
        return (2, page_size, self.num_kv_heads, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        return math.prod(self.page_shape(1)) * num_bytes_of(self.dtype)

    def shard(self, mapping: Mapping) -> "PagedKv":
        """One rank's shard: its heads."""
        return replace(self, num_kv_heads=mapping.num_kv_heads_of(self.num_kv_heads))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStates:
    """States of a target and of its drafter, one per layer."""

    target: tuple[PagedKv, ...]
    draft: tuple[PagedKv, ...] = ()

    def __iter__(self) -> Iterator[PagedKv]:
        yield from self.target
        yield from self.draft

    @property
    def bytes_per_token(self) -> int:
        return sum(state.bytes_per_token for state in self)

    def shard(self, mapping: Mapping) -> "EngineStates":
        return EngineStates(
            target=tuple(state.shard(mapping) for state in self.target),
            draft=tuple(state.shard(mapping) for state in self.draft),
        )
