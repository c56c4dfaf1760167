"""The record of the plans in config.json: enough to refuse a wrong machine before loading a plan."""

from typing import Annotated, Final, Literal

from pydantic import Field

from dflash_trt.core.frozen import Frozen

PLUGIN_LIBRARY_NAME: Final = "libdflash_trt_plugins.so"  # in the engine directory


class ProfileRecord(Frozen):
    """Min, opt and max size of every symbolic axis."""

    name: str
    axes: dict[str, tuple[int, int, int]]


class TensorRTRecord(Frozen):
    """Build of rank 0's plan, which stands for the others'. Plans of before page groups have one group.

    `compute_capability` as in "9.0"; `plugin_library` is a file of the directory.
    """

    tensorrt_version: str
    gpu_name: str
    compute_capability: str
    collectives: Literal["native", "plugin"] = "native"  # for several ranks
    deterministic: bool = False  # a row's bits depend on its request alone
    page_windows: tuple[Annotated[int, Field(ge=1)], ...] = ()  # windows of the page groups after the first
    plugin_library: Literal["libdflash_trt_plugins.so"]  # PLUGIN_LIBRARY_NAME
    flags: tuple[str, ...]
    profiles: tuple[ProfileRecord, ...]
    num_layers: Annotated[int, Field(ge=1)]
    build_time_s: Annotated[float, Field(ge=0)]


def plan_name(rank: int) -> str:
    return f"rank{rank}.engine"
