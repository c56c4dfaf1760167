"""Kernel times that NVIDIA measured, from the package aiconfigurator-core (Apache-2.0; the extra `silicon`).

The package has tables by GPU and by the engine whose kernels ran (TensorRT-LLM, SGLang, vLLM), and interpolates in them
itself. A time is that of the fastest kernel that was measured in any of them; where none was, the first estimate of the
package; where it has neither, None, for the caller to assume. Times are seconds of one rank.

Verify blocks are in no table. Their attention is the longer of a decode step over the same keys, which moves the same
bytes, and of a prompt of as many tokens behind the same keys, which computes as much. Latents have one key for all
heads, so that t tokens of h heads are a decode step of t x h heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.model.mla import Mla
from dflash_trt.plan.attention_work import MixingWork
from dflash_trt.plan.exchanges import Exchange
from dflash_trt.plan.kernel_fits import KernelTime
from dflash_trt.plan.step_work import Product

if TYPE_CHECKING:
    from aiconfigurator_core.sdk.engine import EngineHandle

_PACKAGE: Final = "aiconfigurator-core"
EXTRA_HINT: Final = "pip install 'dflash-trt[silicon]' brings kernel times that NVIDIA measured."
_SYSTEMS: Final = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm"}
_ENGINES: Final = {"trtllm": "TensorRT-LLM", "sglang": "SGLang", "vllm": "vLLM"}
# The modes of the package that stand for a weight format of ours, best first. Its FP8 weights of static scales are its
# GEMM without the quantization of activations, which our norms do; NVFP4's has it within.
_GEMM_MODES: Final = {None: "bfloat16", "fp8": "fp8_static", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}
_EXPERT_MODES: Final = {
    None: ("bfloat16",),
    "fp8": ("fp8",),
    "fp8_block": ("fp8_block",),
    "nvfp4": ("nvfp4",),
    "int4": ("int4_wo",),
    "mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4"),
}
# Tokens are routed unevenly in real texts; a table has one of these.
_ROUTINGS: Final = ("power_law_1.01", "power_law_1.2", "balanced")
_MEASURED: Final = "silicon"  # the package's word for a time that rests on rows of the table alone
_BELOW_GRID: Final = 256  # output features for which the tables have no rows
_MOST_LATENT_HEADS: Final = 128


class KernelTables:
    """The tables of one GPU."""

    def __init__(self, gpu: str) -> None:
        from aiconfigurator_core.sdk import common, operations
        from aiconfigurator_core.sdk.engine import EngineHandle
        from aiconfigurator_core.sdk.perf_database import get_database

        self._common, self._operations = common, operations
        self._handles: list[tuple[str, EngineHandle]] = []
        for engine, name in _ENGINES.items():
            database = get_database(_SYSTEMS[gpu], engine, "current")
            if database is not None:
                version = f"{name} {database.version}"
                self._handles.append((version, EngineHandle.for_database(database)))
        self._times: dict[tuple[Any, ...], KernelTime | None] = {}

    def product(self, item: Product) -> KernelTime | None:
        """All GEMMs of the item, or all layers of its experts."""
        if item.experts is not None:
            return _times(item.count, self._experts(item))
        mode = _GEMM_MODES.get(item.format)
        if item.shape is None or mode is None:
            return None
        n, k = item.shape
        options = {"low_precision_input": item.format is not None, "below_grid_sol": n < _BELOW_GRID}
        quant = getattr(self._common.GEMMQuantMode, mode)
        return _times(item.count, self._tokens("GEMM", (n, k, quant), max(1, round(item.rows)), options))

    def mixing(self, item: MixingWork) -> KernelTime | None:
        """All calls of the item's mixers."""
        by_kind: dict[str, Callable[..., KernelTime | None]] = {
            "gqa": self._attention,
            "mla": self._latents,
            "gated_delta": self._deltas,
        }
        if item.mixer is None or item.mixer.kind not in by_kind:
            return None
        of_kind = by_kind[item.mixer.kind]
        is_block = item.num_tokens <= item.block_size
        found = []
        if is_block.any():
            tokens, seen = int(item.num_tokens[is_block].max()), round(float(np.mean(item.num_seen[is_block])))
            found.append(of_kind(item, int(is_block.sum()), tokens, seen, is_prompt=False))
        for tokens, seen in zip(item.num_tokens[~is_block].tolist(), item.num_seen[~is_block].tolist(), strict=True):
            found.append(of_kind(item, 1, tokens, seen, is_prompt=True))
        return _times(item.times, _sum(found))

    def exchange(self, item: Exchange, num_ranks: int) -> KernelTime | None:
        """All collectives of the item."""
        rows = max(1, item.rows)
        if item.kind == "all_reduce":
            return _times(item.count, self._tokens("CustomAllReduce", (item.features, num_ranks), rows))
        half = self._common.CommQuantMode.half
        kind = item.kind.replace("_to_", "to")
        return _times(item.count, self._tokens("NCCL", (kind, item.features, num_ranks, half), rows))

    def _experts(self, item: Product) -> KernelTime | None:
        assert item.experts is not None
        experts, moe = item.experts, item.experts.moe
        sizes = (experts.hidden_size, moe.intermediate_size, moe.num_experts_per_token, moe.num_experts)
        for mode in _EXPERT_MODES.get(item.format, ()):
            quant = getattr(self._common.MoEQuantMode, mode)
            for routing in _ROUTINGS:
                words = (*sizes, experts.moe_tp_size, experts.ep_size, quant, routing, 1)
                if (found := self._tokens("MoE", words, max(1, experts.num_tokens))) is not None:
                    return found
        return None

    def _attention(self, item: MixingWork, batch: int, tokens: int, seen: int, *, is_prompt: bool) -> KernelTime | None:
        gqa, kv = cast(Gqa, item.mixer), self._kv_mode(item)
        heads, options = (gqa.num_heads, gqa.num_kv_heads, kv), {"head_size": gqa.head_dim}
        if gqa.mask.span is not None:
            options["window_size"] = gqa.mask.span
        plain = self._common.FMHAQuantMode.bfloat16
        found = []
        if not is_prompt:
            found.append(self._decode("GenerationAttention", heads, batch, seen + tokens, options))
        if tokens > 1:
            found.append(self._prompt("ContextAttention", (*heads, plain), batch, tokens, seen, options))
        return _longest(found)

    def _latents(self, item: MixingWork, batch: int, tokens: int, seen: int, *, is_prompt: bool) -> KernelTime | None:
        mla, kv, plain = cast(Mla, item.mixer), self._kv_mode(item), self._common.FMHAQuantMode.bfloat16
        if is_prompt:
            return self._prompt("ContextMLA", (mla.num_heads, kv, plain), batch, tokens, seen)
        # Where ranks divide positions, the heads of each are as those of another request over as many keys.
        heads, requests, keys = mla.num_heads * tokens, batch * item.num_parts, -(-(seen + tokens) // item.num_parts)
        known = min(_MOST_LATENT_HEADS, 1 << (heads - 1).bit_length())
        bmm = self._common.GEMMQuantMode.bfloat16
        return _sum(
            [
                _times(max(1.0, heads / known), self._decode("GenerationMLA", (known, kv), requests, keys)),
                *(self._tokens("MLABmm", (mla.num_heads, bmm, is_pre), batch * tokens) for is_pre in (True, False)),
            ]
        )

    def _deltas(self, item: MixingWork, batch: int, tokens: int, seen: int, *, is_prompt: bool) -> KernelTime | None:
        """The convolution and the recurrence."""
        del seen
        net = cast(GatedDelta, item.mixer)
        # The hidden size is no key of the tables.
        sizes = (
            net.k_size,
            net.num_key_heads,
            net.key_head_dim,
            net.num_value_heads,
            net.value_head_dim,
            net.conv_size,
        )
        options = {"mamba_ssm_dtype": "float32"}
        found = []
        if not is_prompt:
            kernels = ("causal_conv1d_update", "fused_sigmoid_gating_delta_rule_update")
            words = [(name, "generation", *sizes) for name in kernels]
            once = _sum([self._decode("GDNKernel", each, batch, 1, options) for each in words])
            found.append(_times((1 + tokens) / 2, once))
        else:
            kernels = ("causal_conv1d_fn", "chunk_gated_delta_rule")
            words = [(name, "context", *sizes) for name in kernels]
            found.append(_sum([self._prompt("GDNKernel", each, batch, tokens, 0, options) for each in words]))
        return _longest(found)

    def _kv_mode(self, item: MixingWork) -> Any:
        modes = self._common.KVCacheQuantMode
        return modes.fp8 if item.kv_itemsize == 1 else modes.bfloat16

    def _tokens(
        self, operation: str, words: tuple[Any, ...], rows: int, options: Mapping[str, Any] | None = None
    ) -> KernelTime | None:
        return self._time(operation, words, options or {}, is_context=True, batch_size=1, s=1, x=rows)

    def _decode(
        self, operation: str, words: tuple[Any, ...], batch: int, length: int, options: Mapping[str, Any] | None = None
    ) -> KernelTime | None:
        return self._time(operation, words, options or {}, is_context=False, batch_size=batch, s=max(1, length))

    def _prompt(
        self,
        operation: str,
        words: tuple[Any, ...],
        batch: int,
        tokens: int,
        seen: int,
        options: Mapping[str, Any] | None = None,
    ) -> KernelTime | None:
        return self._time(operation, words, options or {}, is_context=True, batch_size=batch, s=tokens, prefix=seen)

    def _time(
        self, operation: str, words: tuple[Any, ...], options: Mapping[str, Any], **shape: Any
    ) -> KernelTime | None:
        key = (operation, *words, *options.values(), *shape.values())
        if key not in self._times:
            self._times[key] = self._measured(operation, words, options, shape)
        return self._times[key]

    def _measured(
        self, operation: str, words: tuple[Any, ...], options: Mapping[str, Any], shape: Mapping[str, Any]
    ) -> KernelTime | None:
        from aiconfigurator_core.sdk.engine import build_ops_json
        from aiconfigurator_core.sdk.errors import (
            InterpolationDataNotAvailableError,
            MissingSystemFlopsError,
            PerfDataNotAvailableError,
        )

        asked = build_ops_json([getattr(self._operations, operation)("kernel", 1.0, *words, **options)])
        found = []
        for version, handle in self._handles:
            try:
                [(_, milliseconds, _, source)] = handle.evaluate_ops_json(asked, **shape)
            except (PerfDataNotAvailableError, InterpolationDataNotAvailableError, MissingSystemFlopsError):
                continue
            found.append((source != _MEASURED, milliseconds, version))
        measured = [item for item in found if not item[0]]
        if not found:
            return None
        _, milliseconds, version = min(measured) if measured else found[0]
        return KernelTime(seconds=1e-3 * milliseconds, source=version)


def package() -> str:
    """The package and its version."""
    return f"{_PACKAGE} {metadata.version(_PACKAGE)}"


@cache
def kernel_tables(gpu: str) -> KernelTables | None:
    """The tables of a GPU of `dflash_trt.plan.gpus`; None without the extra, or where the package lacks the GPU."""
    if gpu not in _SYSTEMS or find_spec("aiconfigurator_core") is None:
        return None
    return KernelTables(gpu)


def _times(factor: float, item: KernelTime | None) -> KernelTime | None:
    return None if item is None else KernelTime(factor * item.seconds, item.source)


def _sum(items: Sequence[KernelTime | None]) -> KernelTime | None:
    """None where one is."""
    known = [item for item in items if item is not None]
    if not known or len(known) < len(items):
        return None
    return KernelTime(sum(item.seconds for item in known), known[0].source)


def _longest(items: Sequence[KernelTime | None]) -> KernelTime | None:
    """Of those that were measured."""
    return max((item for item in items if item is not None), key=lambda item: item.seconds, default=None)
