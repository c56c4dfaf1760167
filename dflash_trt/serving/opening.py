"""Opens an engine directory as an Engine, whose steps run here or in TensorRT-LLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Unpack

from dflash_trt.core.errors import ConfigError
from dflash_trt.serving.engine import Engine

if TYPE_CHECKING:
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.executor.opening import PagePlan
    from dflash_trt.scheduler.config import Policies


class OpenedEngine(Engine, Protocol):
    """An engine ready to start. `config` is resolved.

    `page_plan` is None if another runtime owns the pages.
    """

    @property
    def config(self) -> RuntimeConfig: ...

    @property
    def page_plan(self) -> PagePlan | None: ...


def checked_settings(engine: EngineDir, config: RuntimeConfig, **policies: Unpack[Policies]) -> RuntimeConfig:
    """`config` resolved for this engine on this machine; nothing is loaded.

    Raises:
        ConfigError: a setting or a policy that the engine's runtime does not have; or see `checked_config`.
    """
    if engine.manifest.backend != "tensorrt_llm":
        from dflash_trt.serving.local_engine import checked_config

        return checked_config(engine, config, **policies)
    from dflash_trt.serving.tensorrt_llm.engine import checked_trtllm_config

    for name, policy in policies.items():
        if policy is not None:
            found, hint = type(policy).__name__, "TensorRT-LLM schedules by itself."
            raise ConfigError.about(name, expected="nothing for backend tensorrt_llm", found=found, hint=hint)
    return checked_trtllm_config(engine, config)


def open_engine(engine: EngineDir, config: RuntimeConfig, **policies: Unpack[Policies]) -> OpenedEngine:
    """An engine that is ready to start; `config` is of `checked_settings`."""
    if engine.manifest.backend == "tensorrt_llm":
        from dflash_trt.serving.tensorrt_llm.engine import open_trtllm_engine

        return open_trtllm_engine(engine, config)
    from dflash_trt.serving.local_engine import open_local_engine

    return open_local_engine(engine, config, **policies)
