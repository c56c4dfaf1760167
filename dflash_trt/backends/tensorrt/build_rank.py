"""The plan of an engine directory: built from the weights that were just written there, recorded for config.json."""

import hashlib
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file

from dflash_trt.backends.tensorrt.builder import BuiltPlan, PlanOptions, StepsCallback, build_plan
from dflash_trt.backends.tensorrt.host_weights import host_quantized, host_rope_tables, host_tensors
from dflash_trt.backends.tensorrt.module import load_tensorrt, module_version
from dflash_trt.backends.tensorrt.profiles import Profile
from dflash_trt.backends.tensorrt.support import step_network_spec
from dflash_trt.backends.tensorrt.timing_cache import default_timing_cache
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import BuildError
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig
from dflash_trt.engine_dir.tensorrt_record import ProfileRecord, TensorRTRecord
from dflash_trt.formats.registry import split_quantized


def build_rank_plan(
    weights_file: Path, config: PretrainedConfig, limits: EngineLimits, *, options: PlanOptions, progress: StepsCallback
) -> tuple[BuiltPlan, TensorRTRecord]:
    """Compile rank 0. The weights are mapped from the file, not read into memory.

    Raises:
        BuildError: see `build_plan`.
    """
    spec = step_network_spec(config, limits)
    formats = config.quantization.linears if config.quantization else {}
    tensors = load_file(weights_file)
    plain, quantized = split_quantized(
        tensors, engine_weights(config.target, config.draft, config.quantization), formats
    )
    built = build_plan(
        spec,
        limits,
        host_tensors(plain),
        quantized=host_quantized(quantized),
        rope_tables=host_rope_tables(spec, max_seq_len=limits.max_seq_len),
        options=options,
        progress=progress,
    )
    return built, record_of(built, options)


def plan_options(config: BuildConfig, base_dir: Path) -> PlanOptions:
    """TensorRT's options of a build configuration; the plugin library is relative to the configuration.

    The library's path and hash go into the record, so that the engine finds it again and loads no other.

    Raises:
        BuildError: plugins without a library, or no TensorRT.
    """
    library = None if config.plugin_library is None else (base_dir / config.plugin_library).resolve()
    trt = load_tensorrt("tensorrt")
    if config.plugins == "plugin" and (library is None or not library.is_file()):
        hint = "Build it with scripts/build_plugin and pass --plugin-library, or build with --plugins layers (slow)."
        found = "none" if library is None else f"none at {library}"
        raise BuildError.about("plugin library", expected="a file", found=found, hint=hint)
    return PlanOptions(
        plugins=config.plugins,
        plugin_library=library if config.plugins == "plugin" else None,
        timing_cache=default_timing_cache(tensorrt_version=module_version(trt)),
    )


def record_of(built: BuiltPlan, options: PlanOptions) -> TensorRTRecord:
    """The record for config.json; the GPU is the current one, for which the enterprise builder builds."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    library = options.plugin_library
    return TensorRTRecord(
        tensorrt_version=built.tensorrt_version,
        gpu_name=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        compute_capability=options.compute_capability or f"{major}.{minor}",
        plugins=built.plugins,
        plugin_library=None if library is None else str(library),
        plugin_library_sha256=None if library is None else hashlib.sha256(library.read_bytes()).hexdigest(),
        flags=built.flags,
        profiles=tuple(_profile_record(profile) for profile in built.profiles),
        num_layers=built.num_layers,
        build_time_s=round(built.build_time_s, 3),
    )


def _profile_record(profile: Profile) -> ProfileRecord:
    sizes = {axis: tuple(asdict(axis_range).values()) for axis, axis_range in profile.axes.items()}
    return ProfileRecord.model_validate({"name": profile.name, "axes": sizes})
