"""What the engine directory says about a model, as what the step network needs; refuses what has no lowering."""

from collections.abc import Iterator

from dflash_trt.core.errors import BuildError, problem, raise_all
from dflash_trt.core.model_spec import TargetSpec
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig
from dflash_trt.network.trt_network import StepNetworkSpec


def step_network_spec(config: PretrainedConfig, limits: EngineLimits) -> StepNetworkSpec:
    """Raises BuildError for what neither lowering has yet: FP8 pages, experts, attention sinks."""
    problems = list(_target_problems(config.target))
    raise_all(BuildError, "backend tensorrt", problems)
    quantization = config.quantization
    if quantization is not None and (quantization.target_kv is not None or quantization.draft_kv is not None):
        raise BuildError(
            problem(
                "K/V pages of a TensorRT engine",
                expected=f"the engine's dtype ({config.dtype})",
                found="FP8",
                mend="Set kv_cache and draft_kv_cache to none, or build with --backend torch.",
            )
        )
    return StepNetworkSpec(
        target=config.target,
        draft=config.draft,
        dtype=config.dtype,
        page_size=limits.page_size,
        max_draft_len=limits.max_draft_len if config.draft else 0,
        mapping=config.mapping,
    )


def _target_problems(target: TargetSpec) -> Iterator[str]:
    features = {"experts": target.moe is not None, "attention sinks": target.has_sinks}
    for feature in (name for name, is_there in features.items() if is_there):
        subject, found = f"target of a TensorRT engine: {feature}", f"a {target.family} target with them"
        yield problem(subject, expected="none", found=found, mend="Build with --backend torch.")
