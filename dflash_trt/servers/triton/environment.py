"""Checks of the model's Python environment. Imports nothing that may be missing there."""

import os
import platform
import sys
from collections.abc import MutableMapping
from pathlib import Path

from dflash_trt.core.errors import ConfigError

_FIRST_FOREIGN_MAJOR = 2


def check_numpy(version: str, *, accepts_numpy_2: bool = False) -> None:
    """Refuse numpy 2, with which the Python backend reads wrong values from every input and then aborts.

    Seen with Triton 2.51.0 (24.10). `accepts_numpy_2` is for a server whose Python backend was built for it.

    Raises:
        ConfigError: this numpy does not go with the server.
    """
    if int(version.partition(".")[0]) < _FIRST_FOREIGN_MAJOR or accepts_numpy_2:
        return
    raise ConfigError.about(
        "numpy in the environment of the server",
        expected="version 1, which the Python backend of Triton is built for",
        found=version,
        hint="Install 'numpy<2' there, or deploy with --environment naming a Python environment that has it. "
        "If your server is known to take numpy 2, deploy with --accept-numpy-2.",
    )


def explained(error: ImportError, prefix: str = sys.prefix, running: str = platform.python_version()) -> Exception:
    """`error`, or its cause: a standard library of another Python than the libpython that the server loaded."""
    made_with = _version_of_environment(Path(prefix))
    if made_with is None or made_with == running:
        return error
    return ConfigError.about(
        f"libpython of the server, for the environment {prefix}",
        expected=f"Python {made_with}, which the environment was made with",
        found=f"{running}, and {error}",
        hint="Put the directory of that Python's libpython first in LD_LIBRARY_PATH, at the end of bin/activate of "
        "the environment for example.",
    )


def _version_of_environment(prefix: Path) -> str | None:
    """The version in pyvenv.cfg; None outside of a virtual environment."""
    path = prefix / "pyvenv.cfg"
    lines = path.read_text().splitlines() if path.is_file() else []
    entries = dict(line.partition("=")[::2] for line in lines)
    return next((value.strip() for name, value in entries.items() if name.strip() == "version"), None)


def select_gpu(kind: str, device_id: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Leave this process only the GPU of its instance; to be called before anything looks for GPUs.

    Triton counts the devices it can see itself, so an inherited CUDA_VISIBLE_DEVICES is indexed, not replaced.
    """
    environment = os.environ if environment is None else environment
    if kind != "GPU":
        return
    inherited = environment.get("CUDA_VISIBLE_DEVICES")
    visible = inherited.split(",") if inherited else None
    index = int(device_id)
    if visible is not None and index >= len(visible):
        raise ConfigError.about(
            "instance_group",
            expected=f"GPUs 0 to {len(visible) - 1}, for CUDA_VISIBLE_DEVICES is {inherited}",
            found=device_id,
            hint="Deploy with --gpus naming GPUs that the server sees.",
        )
    environment["CUDA_VISIBLE_DEVICES"] = device_id if visible is None else visible[index].strip()
