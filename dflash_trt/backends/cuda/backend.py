"""The torch backend on a GPU: the same engines, except formats without a kernel or GPU support."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from dflash_trt.backends.base import (
    Compiler,
    EngineExecutor,
    latent_problems,
    recurrent_problems,
    unsupported_formats,
    wide_head_problems,
)
from dflash_trt.core.errors import problem
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.kernels.launch_rules import HEAD_DIM_GRAIN, MAX_DRAFT_HEAD_DIM, MAX_HEAD_DIM
from dflash_trt.kernels.launching import MAX_CANDIDATES

if TYPE_CHECKING:
    from dflash_trt.backends.torch.process_group import RankGroup
    from dflash_trt.core.config import BuildConfig
    from dflash_trt.engine_dir import EngineDir

FP8_CAPABILITY: Final = (8, 9)  # the first GPUs for which Triton converts FP8


class CudaBackend:
    """Implements `backends.base.Backend`."""

    @property
    def subject(self) -> str:
        return f"engine on {torch.cuda.get_device_name()}"

    def unsupported(
        self, target: TargetSpec, draft: DraftSpec | None, quantization: QuantizationSpec | None, mapping: Mapping
    ) -> list[str]:
        return gpu_problems(target, draft, quantization)

    def compiler(self, config: BuildConfig, base_dir: Path) -> Compiler | None:
        return None

    def open(
        self,
        engine: EngineDir,
        config: RuntimeConfig,
        *,
        rank: int = 0,
        ranks: RankGroup | None = None,
        draft_lens: Sequence[int] | None = None,
    ) -> EngineExecutor:
        from dflash_trt.backends.cuda.executor import TorchGpuExecutor
        from dflash_trt.backends.torch.process_group import ONE_RANK

        return TorchGpuExecutor.open(engine, config, rank=rank, ranks=ranks or ONE_RANK, draft_lens=draft_lens)


def gpu_problems(
    target: TargetSpec,
    draft: DraftSpec | None,
    quantization: QuantizationSpec | None,
    capability: tuple[int, int] | None = None,  # None is this machine's
) -> list[str]:
    """Parts of an engine that GPUs of this compute capability cannot run."""
    problems = list(model_problems(target, draft))
    if quantization is not None:
        problems += format_problems(quantization, capability or torch.cuda.get_device_capability())
    return problems


def model_problems(target: TargetSpec, draft: DraftSpec | None) -> Iterator[str]:
    """A problem for each part of a pair that no kernel computes, whatever the GPU."""
    where, hint = "on a GPU", 'Run this engine with device "cpu".'
    for spec in (target, draft):
        if spec is not None:
            yield from _head_problems(spec)
    yield from wide_head_problems(target, where=where, hint=hint)
    yield from latent_problems(target, where=where, hint=hint)
    yield from _temperature_problems(target)
    yield from _selector_problems(draft)
    yield from recurrent_problems(target, draft, where=where, hint=hint)


def _head_problems(spec: TargetSpec | DraftSpec) -> Iterator[str]:
    hint = 'Run this engine with device "cpu".'
    most = MAX_HEAD_DIM if spec.role == "target" else MAX_DRAFT_HEAD_DIM
    for head_dim in sorted({gqa.head_dim for gqa in spec.attentions}):
        if head_dim % HEAD_DIM_GRAIN or head_dim > most:
            yield problem(
                f"head_dim of the {spec.role}",
                expected=f"a multiple of {HEAD_DIM_GRAIN} up to {most} on a GPU",
                found=str(head_dim),
                hint=hint,
            )


def _temperature_problems(target: TargetSpec) -> Iterator[str]:
    """Refuse attention that norms the queries after their temperature, with RoPE."""
    if any(gqa.temperature is not None and gqa.has_qk_norm for gqa in target.attentions):
        yield problem(
            "temperature of queries",
            expected="layers without a norm of q and k on a GPU",
            found="layers with both",
            hint='Run this engine with device "cpu".',
        )


def _selector_problems(draft: DraftSpec | None) -> Iterator[str]:
    """Refuse a selector of more candidates than the kernels are made for."""
    if draft is not None and draft.selector is not None and draft.selector.top_k > MAX_CANDIDATES:
        yield problem(
            "selector top_k of the drafter",
            expected=f"at most {MAX_CANDIDATES} on a GPU",
            found=str(draft.selector.top_k),
            hint='Run this engine with device "cpu".',
        )


def format_problems(quantization: QuantizationSpec, capability: tuple[int, int]) -> Iterator[str]:
    from dflash_trt.backends.cuda.linear import ACTIVATIONS, WEIGHT_ONLY
    from dflash_trt.formats.registry import weight_format

    yield from unsupported_formats(
        quantization,
        lambda known: known.weight_type in (WEIGHT_ONLY if known.is_weight_only else ACTIVATIONS),
        where=" on a GPU",
        why=" (no GPU kernel yet)",
        hint='Run this engine with device "cpu".',
    )
    for name in sorted(set(quantization.linears.values())):
        known = weight_format(name)
        first = known.first_capability
        if first is not None and capability < first:
            yield problem(
                f"format {name}",
                expected=f"a GPU of compute capability {first[0]}.{first[1]} or newer",
                found=f"{capability[0]}.{capability[1]}",
                hint=f'{known.instead} Or run this engine with device "cpu".',
            )
    if capability < FP8_CAPABILITY and (quantization.target_kv or quantization.draft_kv):
        yield problem(
            "K/V pages",
            expected=f"a GPU of compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer for FP8 pages",
            found=f"{capability[0]}.{capability[1]}",
            hint='Build with kv_cache "none" under quantization, or run this engine with device "cpu".',
        )


BACKEND: Final = CudaBackend()
