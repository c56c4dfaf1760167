"""The TensorRT-LLM backend: checks what it could not load. It runs requests: `serving/tensorrt_llm`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dflash_trt.backends.base import Compiler, EngineExecutor
from dflash_trt.backends.tensorrt_llm.constraints import config_problems, drafter_problems, quantization_problems
from dflash_trt.core.errors import BuildError, EngineDirError, raise_all
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from dflash_trt.backends.torch.process_group import RankGroup
    from dflash_trt.core.config import BuildConfig
    from dflash_trt.engine_dir import EngineDir


class TensorRTLLMBackend:
    """Implements `backends.base.Backend`."""

    subject = "backend tensorrt_llm"

    def unsupported(
        self, target: TargetSpec, draft: DraftSpec | None, quantization: QuantizationSpec | None, mapping: Mapping
    ) -> list[str]:
        problems = [] if draft is None else list(drafter_problems(draft))
        if quantization is not None:
            is_eagle3 = draft is not None and draft.algorithm == "eagle3"
            problems += quantization_problems(quantization, is_eagle3=is_eagle3)
        return problems

    def compiler(self, config: BuildConfig, base_dir: Path) -> Compiler | None:
        """TensorRT-LLM compiles nothing; the options of a build that it does not know are refused."""
        raise_all(BuildError, self.subject, list(config_problems(config)))
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
        """Raises EngineDirError: its scheduler and steps are TensorRT-LLM's own."""
        raise EngineDirError.about(
            f"engine directory {engine.path}",
            expected="an engine of backend torch or tensorrt, whose steps run in this process",
            found="one of backend tensorrt_llm",
            hint="Use `dflash-trt run`, `serve` or LLM, or build with --backend torch.",
        )


BACKEND: Final = TensorRTLLMBackend()
