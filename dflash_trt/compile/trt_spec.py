"""What the engine directory says about a model, as what the step network needs."""

from dflash_trt.engine_dir import EngineLimits, PretrainedConfig
from dflash_trt.network.trt_network import StepNetworkSpec


def step_network_spec(config: PretrainedConfig, limits: EngineLimits) -> StepNetworkSpec:
    return StepNetworkSpec(
        target=config.target,
        draft=config.draft,
        dtype=config.dtype,
        page_size=limits.page_size,
        max_draft_len=limits.max_draft_len if config.draft else 0,
        mapping=config.mapping,
        quantization=config.quantization,
    )
