"""Contents of a plugin library for one engine: the kernel variants that its plugins may launch, and no others.

Knows what an engine's config decides. Heads of K/V, windows, masks, sinks and scales are arguments of the kernels, so
that layers differ only in head_dim, in what their pages hold, in having a soft cap or none, in chunks of positions, in
being a chain's, and in the tiles that their groups of query heads fill. Of experts (`experts_of_engine.py`) and gated
delta nets, all sizes are compiled in, of latents all but the heads.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from dflash_trt.core.config import BuildConfig
from dflash_trt.core.dtype import DType, FloatDType, torch_dtype
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import DecoderSpec, TargetSpec
from dflash_trt.core.state_spec import LayerState, PagedKv, PagedLatent, PagedRows, Recurrent
from dflash_trt.engine_dir import EngineDir, EngineLimits, PretrainedConfig
from dflash_trt.kernels import attention_plan
from dflash_trt.kernels.launch_rules import NO_CHUNK
from plugins.aot.attention_variants import attention_variants
from plugins.aot.experts_of_engine import experts_of
from plugins.aot.experts_variants import ExpertsKernels
from plugins.aot.gated_delta_variants import DeltaKernels
from plugins.aot.latent_variants import LatentKernels
from plugins.aot.linear_variants import Int8LinearKernels, LinearKernels, linears_of, max_norm_columns, norm_variants
from plugins.aot.page_variants import page_write_variant, previous_rows_variant
from plugins.aot.sampling_variants import library_draft_variants, library_sampling_variants
from plugins.aot.variant import KernelVariant, unique_variants
from plugins.aot.variants import check_head_dims, tiles_of


@dataclass(frozen=True, kw_only=True, order=True)
class LayerKernels:
    """One kind of layer. `max_rows` are the query rows of a request; 0: its pages are written and never read."""

    is_drafter: bool
    head_dim: int
    page_dtype: DType
    heads_per_kv: int
    max_rows: int
    has_softcap: bool = False
    chunk: int = NO_CHUNK
    first_key: int = 0  # of a chain, whose first token has no row


@dataclass(frozen=True, kw_only=True)
class EngineKernels:
    dtype: FloatDType
    layers: tuple[LayerKernels, ...]
    max_batch_size: int
    max_draft_len: int
    vocab_size: int
    draft_vocab_size: int | None = None  # of a drafter that has its own
    experts: tuple[ExpertsKernels, ...] = ()
    deltas: tuple[DeltaKernels, ...] = ()
    feature_size: int | None = None  # of a chain's rows in pages
    latents: tuple[LatentKernels, ...] = ()
    is_deterministic: bool = False
    linears: tuple[LinearKernels | Int8LinearKernels, ...] = ()
    max_norm_columns: int = 0  # of a deterministic engine

    @classmethod
    def of(cls, config: PretrainedConfig, limits: EngineLimits, *, is_deterministic: bool = False) -> Self:
        """Kernels of one rank; all ranks launch the same.

        Raises:
            ConfigError: a head_dim that no kernel has.
        """
        states = config.states()
        max_draft_len = limits.max_draft_len if config.draft else 0
        layers = set(_layers(config.target, states.target, config.mapping, max_rows=limits.max_num_tokens))
        if config.draft is not None:
            max_rows = max_draft_len + 1 if max_draft_len else 0
            layers |= set(_layers(config.draft, states.draft, config.mapping, max_rows=max_rows))
        check_head_dims(layer.head_dim for layer in layers)
        return cls(
            dtype=config.dtype,
            layers=tuple(sorted(layers)),
            max_batch_size=limits.max_batch_size,
            max_draft_len=max_draft_len,
            vocab_size=config.target.vocab_size,
            draft_vocab_size=config.draft.draft_vocab_size if config.draft else None,
            experts=tuple(sorted(set(experts_of(config, max_rows=1 if is_deterministic else limits.max_num_tokens)))),
            deltas=tuple(sorted(set(_deltas(states.target, limits.max_batch_size, is_in_order=is_deterministic)))),
            feature_size=next((state.width for state in states.draft if isinstance(state, PagedRows)), None),
            latents=tuple(sorted(set(_latents(config.target, states.target, limits, is_split_fixed=is_deterministic)))),
            is_deterministic=is_deterministic,
            linears=tuple(dict.fromkeys(linears_of(config, is_deterministic=is_deterministic))),
            max_norm_columns=max_norm_columns(config.target) if is_deterministic else 0,
        )

    def variants(self) -> tuple[KernelVariant, ...]:
        """Ordered by name, without repetitions."""
        return unique_variants(self._all_variants())

    def _all_variants(self) -> Iterator[KernelVariant]:
        dtype = torch_dtype(self.dtype)
        yield from library_sampling_variants(dtype, vocab_size=self.vocab_size, max_width=self.max_draft_len + 1)
        if self.max_draft_len:
            has_map = self.draft_vocab_size is not None
            yield from library_draft_variants(
                dtype, vocab_size=self.draft_vocab_size or self.vocab_size, has_map=has_map
            )
        for experts in self.experts:
            yield from experts.variants(self.dtype)
        for deltas in self.deltas:
            yield from deltas.variants(self.dtype)
        if self.feature_size is not None:
            yield previous_rows_variant(dtype, width=self.feature_size, max_requests=self.max_batch_size)
        for latents in self.latents:
            yield from latents.variants(self.dtype)
        for linear in self.linears:
            yield from linear.variants(self.dtype)
        if self.is_deterministic:
            yield from norm_variants(dtype, max_columns=self.max_norm_columns)
        for layer in self.layers:
            page_dtype = torch_dtype(layer.page_dtype)
            yield page_write_variant(
                dtype=dtype,
                page_dtype=page_dtype,
                head_dim=layer.head_dim,
                has_limits=layer.is_drafter,
                max_requests=self.max_batch_size,
            )
            if layer.max_rows > 0:
                yield from attention_variants(
                    dtype=dtype,
                    page_dtype=page_dtype,
                    head_dim=layer.head_dim,
                    has_block=layer.is_drafter,
                    has_softcap=layer.has_softcap,
                    chunk=layer.chunk,
                    max_requests=self.max_batch_size,
                    **self._tiles(layer),
                    first_key=layer.first_key,
                )

    def _tiles(self, layer: LayerKernels) -> dict[str, Any]:
        """With fixed splits one tile serves all rows of the target."""
        dtype = torch_dtype(self.dtype)
        if layer.is_drafter or not self.is_deterministic:
            return {"tiles": _tiles(dtype, layer)}
        known = attention_plan.tiles_of(head_dim=layer.head_dim, dtype=dtype, page_dtype=torch_dtype(layer.page_dtype))
        return {"tiles": (attention_plan.fixed_tile(layer.heads_per_kv, known),), "is_split_fixed": True}


def kernels_of_engine(directory: Path, *, is_deterministic: bool = False) -> tuple[EngineKernels, tuple[str, ...]]:
    """Kernels of an engine directory of any backend, and the architecture of its plans, or of this machine's GPU.

    `is_deterministic`: for such an engine of the same pair; one of TensorRT says itself what it is.

    Raises:
        EngineDirError: the directory is not one, or not whole.
        ConfigError: a head_dim that no kernel has.
    """
    manifest = EngineDir.open(directory).manifest
    is_deterministic |= manifest.tensorrt is not None and manifest.tensorrt.deterministic
    kernels = EngineKernels.of(manifest.pretrained_config, manifest.build_config, is_deterministic=is_deterministic)
    capability = None if manifest.tensorrt is None else manifest.tensorrt.compute_capability
    return kernels, local_architecture() if capability is None else (architecture_of(capability),)


def kernels_of_config(config: BuildConfig, base_dir: Path) -> EngineKernels:
    """Kernels of an engine that is not built yet. Its checkpoints, or their configs alone, are as `build` finds them.

    Raises:
        ConfigError: a limit or a foreign config is wrong, or a head_dim that no kernel has.
        CheckpointError: the tensors or tokenizers are, where they are there.
    """
    from dflash_trt.checkpoint.pair import read_pair
    from dflash_trt.checkpoint.sources import find_checkpoints
    from dflash_trt.compile.description import resolve_limits
    from dflash_trt.compile.quantized import local_capability, plan_quantization

    sources = find_checkpoints(config, base_dir, needs_tensors=False)
    config, paths = sources.config, sources.paths
    pair = read_pair(paths["target"], paths.get("drafter"), drafter_overrides=config.drafter_overrides)
    limits, _ = resolve_limits(config, pair.target, pair.draft)
    pretrained = PretrainedConfig(
        target=pair.target,
        draft=pair.draft,
        dtype=config.dtype,
        mapping=config.mapping,
        quantization=plan_quantization(config, pair, capability=local_capability()).spec(),
    )
    return EngineKernels.of(pretrained, limits, is_deterministic=config.deterministic)


def local_architecture() -> tuple[str, ...]:
    """Of this machine's GPU, if it has one."""
    from dflash_trt.compile.quantized import local_capability

    capability = local_capability()
    return () if capability is None else (architecture_of(f"{capability[0]}.{capability[1]}"),)


def architecture_of(compute_capability: str) -> str:
    """ "9.0" is 90a: from SM90 on, kernels are compiled for one architecture alone."""
    major, minor = compute_capability.split(".")
    return f"{major}{minor}" + ("a" if int(major) >= 9 else "")


def _layers(
    model: DecoderSpec, states: Iterable[LayerState], mapping: Mapping, *, max_rows: int
) -> Iterator[LayerKernels]:
    pages = [pages for state in states if isinstance(pages := state.owner, PagedKv)]
    for gqa, state in zip(model.attentions, pages, strict=True):
        num_kv_heads = mapping.num_kv_heads_of(gqa.num_kv_heads)
        yield LayerKernels(
            is_drafter=model.role == "draft",
            head_dim=state.head_dim,
            page_dtype=state.dtype,
            heads_per_kv=gqa.num_heads // mapping.tp_size // num_kv_heads,
            max_rows=max_rows,
            has_softcap=gqa.softcap is not None,
            chunk=gqa.mask.chunk or NO_CHUNK,
            first_key=gqa.mask.first_key,
        )


def _deltas(states: Iterable[LayerState], max_requests: int, *, is_in_order: bool) -> Iterator[DeltaKernels]:
    for state in states:
        if isinstance(state, Recurrent):
            yield DeltaKernels.of(state, max_requests=max_requests, is_in_order=is_in_order)


def _latents(
    target: TargetSpec, states: Iterable[LayerState], limits: EngineLimits, *, is_split_fixed: bool
) -> Iterator[LatentKernels]:
    pages = [state for state in states if isinstance(state, PagedLatent)]
    for mla, state in zip(target.latents, pages, strict=True):
        yield LatentKernels(
            latent_dim=mla.latent_dim,
            rope_dim=mla.rope_dim,
            nope_dim=mla.nope_dim,
            value_dim=mla.v_head_dim,
            page_dtype=state.dtype,
            page_size=limits.page_size,
            max_requests=limits.max_batch_size,
            is_split_fixed=is_split_fixed,
        )


def _tiles(dtype: torch.dtype, layer: LayerKernels) -> tuple[int, ...]:
    """From that of one row to that of `max_rows`: a tile holds all query heads of a K/V head for some rows."""
    tiles = tiles_of(dtype)

    def tile(num_rows: int) -> int:
        return next((tile for tile in tiles if tile >= num_rows * layer.heads_per_kv), tiles[-1])

    return tuple(x for x in tiles if tile(1) <= x <= tile(layer.max_rows))
