"""What the engine directory says about a model, as what the step network needs; refuses what has no lowering."""

from dflash_trt.core.errors import BuildError, problem
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig
from dflash_trt.network.trt_network import StepNetworkSpec


def step_network_spec(config: PretrainedConfig, limits: EngineLimits) -> StepNetworkSpec:
    """Raises BuildError for FP8 pages, which neither lowering reads yet."""
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
