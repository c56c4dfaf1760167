"""The executor of an engine directory, by its backend. Imports only the one that runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, Protocol

from dflash_trt.core.batch import StepExecutor
from dflash_trt.core.errors import ConfigError, problem

if TYPE_CHECKING:
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.executor.page_budget import PagePlan


Device = Literal["auto", "cpu", "cuda"]


class EngineExecutor(StepExecutor, Protocol):
    """An executor that owns pages, and perhaps processes, which `close` ends."""

    @property
    def page_plan(self) -> PagePlan: ...

    def close(self) -> None: ...


def open_executor(
    engine: EngineDir,
    *,
    use_drafter: bool = True,
    kv_cache_bytes: int | None = None,
    kv_cache_free_memory_fraction: float | None = None,
    num_threads: int | None = None,
    device: Device = "auto",
) -> EngineExecutor:
    """Rank 0, ready to step, with a process for each other rank of the engine, which `close` ends.

    `num_threads` and `device` are the torch backend's; "auto" is the GPU where there is one. With several ranks,
    threads and memory are those of each: by default the ranks share the cores, and on a CPU the memory, evenly.

    Raises:
        ConfigError: "cuda" on a machine whose PyTorch has no GPU, or a GPU without Triton, or fewer GPUs than ranks.
        EngineDirError: this machine cannot run the engine; the message names what is missing.
        CapacityError: the pages of one max_seq_len sequence do not fit.
        RankError: a rank's process did not start.
    """
    if engine.manifest.backend == "tensorrt":
        from dflash_trt.executor.trt_executor import TensorRTExecutor

        return TensorRTExecutor.open(
            engine,
            use_drafter=use_drafter,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_free_memory_fraction=kv_cache_free_memory_fraction,
        )
    if engine.manifest.pretrained_config.mapping.world_size > 1:
        from dflash_trt.executor.ranks import open_ranks

        return open_ranks(
            engine,
            device="cuda" if _runs_on_gpu(device) else "cpu",
            num_threads=num_threads,
            use_drafter=use_drafter,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_free_memory_fraction=kv_cache_free_memory_fraction,
        )
    if _runs_on_gpu(device):
        import torch

        from dflash_trt.executor.torch_gpu import TorchGpuExecutor

        if num_threads is not None:
            torch.set_num_threads(num_threads)  # the CPU still packs and reads steps
        return TorchGpuExecutor.open(
            engine,
            use_drafter=use_drafter,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_free_memory_fraction=kv_cache_free_memory_fraction,
        )
    from dflash_trt.executor.torch_executor import TorchExecutor

    # OpenMP keeps a team of threads for every thread that ever computed something, and lets all teams sleep between
    # two regions, instead of waiting awake, once they are more threads than cores: a small step then takes twice as
    # long. So the weights are prepared in a thread that ends and takes its team along; see docs/benchmarks.md.
    with ThreadPoolExecutor(max_workers=1) as opener:
        return opener.submit(
            TorchExecutor.open,
            engine,
            use_drafter=use_drafter,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_free_memory_fraction=kv_cache_free_memory_fraction,
            num_threads=num_threads,
        ).result()


def _runs_on_gpu(device: Device) -> bool:
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cpu" or (device == "auto" and not has_gpu):
        return False
    if not has_gpu:
        mend = 'Install a PyTorch with CUDA on a machine with an NVIDIA GPU, or use device "cpu".'
        raise ConfigError(problem("device", expected="a CUDA GPU that PyTorch can use", found="none", mend=mend))
    if find_spec("triton") is None:
        mend = 'Install triton 3.6 or newer, or use device "cpu".'
        raise ConfigError(problem("device", expected="Triton, which the GPU's kernels need", found="none", mend=mend))
    return True
