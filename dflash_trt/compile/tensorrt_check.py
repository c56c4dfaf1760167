"""`dflash-trt build --check`: the whole network through TensorRT-RTX's CPU-only builder, before any GPU is rented.

The real front end sees every layer, shape, dtype and profile of the configuration. Weights are blank memory of the
right shapes (the checkpoints' tensors are proven, not read), so the plan is thrown away; plugins are replaced by plain
layers, which have the same inputs and outputs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from dflash_trt.backends.tensorrt.builder import BuiltPlan, PlanOptions, StepsCallback, build_plan
from dflash_trt.backends.tensorrt.host_weights import host_quantized, host_rope_tables, host_tensors
from dflash_trt.backends.tensorrt.support import step_network_spec
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.compile.limits import resolve_limits
from dflash_trt.compile.quantized import plan_quantization
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.dtype import stored_dtype, torch_dtype
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.mapping import Mapping
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig
from dflash_trt.engine_dir.manifest import tensor_headers
from dflash_trt.formats.registry import split_quantized

CHECK_CAPABILITY: Final = "SM120"  # the CPU-only builder has neither SM90 nor SM100; this one knows every format


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Report of the built network and its configuration."""

    built: BuiltPlan
    limits: EngineLimits
    compute_capability: str
    notes: tuple[str, ...]


def check_config(
    config: BuildConfig, *, base_dir: Path, progress: StepsCallback = lambda phase, done, total: None
) -> CheckReport:
    """Build what `config` describes, on this CPU, and report it.

    Raises:
        ConfigError: a limit or a foreign config is wrong.
        CheckpointError: the tensors or tokenizers are.
        BuildError: TensorRT-RTX is missing, or TensorRT refuses the network.
    """
    if config.tp_size > 1:
        hint = "Leave tp_size out, or leave --check out."
        raise ConfigError.about("--check", expected="tp_size 1", found=str(config.tp_size), hint=hint)
    drafter = None if config.drafter is None else base_dir / config.drafter
    pair = open_pair(base_dir / config.target, drafter, drafter_overrides=config.drafter_overrides)
    limits, notes = resolve_limits(config, pair.target, pair.draft)
    quantization = plan_quantization(config, pair).spec()
    pretrained = PretrainedConfig(
        target=pair.target,
        draft=pair.draft,
        dtype=config.dtype,
        mapping=Mapping(),
        quantization=None if quantization.is_empty else quantization,
    )
    spec = step_network_spec(pretrained, limits)
    plain, quantized = split_quantized(
        blank_weights(pretrained), plan_quantization(config, pair).table(), quantization.linears
    )
    built = build_plan(
        spec,
        limits,
        host_tensors(plain),
        quantized=host_quantized(quantized),
        rope_tables=host_rope_tables(spec, max_seq_len=limits.max_seq_len),
        options=PlanOptions(flavor="tensorrt_rtx", plugins="layers", compute_capability=CHECK_CAPABILITY),
        progress=progress,
    )
    return CheckReport(built=built, limits=limits, compute_capability=CHECK_CAPABILITY, notes=(*notes, *pair.notes))


def blank_weights(config: PretrainedConfig) -> dict[str, Tensor]:
    """Zeros that cost address space only until someone writes them; scales are 1, so that nothing divides by 0."""
    tensors = {}
    for name, header in tensor_headers(config).items():
        make = torch.ones if name.endswith("_scale") and header.dtype == "F32" else torch.zeros
        tensors[name] = make(header.shape, dtype=torch_dtype(stored_dtype(header.dtype) or ""))
    return tensors
