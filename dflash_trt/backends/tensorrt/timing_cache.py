"""TensorRT's timing cache, in a file between builds. Caches of another GPU or version are replaced."""

import os
import secrets
from pathlib import Path
from typing import Any


def default_timing_cache(*, tensorrt_version: str) -> Path:
    """One file per TensorRT version; TensorRT itself tells GPUs apart inside it."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "dflash-trt" / f"timing-{tensorrt_version}.cache"


def load_timing_cache(config: Any, path: Path) -> None:
    """Attach the cache of the file, or an empty one when there is none or TensorRT refuses it."""
    content = path.read_bytes() if path.is_file() else b""
    cache = config.create_timing_cache(content)
    if cache is None or not config.set_timing_cache(cache, False):
        config.set_timing_cache(config.create_timing_cache(b""), False)


def store_timing_cache(config: Any, path: Path) -> None:
    """Write the cache as it is after the build; the file is whole at every moment."""
    cache = config.get_timing_cache()
    if cache is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_bytes(memoryview(cache.serialize()))
    temporary.replace(path)
