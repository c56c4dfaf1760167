"""The torch backend on a CPU: it runs every engine whose activations it knows how to quantize."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dflash_trt.backends.base import Compiler, EngineExecutor, unsupported_formats
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from dflash_trt.backends.torch.process_group import RankGroup
    from dflash_trt.core.config import BuildConfig
    from dflash_trt.engine_dir import EngineDir


class TorchBackend:
    """Implements `backends.base.Backend`."""

    subject = "backend torch"

    def unsupported(
        self, target: TargetSpec, draft: DraftSpec | None, quantization: QuantizationSpec | None, mapping: Mapping
    ) -> list[str]:
        from dflash_trt.backends.torch.quantized_linear import ACTIVATIONS
        from dflash_trt.formats.int8 import Int8Weight

        return list(
            unsupported_formats(
                quantization,
                lambda known: known.is_weight_only or known.weight_type in (*ACTIVATIONS, Int8Weight),
                hint="Build with --quantization none, or with one of these formats.",
            )
        )

    def compiler(self, config: BuildConfig, base_dir: Path) -> Compiler | None:
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
        from dflash_trt.backends.torch.executor import TorchExecutor
        from dflash_trt.backends.torch.process_group import ONE_RANK

        return TorchExecutor.open(engine, config, rank=rank, ranks=ranks or ONE_RANK)


BACKEND: Final = TorchBackend()
