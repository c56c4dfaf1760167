"""Engines built in this process."""

from pathlib import Path
from typing import Any

from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.engine_dir import EngineDir

COMMAND = ("dflash-trt", "build", "pair.yaml", "-o", "engine")


def build(base_dir: Path, output: Path, *, overwrite: bool = False, **fields: Any) -> EngineDir:
    config = BuildConfig(**({"target": "target", "dtype": "float32"} | fields))
    return build_engine(
        config, output, base_dir=base_dir, overwrite=overwrite, command=COMMAND, progress=lambda progress: None
    )
