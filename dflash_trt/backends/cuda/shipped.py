"""The compiled kernels that an engine directory ships for this GPU."""

from collections.abc import Callable

from dflash_trt.core.errors import EngineDirError
from dflash_trt.engine_dir import EngineDir
from dflash_trt.kernels.shipped_kernels import local_architecture, use_kernels


def use_shipped_kernels(engine: EngineDir, *, warn: Callable[[str], None]) -> None:
    """Have them found in this process. `warn` gets a line where they cannot be used, and all are compiled."""
    architecture = local_architecture()
    try:
        archive = engine.kernels(architecture)
        if archive is not None:
            use_kernels(archive)
    except (EngineDirError, ValueError) as error:
        warn(f"{engine.path}: its kernels for {architecture} are not used, and compiled instead: {error}")
