"""The TensorRT backend: a plan per rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dflash_trt.backends.base import Compiler, EngineExecutor
from dflash_trt.backends.tensorrt.support import unsupported_problems
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from dflash_trt.backends.torch.process_group import RankGroup
    from dflash_trt.core.config import BuildConfig
    from dflash_trt.engine_dir import EngineDir


class TensorRTBackend:
    """Implements `backends.base.Backend`."""

    subject = "backend tensorrt"

    def unsupported(
        self, target: TargetSpec, draft: DraftSpec | None, quantization: QuantizationSpec | None, mapping: Mapping
    ) -> list[str]:
        return unsupported_problems(target, draft, quantization, mapping=mapping)

    def compiler(self, config: BuildConfig, base_dir: Path) -> Compiler | None:
        from dflash_trt.backends.tensorrt.build_rank import PlanCompiler, plan_options

        return PlanCompiler(plan_options(config, base_dir))

    def open(
        self,
        engine: EngineDir,
        config: RuntimeConfig,
        *,
        rank: int = 0,
        ranks: RankGroup | None = None,
        draft_lens: Sequence[int] | None = None,
    ) -> EngineExecutor:
        from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
        from dflash_trt.backends.torch.process_group import ONE_RANK

        library = None if config.plugin_library is None else Path(config.plugin_library)
        return TensorRTExecutor.open(
            engine, config, rank=rank, ranks=ranks or ONE_RANK, draft_lens=draft_lens, plugin_library=library
        )


BACKEND: Final = TensorRTBackend()
