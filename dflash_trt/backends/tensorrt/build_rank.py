"""The plan of a rank: built from the file of its weights, and recorded for config.json."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dflash_trt.backends.tensorrt.builder import BuiltPlan, PlanOptions, StepsCallback, build_plan
from dflash_trt.backends.tensorrt.host_weights import host_rope_tables, mapped_tensors
from dflash_trt.backends.tensorrt.module import load_tensorrt, module_version
from dflash_trt.backends.tensorrt.plugin_library import LIBRARY_HINT
from dflash_trt.backends.tensorrt.profiles import Profile
from dflash_trt.backends.tensorrt.support import step_network_spec
from dflash_trt.backends.tensorrt.timing_cache import default_timing_cache
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import BuildError
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.weight_spec import rank_shard
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig, tensor_headers
from dflash_trt.engine_dir.provenance import PLUGIN_LIBRARY_NAME, ProfileRecord, TensorRTRecord
from dflash_trt.engine_dir.tensor_file import ByteSink
from dflash_trt.formats.registry import split_quantized


@dataclass(frozen=True)
class PlanCompiler:
    """Implements `backends.base.Compiler`. The weights are mapped from their file, not read into memory."""

    options: PlanOptions

    @property
    def plugin_library(self) -> Path | None:
        return self.options.plugin_library

    def __call__(
        self,
        weights_file: Path,
        config: PretrainedConfig,
        *,
        rank: int,
        limits: EngineLimits,
        plan: ByteSink,
        progress: StepsCallback,
    ) -> TensorRTRecord:
        """Raises BuildError: see `build_plan`."""
        config = config.model_copy(update={"mapping": config.mapping.of_rank(rank)})
        spec = step_network_spec(config, limits)
        formats = config.quantization.linears if config.quantization else {}
        whole = engine_weights(config.target, config.draft, config.quantization)
        table = {name: rank_shard(weight, config.mapping) for name, weight in whole.items()}
        with mapped_tensors(weights_file, tensor_headers(config)) as tensors:
            plain, quantized = split_quantized(tensors, table, formats)
            built = build_plan(
                spec,
                limits,
                plain,
                quantized=quantized,
                rope_tables=host_rope_tables(spec, max_seq_len=limits.max_seq_len),
                options=self.options,
                sink=plan,
                progress=progress,
            )
        return record_of(built, self.options, page_windows=spec.page_windows)


def plan_options(config: BuildConfig, base_dir: Path) -> PlanOptions:
    """TensorRT's options of a build configuration; the plugin library is relative to the configuration.

    Raises:
        BuildError: no plugin library, or no TensorRT.
    """
    library = None if config.plugin_library is None else (base_dir / config.plugin_library).resolve()
    trt = load_tensorrt("tensorrt")
    if library is None or not library.is_file():
        found = "none" if library is None else f"none at {library}"
        raise BuildError.about("plugin library", expected="a file", found=found, hint=LIBRARY_HINT)
    return PlanOptions(
        collectives=config.collectives,
        deterministic=config.deterministic,
        plugin_library=library,
        timing_cache=default_timing_cache(tensorrt_version=module_version(trt)),
    )


def record_of(built: BuiltPlan, options: PlanOptions, *, page_windows: tuple[int, ...]) -> TensorRTRecord:
    """The record for config.json; the GPU is the current one, for which the enterprise builder builds."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return TensorRTRecord(
        tensorrt_version=built.tensorrt_version,
        gpu_name=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        compute_capability=options.compute_capability or f"{major}.{minor}",
        collectives=options.collectives,
        deterministic=options.deterministic,
        page_windows=page_windows,
        plugin_library=PLUGIN_LIBRARY_NAME,
        flags=built.flags,
        profiles=tuple(_profile_record(profile) for profile in built.profiles),
        num_layers=built.num_layers,
        build_time_s=round(built.build_time_s, 3),
    )


def _profile_record(profile: Profile) -> ProfileRecord:
    sizes = {axis: tuple(asdict(axis_range).values()) for axis, axis_range in profile.axes.items()}
    return ProfileRecord.model_validate({"name": profile.name, "axes": sizes})
