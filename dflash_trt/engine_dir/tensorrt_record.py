"""The record of the plans in config.json: enough to refuse a wrong machine before loading a plan."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

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
    plugins: Literal["plugin", "layers"]
    collectives: Literal["native", "plugin"] = "native"  # of several ranks
    page_windows: tuple[Annotated[int, Field(ge=1)], ...] = ()  # of the page groups behind the first
    plugin_library: Literal["libdflash_trt_plugins.so"] | None = None  # PLUGIN_LIBRARY_NAME
    flags: tuple[str, ...]
    profiles: tuple[ProfileRecord, ...]
    num_layers: Annotated[int, Field(ge=1)]
    build_time_s: Annotated[float, Field(ge=0)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.plugin_library is not None) != (self.plugins == "plugin"):
            raise ValueError('a plugin_library for plugins "plugin", and for no others')
        return self


def plan_name(rank: int) -> str:
    return f"rank{rank}.engine"
