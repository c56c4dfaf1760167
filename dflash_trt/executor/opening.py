"""The executor of an engine directory, by its backend. Imports only the one that runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, Protocol

from dflash_trt.core.batch import StepExecutor
from dflash_trt.core.errors import ConfigError, EngineDirError, problem, raise_all

if TYPE_CHECKING:
    from dflash_trt.backends.page_budget import PagePlan
    from dflash_trt.core.quantization import QuantizationSpec
    from dflash_trt.engine_dir import EngineDir


Device = Literal["auto", "cpu", "cuda"]
FP8_CAPABILITY = (8, 9)  # of a GPU: the first for which Triton converts FP8


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
    draft_lens: Sequence[int] | None = None,
) -> EngineExecutor:
    """Rank 0, ready to step, with a process for each other rank of the engine, which `close` ends.

    `num_threads` and `device` are the torch backend's; "auto" is the GPU where there is one. With several ranks,
    threads and memory are those of each: by default the ranks share the cores, and on a CPU the memory, evenly. Cores
    and memory are what affinity and cgroups leave of the host's. `draft_lens` are the K that steps will have: a GPU
    compiles and captures them now. None: the engine's largest.

    Raises:
        ConfigError: "cuda" on a machine whose PyTorch has no GPU, or a GPU without Triton, or fewer GPUs than ranks.
        EngineDirError: this machine cannot run the engine; the message names what is missing.
        CapacityError: the pages of one max_seq_len sequence do not fit.
        RankError: a rank's process did not start.
    """
    if engine.manifest.backend == "tensorrt":
        from dflash_trt.backends.tensorrt.executor import TensorRTExecutor

        return TensorRTExecutor.open(
            engine,
            use_drafter=use_drafter,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_free_memory_fraction=kv_cache_free_memory_fraction,
        )
    runs_on_gpu = _runs_on_gpu(device)
    if runs_on_gpu:
        _check_formats(engine)
    if engine.manifest.pretrained_config.mapping.world_size > 1:
        from dflash_trt.executor.ranks.executor import open_ranks

        return open_ranks(
            engine,
            device="cuda" if runs_on_gpu else "cpu",
            num_threads=num_threads,
            use_drafter=use_drafter,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_free_memory_fraction=kv_cache_free_memory_fraction,
            draft_lens=draft_lens,
        )
    if runs_on_gpu:
        import torch

        from dflash_trt.backends.cuda.executor import TorchGpuExecutor
        from dflash_trt.executor.threads import default_num_threads

        # The CPU still packs and reads steps.
        torch.set_num_threads(default_num_threads() if num_threads is None else num_threads)
        return TorchGpuExecutor.open(
            engine,
            use_drafter=use_drafter,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_free_memory_fraction=kv_cache_free_memory_fraction,
            draft_lens=draft_lens,
        )
    from dflash_trt.backends.torch.executor import TorchExecutor
    from dflash_trt.executor.threads import default_num_threads, run_in_thread

    threads = default_num_threads() if num_threads is None else num_threads
    return run_in_thread(
        lambda: TorchExecutor.open(
            engine,
            use_drafter=use_drafter,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_free_memory_fraction=kv_cache_free_memory_fraction,
            num_threads=threads,
        )
    )


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


def _check_formats(engine: EngineDir) -> None:
    """What no kernel of a GPU, or of this GPU, computes is refused before anything is loaded.

    Raises:
        EngineDirError: every format that the GPU does not have.
    """
    import torch

    quantization = engine.manifest.pretrained_config.quantization
    capability = torch.cuda.get_device_capability()
    problems = [] if quantization is None else list(_format_problems(quantization, capability))
    raise_all(EngineDirError, f"engine on {torch.cuda.get_device_name()}", problems)


def _format_problems(quantization: QuantizationSpec, capability: tuple[int, int]) -> Iterator[str]:
    quantized = sorted(name for name, weight_format in quantization.linears.items() if weight_format == "nvfp4")
    if quantized:
        yield problem(
            "linear layers",
            expected="fp8, nvfp4_w4a16 or unquantized weights on a GPU",
            found=f"nvfp4 (4-bit activations, no GPU kernel yet) in {quantized[0]} and {len(quantized) - 1} more",
            mend='Build with --quantization nvfp4_w4a16 or fp8, or run this engine with device "cpu".',
        )
    if capability < FP8_CAPABILITY and (quantization.target_kv or quantization.draft_kv):
        yield problem(
            "K/V pages",
            expected=f"a GPU of compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer for FP8 pages",
            found=f"{capability[0]}.{capability[1]}",
            mend='Build with kv_cache "none" under quantization, or run this engine with device "cpu".',
        )
