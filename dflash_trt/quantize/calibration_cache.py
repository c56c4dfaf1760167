"""Calibrations kept between builds, by the hash of everything they depend on.

Knows files and hashes. `calibrate` measures the activations, `stream` uses the ranges.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_trt.core.quantization import Calibration

CALIBRATION_VERSION = 1  # raise it whenever the same inputs would give other ranges


def cache_key(fields: Mapping[str, Any]) -> str:
    """SHA-256 of everything that the ranges depend on; `fields` must be plain JSON."""
    text = json.dumps({"calibration_version": CALIBRATION_VERSION, **fields}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def cache_dir() -> Path:
    """Directory for calibrations between builds: the user's cache directory by the XDG convention."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dflash-trt" / "calibration"


def read_cached(key: str) -> Calibration | None:
    """None when there is none, or none that can be read: it is then measured again."""
    try:
        return Calibration.model_validate_json((cache_dir() / f"{key}.json").read_bytes())
    except (OSError, ValueError):
        return None


def write_cached(key: str, calibration: Calibration) -> None:
    """Write it whole or not at all. A cache that cannot be written only costs the next build time."""
    path = cache_dir() / f"{key}.json"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(calibration.model_dump_json(indent=1))
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
