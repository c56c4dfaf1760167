"""A step network into a serialized TensorRT plan: configuration, profiles, timing cache, progress.

Knows builder options; `network` defines the layers, and `engine_dir` stores the plan.
"""

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_trt.backends.base import StepsCallback as StepsCallback
from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.layers import Layers
from dflash_trt.backends.tensorrt.module import Flavor, load_tensorrt, make_logger, module_version
from dflash_trt.backends.tensorrt.network import StepNetworkSpec, define_step_network
from dflash_trt.backends.tensorrt.node_stubs import STUB, add_stub
from dflash_trt.backends.tensorrt.ops import RopeTables
from dflash_trt.backends.tensorrt.plan_stream import write_plan
from dflash_trt.backends.tensorrt.plugin_library import load_plugin_library
from dflash_trt.backends.tensorrt.plugins import add_plugin_node
from dflash_trt.backends.tensorrt.profiles import Profile, max_keys, profile_inputs, step_profiles
from dflash_trt.backends.tensorrt.timing_cache import load_timing_cache, store_timing_cache
from dflash_trt.core.config import CollectiveMode
from dflash_trt.core.errors import BuildError
from dflash_trt.engine_dir import EngineLimits
from dflash_trt.engine_dir.tensor_file import ByteSink
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.kernels.launch_rules import fixed_split_length


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Build options. The CPU-only builder targets `compute_capability` ("SM120") instead of this GPU.

    It takes no plugins, and has stubs of their nodes (`node_stubs`).

    `flags` are BuilderFlag names to set on top of the defaults. STRIP_PLAN is not for them: a directory has no other
    weights than its plan. TensorRT refuses DISTRIBUTIVE_INDEPENDENCE for more than one profile.
    """

    flavor: Flavor = "tensorrt"
    collectives: CollectiveMode = "native"  # for several ranks
    deterministic: bool = False
    plugin_library: Path | None = None
    timing_cache: Path | None = None
    compute_capability: str | None = None
    flags: tuple[str, ...] = ()
    workspace_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class BuiltPlan:
    """Facts about a plan, for config.json and for the report of a check."""

    tensorrt_version: str
    flags: tuple[str, ...]
    profiles: tuple[Profile, ...]
    inputs: tuple[str, ...]  # "token_ids int32 [T]"
    outputs: tuple[str, ...]
    num_layers: int
    layer_counts: dict[str, int]
    plan_bytes: int
    build_time_s: float
    peak_memory_bytes: int
    warnings: tuple[str, ...]


def build_plan(
    spec: StepNetworkSpec,
    limits: EngineLimits,
    tensors: Mapping[str, HostTensor],
    *,
    quantized: Mapping[str, QuantizedWeight[HostTensor]] | None = None,
    rope_tables: RopeTables,
    options: PlanOptions,
    sink: ByteSink,
    progress: StepsCallback = lambda phase, done, total: None,
) -> BuiltPlan:
    """Define one rank's network and compile it into `sink`.

    The tensors must stay alive until this returns.

    Raises:
        BuildError: TensorRT is missing, refused a layer, or could not build; with its own messages.
    """
    started_s = time.monotonic()
    trt = load_tensorrt(options.flavor)
    logger = make_logger(trt)
    has_plugins = options.flavor == "tensorrt"
    if has_plugins:
        load_plugin_library(trt, options.plugin_library)
    builder = _make_builder(trt, logger, options)
    network = builder.create_network(0)
    layers = Layers(trt, network, logger)
    split_length = fixed_split_length(max_keys=max_keys(limits)) if options.deterministic else 0
    spec = replace(spec, collectives=options.collectives, split_length=split_length)
    add_node = add_plugin_node if has_plugins else add_stub
    define_step_network(layers, spec, tensors, quantized=quantized, rope_tables=rope_tables, add_node=add_node)
    profiles = step_profiles(spec, limits)
    config, flags = _configure(trt, builder, options)
    for profile in profiles:
        _add_profile(builder, config, spec, profile)
    config.progress_monitor = _make_monitor(trt, progress)
    if options.timing_cache is not None:
        load_timing_cache(config, options.timing_cache)
    plan_bytes = write_plan(trt, builder, network, config, sink)
    if plan_bytes is None:
        raise _build_failure("the network could not be compiled", logger)
    if options.timing_cache is not None:
        store_timing_cache(config, options.timing_cache)
    assert layers.constant_owners is not None  # the weights' memory, alive up to here
    layer_counts = _layer_counts(network)
    return BuiltPlan(
        tensorrt_version=module_version(trt),
        flags=flags,
        profiles=profiles,
        inputs=_tensor_lines(network.get_input, network.num_inputs),
        outputs=_tensor_lines(network.get_output, network.num_outputs),
        num_layers=sum(layer_counts.values()),
        layer_counts=layer_counts,
        plan_bytes=plan_bytes,
        build_time_s=time.monotonic() - started_s,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        warnings=tuple(dict.fromkeys(logger.warnings)),
    )


def _make_builder(trt: Any, logger: Any, options: PlanOptions) -> Any:
    """The enterprise builder needs a GPU; its binding says so with a TypeError."""
    try:
        return trt.Builder(logger)
    except TypeError as error:
        found = "; ".join(logger.errors) or str(error)
        hint = "Build on the GPU the engine is for, or check the configuration here: dflash-trt build --check."
        raise BuildError.about("TensorRT builder", expected="a GPU with a driver", found=found, hint=hint) from error


def _configure(trt: Any, builder: Any, options: PlanOptions) -> tuple[Any, tuple[str, ...]]:
    """The builder configuration, and the names of all flags and preview features it ends up with."""
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for `inspection`
    config.clear_flag(trt.BuilderFlag.TF32)  # float32 means float32, also inside a bfloat16 network
    for name in options.flags:
        flag = getattr(trt.BuilderFlag, name, None)
        if flag is None:
            known = ", ".join(sorted(trt.BuilderFlag.__members__))
            raise BuildError.about("builder flag", expected=f"one of {known}", found=name)
        config.set_flag(flag)
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.compute_capability is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, options.compute_capability), 0)
    flags = [name for name, flag in trt.BuilderFlag.__members__.items() if config.get_flag(flag)]
    previews = [name for name, feature in trt.PreviewFeature.__members__.items() if config.get_preview_feature(feature)]
    return config, (*flags, *previews)


def _add_profile(builder: Any, config: Any, spec: StepNetworkSpec, profile: Profile) -> None:
    shapes = builder.create_optimization_profile()
    for tensor in profile_inputs(spec):
        shapes.set_shape(tensor.name, *profile.shapes_of(tensor))
    if config.add_optimization_profile(shapes) < 0:
        raise BuildError.about(
            f"optimization profile {profile.name}",
            expected="ranges TensorRT accepts",
            found=", ".join(f"{axis} {sizes}" for axis, sizes in profile.axes.items()),
            hint="Raise the limits that leave a range empty, or report it with this message.",
        )


def _make_monitor(trt: Any, progress: StepsCallback) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # the base comes from a module chosen at run time
        """Reports TensorRT's outermost phases; inner ones come and go too quickly to read."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._totals: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase:
                self._totals[phase_name] = num_steps
                progress(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._totals:
                progress(phase_name, step + 1, self._totals[phase_name])
            return True

        def phase_finish(self, phase_name: str) -> None:
            if (total := self._totals.pop(phase_name, None)) is not None:
                progress(phase_name, total, total)

    return Monitor()


def _build_failure(what: str, logger: Any) -> BuildError:
    said = "; ".join(logger.errors or logger.warnings[-3:]) or "nothing"
    hint = "Lower the limits if memory ran out; otherwise report it with this message."
    return BuildError.about("TensorRT build", expected="a plan", found=f"{what}: {said}", hint=hint)


def _tensor_lines(get: Callable[[int], Any], count: int) -> tuple[str, ...]:
    tensors: Sequence[Any] = [get(i) for i in range(count)]
    return tuple(
        f"{tensor.name} {tensor.dtype.name} [{', '.join(map(str, tuple(tensor.shape)))}]" for tensor in tensors
    )


def _layer_counts(network: Any) -> dict[str, int]:
    """By type, the most first; the layers of a stub are one plugin node."""
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    stubs = {layer.metadata for layer in layers if layer.metadata.startswith(STUB)}
    kinds = [layer.type.name for layer in layers if layer.metadata not in stubs]
    return dict(Counter(kinds + ["PLUGIN_V3"] * len(stubs)).most_common())
