"""The TensorRT backend: one rank, compiled into a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dflash_trt.backends.base import CompiledRank, CompileRank, EngineExecutor, StepsCallback
from dflash_trt.backends.tensorrt.support import unsupported_problems
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from dflash_trt.backends.torch.process_group import RankGroup
    from dflash_trt.core.config import BuildConfig
    from dflash_trt.engine_dir import EngineDir, EngineLimits, PretrainedConfig


class TensorRTBackend:
    """Implements `backends.base.Backend`."""

    subject = "backend tensorrt"

    def unsupported(
        self, target: TargetSpec, draft: DraftSpec | None, quantization: QuantizationSpec | None, mapping: Mapping
    ) -> list[str]:
        return unsupported_problems(target, quantization, mapping)

    def compiler(self, config: BuildConfig, base_dir: Path) -> CompileRank | None:
        from dflash_trt.backends.tensorrt import build_rank

        options = build_rank.plan_options(config, base_dir)

        def compile_rank(
            weights_file: Path, pretrained: PretrainedConfig, limits: EngineLimits, progress: StepsCallback
        ) -> CompiledRank:
            built, record = build_rank.build_rank_plan(
                weights_file, pretrained, limits, options=options, progress=progress
            )
            return CompiledRank(memoryview(built.plan), record)

        return compile_rank

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

        assert ranks is None, "several ranks are unsupported"

        return TensorRTExecutor.open(engine, config, draft_lens=draft_lens)


BACKEND: Final = TensorRTBackend()
