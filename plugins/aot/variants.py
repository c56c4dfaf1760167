"""Contents of the plugin library: every kernel variant that its plugins may launch, for the models it is built for.

Knows the launchers' `*_variants` functions and which of their sizes are compiled in. Refuses two variants of one name.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Final

import torch

from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.errors import ConfigError
from dflash_trt.kernels.launch_rules import HEAD_DIM_GRAIN, MAX_HEAD_DIM
from dflash_trt.kernels.paged_rows_launch import MAX_BLOCK
from dflash_trt.kernels.sampling_scratch import TILE
from plugins.aot.attention_variants import attention_variants
from plugins.aot.page_variants import page_write_variant, previous_rows_variant
from plugins.aot.sampling_variants import library_draft_variants, library_sampling_variants
from plugins.aot.variant import KernelVariant, unique_variants

FLOAT_TYPES: Final = ("bfloat16", "float16", "float32")
PAGE_TYPES: Final = ("network", "float8_e4m3fn")  # network: that of the activations
SOFTCAPS: Final = ("without", "with")  # of attention scores
CHAINS: Final = ("without", "with")  # EAGLE-3's, besides blocks
HEAD_DIMS: Final = (64, 128, 256)
MAX_REQUESTS: Final = (256,)
TILES: Final = (16, 32, 64, 128)
# float32 is for checks against references: large tiles spend registers, and the library's size, on nothing else.
FLOAT32_TILES: Final = (16, 64)
VOCAB_TILES: Final = (64, 128)
WIDTHS: Final = (16, 64)


@dataclass(frozen=True, kw_only=True)
class LibrarySpec:
    """Which models a library is for. Smaller sets compile faster.

    The last four are what a size of a step is rounded up to: its requests, the query rows and heads of an attention
    tile, the vocabulary in tiles of the sampler, and the rows of a request (K + 1).
    """

    dtypes: tuple[str, ...] = FLOAT_TYPES
    pages: tuple[str, ...] = PAGE_TYPES
    softcaps: tuple[str, ...] = ("without",)  # no supported family has one
    chains: tuple[str, ...] = ("without",)
    head_dims: tuple[int, ...] = HEAD_DIMS
    max_requests: tuple[int, ...] = MAX_REQUESTS
    tiles: tuple[int, ...] = TILES
    vocab_tiles: tuple[int, ...] = VOCAB_TILES
    widths: tuple[int, ...] = WIDTHS

    def __post_init__(self) -> None:
        for item in fields(self):
            if not getattr(self, item.name):
                name = "--" + item.name.replace("_", "-")
                raise ConfigError.about(name, expected="one value or more", found="none", hint="Leave it out.")
        for name, known in (("dtypes", FLOAT_TYPES), ("pages", PAGE_TYPES), ("softcaps", SOFTCAPS), ("chains", CHAINS)):
            for value in getattr(self, name):
                if value not in known:
                    expected = f"some of {', '.join(known)}"
                    raise ConfigError.about(f"--{name}", expected=expected, found=value, hint="Name those.")
        check_head_dims(self.head_dims)

    def variants(self) -> tuple[KernelVariant, ...]:
        return library_variants(self)


def check_head_dims(head_dims: Iterable[int]) -> None:
    """Raises ConfigError for a size that no kernel has."""
    for head_dim in head_dims:
        if head_dim % HEAD_DIM_GRAIN or not 0 < head_dim <= MAX_HEAD_DIM:
            raise ConfigError.about(
                "head_dims",
                expected=f"multiples of {HEAD_DIM_GRAIN} from {HEAD_DIM_GRAIN} to {MAX_HEAD_DIM}",
                found=str(head_dim),
                hint="Other sizes have no kernel; build the engine with --backend torch and run it on a CPU.",
            )


def tiles_of(dtype: torch.dtype, tiles: tuple[int, ...] = TILES) -> tuple[int, ...]:
    """Those of `tiles` that networks of the type have."""
    if dtype != torch.float32:
        return tiles
    return tuple(tile for tile in tiles if tile in FLOAT32_TILES) or tiles


def library_variants(spec: LibrarySpec) -> tuple[KernelVariant, ...]:
    """Ordered by name, without repetitions."""
    return unique_variants(_all_variants(spec))


def _all_variants(spec: LibrarySpec) -> Iterator[KernelVariant]:
    for name in spec.dtypes:
        dtype = torch_dtype(name)
        yield from _sampling(dtype, spec)
        for head_dim in spec.head_dims:
            for pages in spec.pages:
                page_dtype = dtype if pages == "network" else torch_dtype(pages)
                yield from _attention(dtype, page_dtype, head_dim, spec)
                yield from _page_writes(dtype, page_dtype, head_dim, spec)
        if "with" in spec.chains:
            for max_requests in spec.max_requests:
                yield previous_rows_variant(dtype, width=MAX_BLOCK, max_requests=max_requests)


def _attention(
    dtype: torch.dtype, page_dtype: torch.dtype, head_dim: int, spec: LibrarySpec
) -> Iterator[KernelVariant]:
    chains = [(True, int(name == "with")) for name in spec.chains]
    for (has_block, first_key), softcap in itertools.product([(False, 0), *chains], spec.softcaps):
        for num_requests in spec.max_requests:
            yield from attention_variants(
                dtype=dtype,
                page_dtype=page_dtype,
                head_dim=head_dim,
                has_block=has_block,
                has_softcap=softcap == "with",
                max_requests=num_requests,
                tiles=tiles_of(dtype, spec.tiles),
                first_key=first_key,
            )


def _page_writes(
    dtype: torch.dtype, page_dtype: torch.dtype, head_dim: int, spec: LibrarySpec
) -> Iterator[KernelVariant]:
    for has_limits in (False, True):  # a target's rows, a drafter's accepted rows
        for num_requests in spec.max_requests:
            yield page_write_variant(
                dtype=dtype, page_dtype=page_dtype, head_dim=head_dim, has_limits=has_limits, max_requests=num_requests
            )


def _sampling(dtype: torch.dtype, spec: LibrarySpec) -> Iterator[KernelVariant]:
    for num_tiles in spec.vocab_tiles:
        for vocab_size in (num_tiles * TILE, num_tiles * TILE - 1):  # a multiple of 16, and not
            for width in spec.widths:
                yield from library_sampling_variants(dtype, vocab_size=vocab_size, max_width=width)
            for has_map in (False, True):
                yield from library_draft_variants(dtype, vocab_size=vocab_size, has_map=has_map)
