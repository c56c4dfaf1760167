"""Loading of an engine directory's network, and allocation of its K/V pages, for both torch executors."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_trt.backends.page_budget import PagePlan
from dflash_trt.core.dtype import dtype_name, num_bytes_of, stored_dtype, torch_dtype
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec, engine_states, engine_weights
from dflash_trt.core.model.rope import Rotary
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.state_spec import EngineStates, PagedRows, PagedState, Recurrent, paged
from dflash_trt.core.step_plan import ExecutorLimits, PageWindow
from dflash_trt.core.weight_spec import is_linear, rank_shard
from dflash_trt.engine_dir.manifest import tensor_headers
from dflash_trt.engine_dir.tensor_file import tensor_offsets
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.formats.registry import split_quantized
from dflash_trt.network.ops import Experts, Linear, StackedExperts
from dflash_trt.network.rank_tensors import RankTensors, map_linears, map_parts
from dflash_trt.network.state import Cache, PagedCache, RecurrentCache, RowCache, StepState, paged_cache
from dflash_trt.network.step import Network, bind_network

if TYPE_CHECKING:
    from dflash_trt.engine_dir import EngineDir


@contextmanager
def mapped_weights(engine: EngineDir, rank: int) -> Iterator[dict[str, Tensor]]:
    """One rank's tensors on the CPU, read when they are used.

    At the end, memory of tensors copied into another layout goes back to the system; tensors used later are read again.
    """
    headers = tensor_headers(engine.manifest.pretrained_config)
    with engine.weights_path(rank).open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    tensors = {}
    for name, start in tensor_offsets(engine.weights_path(rank)).items():
        header = headers[name]
        content, dtype = memory[start : start + header.num_bytes], torch_dtype(stored_dtype(header.dtype) or "")
        if start % dtype.itemsize:
            content = content.clone()
        tensors[name] = content.view(dtype).view(header.shape)
    yield tensors
    mapping.madvise(mmap.MADV_DONTNEED)


def load_network(
    engine: EngineDir,
    *,
    rank: int = 0,
    use_drafter: bool = True,
    device: str = "cpu",
    tensors: dict[str, Tensor] | None = None,
    widens_linears: bool = True,
) -> Network[Tensor]:
    """One rank's network, from its file or from its `tensors`; quantized linear layers as they are stored.

    Weights stored in fewer bits than the engine's dtype has are widened, those of linear layers only if
    `widens_linears`.
    """
    manifest = engine.manifest
    mapping = manifest.pretrained_config.mapping.of_rank(rank)
    quantization = manifest.pretrained_config.quantization or QuantizationSpec()
    whole = engine_weights(manifest.target, manifest.draft, quantization)
    table = {name: rank_shard(spec, mapping) for name, spec in whole.items()}
    if tensors is None:
        tensors = _read_tensors(engine, rank, device)
    plain, quantized = split_quantized(tensors, table, quantization.linears)
    dtype, narrow = manifest.pretrained_config.dtype, manifest.pretrained_config.weights_dtype
    for name in plain if narrow is not None else ():
        if widens_linears or not is_linear(table[name], name):
            plain[name] = plain[name].to(torch_dtype(table[name].stored_dtype(dtype)))
    return bind_tensors(manifest.target, manifest.draft if use_drafter else None, plain, quantized, mapping=mapping)


def _read_tensors(engine: EngineDir, rank: int, device: str) -> dict[str, Tensor]:
    tensors = {}
    with safe_open(engine.weights_path(rank), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            # A copy on the CPU, too: the file's own bytes are not aligned as kernels want them.
            tensors[name] = file.get_tensor(name).to(device, copy=True)
            engine.on_read(tensors[name].nbytes)
    return tensors


def bind_tensors(
    target: TargetSpec,
    draft: DraftSpec | None,
    tensors: dict[str, Tensor],
    quantized: dict[str, QuantizedWeight[Tensor]] | None = None,
    *,
    mapping: Mapping | None = None,
) -> Network[Tensor]:
    """Bind one rank's canonical tensors and quantized linear layers to the network; slices are views."""

    def rows(x: Tensor, start: int, stop: int) -> Tensor:
        return x[start:stop]

    rank_tensors = RankTensors(plain=tensors, quantized=quantized or {}, mapping=mapping or Mapping(), slice_rows=rows)
    return bind_network(target, draft, rank_tensors)


def with_linears(
    network: Network[Tensor],
    prepare: Callable[[Linear[Tensor], torch.dtype], Linear[Tensor]],
    *,
    prepare_draft: Callable[[Linear[Tensor], torch.dtype], Linear[Tensor]] | None = None,  # None means as the target's
    dtype: torch.dtype | None = None,  # of activations; None means the network's
    on_read: Callable[[int], None] | None = None,
) -> Network[Tensor]:
    """Convert linear weights to a device's layout; `prepare` gets the dtype of the activations.

    `on_read` is called with the bytes of each that was mapped and so has been read now.
    """
    wanted, prepare_draft = dtype or activation_dtype(network), prepare_draft or prepare

    def prepared(
        convert: Callable[[Linear[Tensor], torch.dtype], Linear[Tensor]], linear: Linear[Tensor]
    ) -> Linear[Tensor]:
        result = convert(linear, wanted)
        if on_read is not None:
            on_read(_num_bytes(linear))
        return result

    return replace(
        network,
        target_weights=map_linears(network.target_weights, partial(prepared, prepare)),
        drafter=map_linears(network.drafter, partial(prepared, prepare_draft)),
    )


def with_experts(
    network: Network[Tensor], prepare: Callable[[StackedExperts[Tensor]], Experts[Tensor]]
) -> Network[Tensor]:
    """Experts in the form that a backend computes with."""
    return map_parts(network, StackedExperts, prepare)


def _num_bytes(linear: Linear[Tensor]) -> int:
    weight = linear.weight
    return (
        sum(part.nbytes for part in weight.tensors().values()) if isinstance(weight, QuantizedWeight) else weight.nbytes
    )


def activation_dtype(network: Network[Tensor]) -> torch.dtype:
    """The engine's dtype: of pages that are not FP8, and of activations that no kernel widens."""
    return network.target_weights.embedding.dtype


def rotaries_of(network: Network[Tensor]) -> tuple[Rotary, ...]:
    """Rotaries of the target and its drafter, if any."""
    return network.target.rotaries + (network.draft.rotaries if network.draft else ())


def limits_of(
    network: Network[Tensor],
    plan: PagePlan,
    *,
    max_batch_size: int,
    max_num_tokens: int,
    max_draft_len: int,
    has_confidence: bool = False,
) -> ExecutorLimits:
    """Limits of steps of this network on these pages; max_draft_len is 0 without a drafter."""
    return ExecutorLimits(
        max_batch_size=max_batch_size,
        max_seq_len=plan.max_seq_len,
        max_num_tokens=max_num_tokens,
        max_draft_len=max_draft_len if network.draft else 0,
        page_size=plan.page_size,
        num_pages=plan.num_pages,
        draft_topk=network.draft.draft_topk if network.draft else 0,
        page_windows=plan.page_windows,
        num_snapshots=plan.num_snapshots if network.target.is_recurrent else None,
        num_host_pages=plan.num_host_pages,
        num_host_snapshots=plan.num_host_snapshots,
        has_draft_confidence=network.draft is not None and (has_confidence or network.draft.has_confidence),
    )


def allocate_state(
    states: EngineStates,  # one rank's
    *,
    num_pages: int,
    page_size: int,
    num_slots: int = 1,
    device: torch.device | None = None,
    page_windows: Sequence[PageWindow] = (),
) -> StepState[Tensor]:
    """Zeros; layers of one model share an allocation. Host memory is used when a page is first written.

    Layers whose window is none of `page_windows` have `num_pages`.
    """
    groups: dict[int | None, tuple[int, int]] = {None: (0, num_pages)}
    groups |= {group.window: (index, group.blank_page + 1) for index, group in enumerate(page_windows, start=1)}

    def group_of(spec: PagedState) -> tuple[int, int]:
        """Page group of the layer, and its number of pages."""
        return groups.get(spec.window, groups[None])

    def caches(specs: Sequence[PagedState]) -> Iterator[PagedCache[Tensor]]:
        shapes = [(group_of(spec)[1], *spec.page_shape(page_size)) for spec in specs]
        dtypes = [torch_dtype(spec.dtype) for spec in specs]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        parts = torch.split(_zeros(sum(sizes), device), sizes) if specs else ()
        for part, dtype, shape, spec in zip(parts, dtypes, shapes, specs, strict=True):
            yield paged_cache(part.view(dtype).view(shape), spec, group_of(spec)[0])

    pages = {cache.spec.name: cache for cache in caches(paged(states.target))}
    target_kv = [
        _recurrent_cache(spec, num_slots, device) if isinstance(spec, Recurrent) else pages[spec.owner.name]
        for spec in states.target
    ]
    draft_kv = [cache for cache in caches(paged(states.draft)) if isinstance(cache, Cache)]
    features = [
        _row_cache(spec, (num_pages, *spec.page_shape(page_size)), device)
        for spec in states.draft
        if isinstance(spec, PagedRows)
    ]
    return StepState(target_kv=target_kv, draft_kv=draft_kv, draft_features=next(iter(features), None))


def _row_cache(spec: PagedRows, shape: tuple[int, ...], device: torch.device | None) -> RowCache[Tensor]:
    dtype = torch_dtype(spec.dtype)
    return RowCache(_zeros(math.prod(shape) * dtype.itemsize, device).view(dtype).view(shape), spec)


def _recurrent_cache(spec: Recurrent, num_slots: int, device: torch.device | None) -> RecurrentCache[Tensor]:
    tensors = {}
    for name, (shape, dtype) in spec.tensors().items():
        size = num_slots * math.prod(shape) * num_bytes_of(dtype)
        tensors[name] = _zeros(size, device).view(torch_dtype(dtype)).view(num_slots, *shape)
    return RecurrentCache(tensors, spec)


def states_of(network: Network[Tensor], quantization: QuantizationSpec | None) -> EngineStates:
    """States of one rank's network."""
    dtype = dtype_name(activation_dtype(network))
    assert dtype in ("float32", "bfloat16", "float16")
    whole = engine_states(network.target, network.draft, dtype=dtype, quantization=quantization)
    return whole.shard(network.mapping)


def _zeros(num_bytes: int, device: torch.device | None) -> Tensor:
    """torch.zeros writes every byte on a CPU; the kernel's zero pages cost nothing until they are written."""
    if device is not None and device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
