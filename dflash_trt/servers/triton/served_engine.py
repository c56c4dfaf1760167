"""The engine directory behind a model, opened: for those who deploy it, and for the model itself."""

from pathlib import Path

from dflash_trt.core.errors import EngineDirError
from dflash_trt.engine_dir import EngineDir


def open_served_engine(path: Path) -> EngineDir:
    """Raises EngineDirError for what is no engine, and for one of several ranks."""
    engine = EngineDir.open(path)
    world_size = engine.manifest.pretrained_config.mapping.world_size
    if world_size != 1:
        raise EngineDirError.about(
            str(path),
            expected="an engine of one rank, which is what this server model runs",
            found=f"world_size {world_size}",
            hint="Build the engine with tp_size 1 and pp_size 1.",
        )
    return engine
