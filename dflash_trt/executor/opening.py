"""The executor of an engine directory, by its backend. Imports only the one that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dflash_trt.core.batch import StepExecutor

if TYPE_CHECKING:
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.executor.page_budget import PagePlan


class EngineExecutor(StepExecutor, Protocol):
    """An executor that owns pages."""

    @property
    def page_plan(self) -> PagePlan: ...


def open_executor(
    engine: EngineDir,
    *,
    use_drafter: bool = True,
    kv_cache_bytes: int | None = None,
    kv_cache_free_memory_fraction: float | None = None,
    num_threads: int | None = None,
) -> EngineExecutor:
    """Rank 0, ready to step. `num_threads` is PyTorch's, for the torch backend.

    Raises:
        EngineDirError: this machine cannot run the engine; the message names what is missing.
        CapacityError: the pages of one max_seq_len sequence do not fit.
    """
    if engine.manifest.backend == "tensorrt":
        from dflash_trt.executor.trt_executor import TensorRTExecutor

        return TensorRTExecutor.open(
            engine,
            use_drafter=use_drafter,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_free_memory_fraction=kv_cache_free_memory_fraction,
        )
    from dflash_trt.executor.torch_executor import TorchExecutor

    return TorchExecutor.open(
        engine,
        use_drafter=use_drafter,
        kv_cache_bytes=kv_cache_bytes,
        kv_cache_free_memory_fraction=kv_cache_free_memory_fraction,
        num_threads=num_threads,
    )
