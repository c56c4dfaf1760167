"""Opening of an engine directory's executor. Imports only the backend that runs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from dflash_trt.backends.base import EngineExecutor as EngineExecutor
from dflash_trt.backends.base import backend_name, backend_of
from dflash_trt.backends.page_budget import PagePlan as PagePlan
from dflash_trt.backends.page_budget import plan_engine_pages
from dflash_trt.core.draft_lengths import CpuWeights, usual_draft_lengths
from dflash_trt.core.errors import EngineDirError, raise_all
from dflash_trt.core.runtime_config import NODES, Device, RuntimeConfig, SettingError

if TYPE_CHECKING:
    from dflash_trt.engine_dir import EngineDir

_FOUR_BITS: Final = ("int4", "mxfp4", "nvfp4_w4a16")  # which the CPU kernels multiply as they are, as int8


def open_executor(
    engine: EngineDir, config: RuntimeConfig, *, draft_lens: Sequence[int] | None = None
) -> EngineExecutor:
    """Open rank 0, and start a process for each other rank, which `close` ends.

    Threads and memory are per rank; by default ranks divide the cores, and on a CPU the memory, that affinity and
    cgroups allow. `draft_lens` are the K of later steps (default: the engine's maximum), which a GPU compiles and
    captures now.

    Raises:
        ConfigError: see `resolved_config`; or fewer GPUs than ranks.
        EngineDirError: this machine cannot run the engine; the message names what is missing.
        CapacityError: the pages of one max_seq_len sequence do not fit.
        RankError: a rank's process did not start.
    """
    config = resolved_config(engine, config)
    engine = engine.with_draft_window(config.draft_window)
    backend = backend_of(backend_name(engine, config.device))
    models = engine.manifest.pretrained_config
    problems = backend.unsupported(models.target, models.draft, models.quantization, models.mapping)
    if problems:  # the subject may query the device's name
        raise_all(EngineDirError, backend.subject, problems)
    if config.kv_cache_bytes is not None:  # else free memory is known only after loading weights
        plan_engine_pages(engine.manifest, config, has_groups=engine.manifest.has_page_groups)
    if models.mapping.world_size > 1:
        from dflash_trt.executor.ranks.executor import open_ranks

        return open_ranks(engine, config, draft_lens=draft_lens)
    if config.device == "cuda":
        return backend.open(engine, config, draft_lens=draft_lens)
    from dflash_trt.executor.threads import keep_waits_short, run_in_thread

    keep_waits_short(config.num_threads)
    return run_in_thread(lambda: backend.open(engine, config, draft_lens=draft_lens))


def resolved_config(engine: EngineDir, config: RuntimeConfig) -> RuntimeConfig:
    """Resolve device, loop, threads and K of `config` for this engine on this machine.

    Raises:
        SettingError: "cuda" on a machine whose PyTorch has no GPU, or a GPU without Triton; "cpu" for a TensorRT
            engine; more drafts than the engine makes; a plugin library for an engine without plugins; `deterministic`
            for a TensorRT engine that was built without; a host cache for an engine that caches no prefixes.
    """
    from dflash_trt.executor.threads import default_num_threads

    if engine.manifest.backend == "tensorrt_llm":
        backend_of("tensorrt_llm").open(engine, config)  # refuses: it runs requests, not steps
    check_drafting(engine, config)
    check_nodes(engine, config)
    device = _resolved_device(engine, config.device)
    _check_plugin_library(engine, config.plugin_library)
    if config.draft_window is not None and engine.manifest.backend == "tensorrt":
        raise SettingError(
            "draft_window",
            expected="an engine of backend torch",
            found="a TensorRT engine",
            hint="Its masks are compiled. Build the engine with --draft-window.",
        )
    compiled = engine.manifest.tensorrt
    is_compiled = engine.manifest.backend == "tensorrt"
    if config.deterministic and is_compiled and (compiled is None or not compiled.deterministic):
        raise SettingError(
            "deterministic",
            expected="a TensorRT engine that was built with it",
            found="one that was not",
            hint="Its kernels are compiled. Build the engine with --deterministic.",
        )
    is_recurrent = engine.manifest.target.is_recurrent
    _check_snapshots(config, is_recurrent=is_recurrent)
    _check_host_cache(config, shares_prefixes=not is_recurrent or config.num_state_snapshots != 0)
    _check_disk_cache(config)
    resolved: dict[str, object] = {
        "device": device,
        "overlap_scheduling": _overlaps(config, device),
        "num_threads": config.num_threads,
    }
    if config.num_threads is None:
        num_ranks = engine.manifest.pretrained_config.mapping.world_size
        resolved["num_threads"] = default_num_threads(num_ranks // config.nnodes)
    if config.use_drafter:
        most = max_draft_len(engine)
        usual = {1: most}
        if most and not config.adaptive_draft_length:
            limits = engine.manifest.build_config
            usual = usual_draft_lengths(
                most, limits.max_batch_size, "cpu" if device == "cpu" else "cuda", weights=_cpu_weights(engine)
            )
        resolved["draft_length"] = config.draft_length or usual
    return config.model_copy(update=resolved)


def _cpu_weights(engine: EngineDir) -> CpuWeights:
    """Those of most of the target's linear layers."""
    quantization = engine.manifest.pretrained_config.quantization
    formats = {} if quantization is None else quantization.linears
    of_target = [name for linear, name in formats.items() if linear.startswith("target.layers.")]
    known: dict[CpuWeights, tuple[str, ...]] = {"int8": ("int8",), "four_bits": _FOUR_BITS}
    most = (kind for kind, names in known.items() if sum(name in names for name in of_target) > len(of_target) / 2)
    return next(most, "float")


def _overlaps(config: RuntimeConfig, device: str) -> bool:
    """On a GPU by default, except with drafts from texts: they need the results of the step before."""
    return device != "cpu" and not config.ngram if config.overlap_scheduling is None else config.overlap_scheduling


def check_drafting(engine: EngineDir, config: RuntimeConfig) -> None:
    """Raises SettingError: settings of a drafter for an engine without one, or more drafts than it makes."""
    if engine.manifest.draft is None:
        asked = {
            "adaptive_draft_length": config.adaptive_draft_length,
            "draft_length": config.max_draft_tokens,
            "draft_window": config.draft_window,
            "ngram": config.ngram,
        }
        for name in (name for name, value in asked.items() if value):
            hint = "Leave the setting out, or build the engine with a drafter."
            raise SettingError(name, expected="an engine with a drafter", found="one without", hint=hint)
    check_draft_length(config.max_draft_tokens, engine)


def _check_snapshots(config: RuntimeConfig, *, is_recurrent: bool) -> None:
    """Raise SettingError for snapshots if the target has no recurrent state."""
    if config.num_state_snapshots and not is_recurrent:
        hint = "Leave it out: pages are all that prefixes of this target need."
        expected, found = "a target with recurrent layers", "one whose layers all attend"
        raise SettingError("num_state_snapshots", expected=expected, found=found, hint=hint)


def _check_disk_cache(config: RuntimeConfig) -> None:
    """Raises SettingError for half of the settings."""
    needs = {
        "disk_cache_dir": "host_cache_bytes",
        "disk_cache_bytes": "disk_cache_dir",
        "publish_prompts": "disk_cache_dir",
    }
    for name, other in needs.items():
        if getattr(config, name) != RuntimeConfig.model_fields[name].default and getattr(config, other) is None:
            hint = "Files are read into host memory, and written from there." if name == "disk_cache_dir" else "Add it."
            raise SettingError(name, expected=f"{other} as well", found="none", hint=hint)


def check_nodes(engine: EngineDir, config: RuntimeConfig) -> None:
    """Raises SettingError for nodes that the ranks do not fill, half of the settings, and files of all ranks."""
    num_ranks = engine.manifest.pretrained_config.mapping.world_size
    if config.nnodes == 1:
        for name in NODES:
            if (value := getattr(config, name)) != RuntimeConfig.model_fields[name].default:
                raise SettingError(name, expected="nnodes of 2 or more as well", found=str(value), hint="Add it.")
        return
    if num_ranks % config.nnodes:
        hint = "Every node has an equal number of ranks; build the engine with another tp_size."
        expected = f"a divisor of {num_ranks}, the engine's ranks"
        raise SettingError("nnodes", expected=expected, found=str(config.nnodes), hint=hint)
    if config.master_addr is None:
        hint = "Name an address of this machine that the other nodes reach."
        raise SettingError("master_addr", expected="an address, for several nodes", found="none", hint=hint)
    if config.disk_cache_dir is not None:
        hint = "Rank 0 reads and writes the blocks of all ranks. Leave it out; host_cache_bytes works on every node."
        raise SettingError("disk_cache_dir", expected="ranks on one node", found=f"{config.nnodes} nodes", hint=hint)


def _check_host_cache(config: RuntimeConfig, *, shares_prefixes: bool) -> None:
    """Raise SettingError for a second tier of a cache that is always empty."""
    if config.host_cache_bytes is not None and not shares_prefixes:
        raise SettingError(
            "host_cache_bytes",
            expected="an engine that caches prefixes",
            found="a target with recurrent layers, without snapshots",
            hint="Leave it out, or allow more than 0 num_state_snapshots.",
        )


def max_draft_len(engine: EngineDir) -> int:
    """The maximum K of an engine's steps; 0 without a drafter."""
    return engine.manifest.build_config.max_draft_len


def with_one_draft_length(config: RuntimeConfig, engine: EngineDir) -> RuntimeConfig:
    """For comparisons of acceptance: K as it is named, else the engine's maximum whatever the number of requests.

    TensorRT-LLM has one K by itself, which a running server has chosen.
    """
    is_chosen = config.draft_length is not None or config.adaptive_draft_length or not config.use_drafter
    is_chosen |= engine.manifest.backend == "tensorrt_llm"
    return config if is_chosen else config.replaced(draft_length=max_draft_len(engine))


def check_draft_length(length: int, engine: EngineDir, *, name: str = "draft_length") -> None:
    """Raises SettingError: the engine cannot draft that many."""
    most = max_draft_len(engine)
    if length > most:
        raise SettingError(
            name,
            expected=f"0 to {most}, this engine's max_draft_len",
            found=str(length),
            hint="For more, build the engine with a larger max_draft_len.",
        )


def _check_plugin_library(engine: EngineDir, plugin_library: str | None) -> None:
    if plugin_library is not None and engine.manifest.tensorrt is None:
        found = f"one of backend {engine.manifest.backend}"
        hint = "Leave plugin_library out."
        raise SettingError("plugin_library", expected="an engine with TensorRT plugins", found=found, hint=hint)


def _resolved_device(engine: EngineDir, device: Device) -> Device:
    if engine.manifest.backend == "torch":
        return "cuda" if _runs_on_gpu(device) else "cpu"
    if device == "cpu":
        hint = 'Use device "auto", or build the engine with backend torch.'
        raise SettingError("device", expected="a GPU, for a TensorRT engine", found="cpu", hint=hint)
    return "cuda"


def _runs_on_gpu(device: Device) -> bool:
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cpu" or (device == "auto" and not has_gpu):
        return False
    if not has_gpu:
        hint = 'Install a PyTorch with CUDA on a machine with an NVIDIA GPU, or use device "cpu".'
        raise SettingError("device", expected="a CUDA GPU that PyTorch can use", found="none", hint=hint)
    if find_spec("triton") is None:
        hint = 'Install triton 3.6 or newer, or use device "cpu".'
        raise SettingError("device", expected="Triton, which the GPU's kernels need", found="none", hint=hint)
    return True
