"""Checks of the model's Python environment. Imports nothing that may be missing there."""

import os
import platform
import sys
from collections.abc import Mapping, MutableMapping, Sequence
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
    """`error`, or its cause: the server's libpython is another Python version than the environment's."""
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


def gpus_of_instance(arguments: Mapping[str, str], instance_gpus: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """GPUs of an instance by its `arguments` of `initialize`; none on a CPU, or where it may use all.

    Triton gives an instance of KIND_GPU its GPU. One of KIND_MODEL, for several ranks, takes its place of
    `instance_gpus`, by the number that ends its name.
    """
    if arguments["model_instance_kind"] == "GPU":
        return (int(arguments["model_instance_device_id"]),)
    if arguments["model_instance_kind"] != "MODEL" or not instance_gpus:
        return ()
    index = int(arguments["model_instance_name"].rpartition("_")[2])
    if index >= len(instance_gpus):
        expected = f"count {len(instance_gpus)}, the groups of gpu_device_ids"
        raise ConfigError.about("instance_group", expected=expected, found="more", hint="Deploy the model again.")
    return instance_gpus[index]


def check_gpus_of_ranks(gpus: Sequence[int], num_ranks: int) -> None:
    """Raises ConfigError unless an instance that has `gpus` has one for each rank."""
    if len(gpus) not in (0, num_ranks):
        hint = "Deploy the engine again, with --gpus naming one for each rank."
        expected = f"{num_ranks} for each instance, as the engine has {num_ranks} ranks"
        raise ConfigError.about("GPUs of an instance", expected=expected, found=str(len(gpus)), hint=hint)


def select_gpus(gpus: Sequence[int], environment: MutableMapping[str, str] | None = None) -> None:
    """Show this process and its children only its instance's GPUs. Call before anything looks for GPUs.

    Triton counts the devices it can see itself, so an inherited CUDA_VISIBLE_DEVICES is indexed, not replaced.
    """
    environment = os.environ if environment is None else environment
    if not gpus:
        return
    inherited = environment.get("CUDA_VISIBLE_DEVICES")
    visible = inherited.split(",") if inherited else None
    if visible is not None and max(gpus) >= len(visible):
        raise ConfigError.about(
            "instance_group",
            expected=f"GPUs 0 to {len(visible) - 1}, for CUDA_VISIBLE_DEVICES is {inherited}",
            found=",".join(map(str, gpus)),
            hint="Deploy with --gpus naming GPUs that the server sees.",
        )
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(
        str(gpu) if visible is None else visible[gpu].strip() for gpu in gpus
    )
