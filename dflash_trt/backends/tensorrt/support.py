"""What the engine directory says about a model, as what the step network needs; refuses what has no lowering."""

from collections.abc import Iterator

from dflash_trt.backends.tensorrt.network import StepNetworkSpec
from dflash_trt.core.errors import BuildError, problem, raise_all
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig


def step_network_spec(config: PretrainedConfig, limits: EngineLimits) -> StepNetworkSpec:
    """Raises BuildError for what neither lowering has yet: experts and attention sinks."""
    require_lowering(config.target)
    return StepNetworkSpec(
        target=config.target,
        draft=config.draft,
        dtype=config.dtype,
        page_size=limits.page_size,
        max_draft_len=limits.max_draft_len if config.draft else 0,
        mapping=config.mapping,
        quantization=config.quantization,
    )


def require_lowering(target: TargetSpec) -> None:
    """Raises BuildError for a target that neither lowering knows: one with experts or attention sinks."""
    raise_all(BuildError, "backend tensorrt", list(_target_problems(target)))


def _target_problems(target: TargetSpec) -> Iterator[str]:
    features = {
        "experts": target.num_expert_layers > 0,
        "attention sinks": any(layer.mixer.has_sinks for layer in target.layers),
        "attention scale": any(layer.mixer.scale is not None for layer in target.layers),
    }
    for feature in (name for name, is_there in features.items() if is_there):
        subject, found = f"target of a TensorRT engine: {feature}", f"a {target.family} target with them"
        yield problem(subject, expected="none", found=found, mend="Build with --backend torch.")
