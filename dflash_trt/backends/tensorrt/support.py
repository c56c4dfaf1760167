"""Converts an engine directory's config to a step network spec; refuses features without a lowering."""

from collections.abc import Iterator

from dflash_trt.backends.base import latent_problems, recurrent_problems, unsupported_formats, wide_head_problems
from dflash_trt.backends.tensorrt.network import StepNetworkSpec
from dflash_trt.backends.tensorrt.quantized_linear import GEMMS
from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.errors import BuildError, problem, raise_all
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.kernels.launch_rules import MAX_HEAD_DIM


def step_network_spec(config: PretrainedConfig, limits: EngineLimits) -> StepNetworkSpec:
    """Raises BuildError for what the backend does not support."""
    problems = unsupported_problems(config.target, config.draft, config.quantization, config.dtype, config.mapping)
    raise_all(BuildError, "backend tensorrt", problems)
    return network_spec(config, limits)


def network_spec(config: PretrainedConfig, limits: EngineLimits) -> StepNetworkSpec:
    """The step network of the rank that `config.mapping` says."""
    return StepNetworkSpec(
        target=config.target,
        draft=config.draft,
        dtype=config.dtype,
        page_size=limits.page_size,
        max_draft_len=limits.max_draft_len if config.draft else 0,
        page_windows=config.states().windows(limits.max_seq_len + limits.max_draft_len),
        mapping=config.mapping,
        quantization=config.quantization,
    )


def unsupported_problems(
    target: TargetSpec,
    draft: DraftSpec | None,
    quantization: QuantizationSpec | None,
    dtype: FloatDType | None = None,
    mapping: Mapping = Mapping(),  # noqa: B008  (frozen)
) -> list[str]:
    """Problems for features that the backend does not support; of a `dtype`, if it is known already."""
    where, back = "in a TensorRT engine", "Build with --backend torch."
    models = [
        *recurrent_problems(target, draft, where=where, hint=back),
        *latent_problems(target, where=where, hint=back),
        *wide_head_problems(target, where=where, hint=back),
        *_head_problems(target, hint=back),
    ]
    hint = "Build with one of these formats, or with --backend torch."
    problems = list(
        unsupported_formats(quantization, lambda known: known.weight_type in (*GEMMS, Int8Weight), hint=hint)
    )
    if dtype == "float16" and quantization is not None and "mxfp4" in quantization.linears.values():
        hint = "Its scales are powers of two that float16 does not reach: build with --dtype bfloat16."
        problems.append(problem("dtype of weights in mxfp4", expected="bfloat16 or float32", found=dtype, hint=hint))
    return [*models, *problems]


def _head_problems(target: TargetSpec, *, hint: str) -> Iterator[str]:
    for head_dim in sorted({gqa.head_dim for gqa in target.attentions if gqa.head_dim > MAX_HEAD_DIM}):
        expected = f"at most {MAX_HEAD_DIM} in a TensorRT engine"
        yield problem("head_dim of the target", expected=expected, found=str(head_dim), hint=hint)
