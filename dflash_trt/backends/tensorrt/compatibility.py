"""GPU, TensorRT and plugin library of this machine, compared with those that config.json recorded."""

from dataclasses import replace
from pathlib import Path

import torch

from dflash_trt.backends.tensorrt.engine import require_gpu
from dflash_trt.backends.tensorrt.module import load_tensorrt, module_version
from dflash_trt.backends.tensorrt.network import StepNetworkSpec
from dflash_trt.backends.tensorrt.support import network_spec
from dflash_trt.core.errors import EngineDirError, problem, raise_all
from dflash_trt.engine_dir import EngineDir
from dflash_trt.engine_dir.provenance import TensorRTRecord, plan_name

_LIBRARY = "Pass --plugin-library with a library of dflash-trt build-plugin, or leave it out for the engine's own."
_REBUILD = "Build it again on this machine: dflash-trt build ... --backend tensorrt --overwrite"


def check_identity(engine_dir: EngineDir, *, plugin_library: Path | None = None) -> Path:
    """The plugin library, when this machine may run the engine.

    The library is the directory's own, whose hash `EngineDir.open` has compared, unless `plugin_library` names another:
    that one may have other kernels, and needs the plugins of this version of the contract (`load_plugin_library`).

    Raises:
        EngineDirError: no TensorRT plan in the directory, no GPU, no TensorRT, or every mismatch found.
    """
    record = engine_dir.manifest.tensorrt
    if record is None:
        found = f"an engine of backend {engine_dir.manifest.backend}"
        raise EngineDirError.about(str(engine_dir.path), expected="a TensorRT engine", found=found, hint=_REBUILD)
    require_gpu()
    version = module_version(load_tensorrt("tensorrt", error=EngineDirError))
    major, minor = torch.cuda.get_device_capability()
    problems = mismatches(
        record, tensorrt_version=version, compute_capability=f"{major}.{minor}", gpu_name=torch.cuda.get_device_name()
    )
    library = plugin_library or engine_dir.path / record.plugin_library
    if not library.is_file():
        problems.append(problem(f"plugin library {library}", expected="a file", found="none", hint=_LIBRARY))
    raise_all(EngineDirError, f"engine directory {engine_dir.path}", problems)
    return library


def mismatches(record: TensorRTRecord, *, tensorrt_version: str, compute_capability: str, gpu_name: str) -> list[str]:
    """Plans run only on the compute capability and with the TensorRT version they were built for."""
    problems = []
    if record.compute_capability != compute_capability:
        expected = f"compute capability {record.compute_capability} ({record.gpu_name})"
        found = f"{compute_capability} ({gpu_name})"
        problems.append(problem("GPU", expected=expected, found=found, hint=_REBUILD))
    if record.tensorrt_version != tensorrt_version:
        hint = f"Install it: pip install tensorrt=={record.tensorrt_version}. Or: {_REBUILD}"
        problems.append(problem("TensorRT", expected=record.tensorrt_version, found=tensorrt_version, hint=hint))
    return problems


def spec_of(engine_dir: EngineDir, rank: int = 0) -> StepNetworkSpec:
    """The network that the plan of a rank computes."""
    config, record = engine_dir.manifest.pretrained_config, engine_dir.manifest.tensorrt
    assert record is not None, "`check_identity` has refused others"
    of_rank = config.model_copy(update={"mapping": config.mapping.of_rank(rank)})
    return replace(
        network_spec(of_rank, engine_dir.manifest.build_config),
        collectives=record.collectives,
        page_windows=record.page_windows,
    )


def plan_path(engine_dir: EngineDir, rank: int = 0) -> Path:
    return engine_dir.path / plan_name(rank)
