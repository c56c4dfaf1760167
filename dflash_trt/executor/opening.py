"""The executor of an engine directory, by its backend. Imports only the one that runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from dflash_trt.core.batch import StepExecutor
from dflash_trt.core.errors import ConfigError, EngineDirError, problem, raise_all
from dflash_trt.core.runtime_config import Device, RuntimeConfig

if TYPE_CHECKING:
    from dflash_trt.backends.page_budget import PagePlan
    from dflash_trt.core.quantization import QuantizationSpec
    from dflash_trt.engine_dir import EngineDir


FP8_CAPABILITY = (8, 9)  # of a GPU: the first for which Triton converts FP8


class EngineExecutor(StepExecutor, Protocol):
    """An executor that owns pages, and perhaps processes, which `close` ends."""

    @property
    def page_plan(self) -> PagePlan: ...

    def close(self) -> None: ...


def open_executor(
    engine: EngineDir, config: RuntimeConfig, *, draft_lens: Sequence[int] | None = None
) -> EngineExecutor:
    """Rank 0, ready to step, with a process for each other rank of the engine, which `close` ends.

    With several ranks, threads and memory are those of each: by default the ranks share the cores, and on a CPU the
    memory, evenly. Cores and memory are what affinity and cgroups leave of the host's. `draft_lens` are the K that
    steps will have: a GPU compiles and captures them now. None: the engine's largest.

    Raises:
        ConfigError: see `resolved_config`; or fewer GPUs than ranks.
        EngineDirError: this machine cannot run the engine; the message names what is missing.
        CapacityError: the pages of one max_seq_len sequence do not fit.
        RankError: a rank's process did not start.
    """
    config = resolved_config(engine, config)
    if engine.manifest.backend == "tensorrt":
        from dflash_trt.backends.tensorrt.executor import TensorRTExecutor

        return TensorRTExecutor.open(engine, config)
    if config.device == "cuda":
        _check_formats(engine)
    if engine.manifest.pretrained_config.mapping.world_size > 1:
        from dflash_trt.executor.ranks.executor import open_ranks

        return open_ranks(engine, config, draft_lens=draft_lens)
    if config.device == "cuda":
        from dflash_trt.backends.cuda.executor import TorchGpuExecutor

        return TorchGpuExecutor.open(engine, config, draft_lens=draft_lens)
    from dflash_trt.backends.torch.executor import TorchExecutor
    from dflash_trt.executor.threads import run_in_thread

    return run_in_thread(lambda: TorchExecutor.open(engine, config))


def resolved_config(engine: EngineDir, config: RuntimeConfig) -> RuntimeConfig:
    """`config` with the device, the threads and the K that this engine gets on this machine.

    Raises:
        ConfigError: "cuda" on a machine whose PyTorch has no GPU, or a GPU without Triton; "cpu" for a TensorRT engine;
            more drafts than the engine makes.
    """
    from dflash_trt.executor.threads import default_num_threads

    num_ranks = engine.manifest.pretrained_config.mapping.world_size
    resolved: dict[str, object] = {
        "device": _resolved_device(engine, config.device),
        "num_threads": default_num_threads(num_ranks) if config.num_threads is None else config.num_threads,
    }
    if config.use_drafter:
        resolved["num_draft_tokens"] = checked_draft_length(config.num_draft_tokens, max_draft_len(engine))
    return config.model_copy(update=resolved)


def max_draft_len(engine: EngineDir) -> int:
    """The largest K of its steps; 0 for an engine without a drafter."""
    return engine.manifest.build_config.max_draft_len


def checked_draft_length(num_draft_tokens: int | None, max_draft_len: int) -> int:
    """K, by default the engine's max_draft_len.

    Raises:
        ConfigError: the engine cannot draft that many.
    """
    if num_draft_tokens is not None and num_draft_tokens > max_draft_len:
        raise ConfigError(
            problem(
                "num_draft_tokens",
                expected=f"0 to {max_draft_len}, this engine's max_draft_len",
                found=str(num_draft_tokens),
                mend="Pass fewer, or build the engine with a larger max_draft_len.",
            )
        )
    return max_draft_len if num_draft_tokens is None else num_draft_tokens


def _resolved_device(engine: EngineDir, device: Device) -> Device:
    if engine.manifest.backend == "torch":
        return "cuda" if _runs_on_gpu(device) else "cpu"
    if device == "cpu":
        mend = 'Use device "auto", or build the engine with backend torch.'
        raise ConfigError(problem("device", expected="a GPU, for a TensorRT engine", found="cpu", mend=mend))
    return "cuda"


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
