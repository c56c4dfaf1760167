"""What executes kernels in this process and its children, by the variable KERNELS_ON.

    interpreter           Triton's interpreter, unless told
    ptx[+OPTION]...       what Triton compiles for SM90, executed by software_gpu
        +sm100, +sm103    compiled for this architecture instead
        +races            with a search for races
        +early            with asynchronous work done at once, not at the last moment that waits allow

A machine with a CUDA GPU runs kernels on it, whatever the variable says.
"""

import os
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeVar

import torch

_OPTIONS: Final = {"interpreter": frozenset[str](), "ptx": frozenset({"races", "early", "sm100", "sm103"})}


def _chosen() -> tuple[str, frozenset[str]]:
    written = os.environ.get("KERNELS_ON", "interpreter")
    name, *options = written.split("+")
    if name not in _OPTIONS or not _OPTIONS[name].issuperset(options):
        raise ValueError(f"KERNELS_ON: expected interpreter or ptx[+sm100|+sm103][+races][+early], found {written!r}.")
    return ("gpu" if torch.cuda.is_available() else name), frozenset(options)


KERNELS_ON, _CHOSEN_OPTIONS = _chosen()
ARCHITECTURE: Final = next((int(option[2:]) for option in sorted(_CHOSEN_OPTIONS) if option.startswith("sm")), 90)
DEVICE: Final = torch.device("cuda" if KERNELS_ON == "gpu" else "cpu")

_Value = TypeVar("_Value")


def moved(value: _Value, device: torch.device = DEVICE) -> _Value:
    """The same with every tensor of a dataclass, a tuple or a list on the device."""
    found: Any = value
    if isinstance(value, torch.Tensor):
        found = value.to(device)
    elif isinstance(value, tuple | list):
        found = type(value)(moved(item, device) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        found = replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(value)})
    return found


def set_up_kernels() -> None:
    """Before Triton is imported; in a child process, before a kernel is launched."""
    if KERNELS_ON == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    elif KERNELS_ON == "ptx":
        from software_gpu.triton_driver import install

        options = {"is_late": "early" not in _CHOSEN_OPTIONS, "finds_races": "races" in _CHOSEN_OPTIONS}
        install(architecture=ARCHITECTURE, **options)
