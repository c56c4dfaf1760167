"""The engine directory: written once by `compile/`, checked strictly by every program that opens it.

docs/engine_dir.md describes the format. This package knows files, hashes and tensor headers, and needs no torch.
"""

from dflash_trt.engine_dir.manifest import (
    ENGINE_VERSION,
    EngineLimits,
    EngineManifest,
    PretrainedConfig,
    tensor_headers,
    weights_name,
)
from dflash_trt.engine_dir.opening import EngineDir, is_hashed
from dflash_trt.engine_dir.provenance import BuildRecord, EngineFile
from dflash_trt.engine_dir.tensor_file import TensorHeader
from dflash_trt.engine_dir.writing import (
    EngineDirWriter,
    ReservedOutput,
    needed_bytes_for,
    reserve_output,
    write_engine_dir,
)

__all__ = [
    "ENGINE_VERSION",
    "BuildRecord",
    "EngineDir",
    "EngineDirWriter",
    "EngineFile",
    "EngineLimits",
    "EngineManifest",
    "PretrainedConfig",
    "ReservedOutput",
    "TensorHeader",
    "is_hashed",
    "needed_bytes_for",
    "reserve_output",
    "tensor_headers",
    "weights_name",
    "write_engine_dir",
]
