"""dflash-trt: a target LLM and its DFlash drafter as one engine.

Importing this package loads none of torch, tensorrt, modelopt or transformers.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["LLM", "RuntimeConfig", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from dflash_trt.core.request import SamplingParams
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.serving.llm import LLM


def __getattr__(name: str) -> Any:
    if name == "SamplingParams":
        from dflash_trt.core.request import SamplingParams

        return SamplingParams
    if name == "RuntimeConfig":
        from dflash_trt.core.runtime_config import RuntimeConfig

        return RuntimeConfig
    if name == "LLM":
        from dflash_trt.serving.llm import LLM

        return LLM
    raise AttributeError(f"module 'dflash_trt' has no attribute {name!r}")
