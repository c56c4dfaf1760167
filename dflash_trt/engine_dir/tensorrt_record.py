"""The record of `rank{r}.engine` in config.json: enough to refuse a wrong machine before loading a plan."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dflash_trt.core.frozen import Frozen


class ProfileRecord(Frozen):
    """Min, opt and max size of every symbolic axis."""

    name: str
    axes: dict[str, tuple[int, int, int]]


class TensorRTRecord(Frozen):
    """Build of the plans. `compute_capability` as in "9.0"; hashes are SHA-256 in hexadecimal.

    A plugin library is code that runs in this process, so its path always comes with its hash.
    """

    tensorrt_version: str
    gpu_name: str
    compute_capability: str
    plugins: Literal["plugin", "layers"]
    plugin_library: str | None = None  # path at build time
    plugin_library_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    flags: tuple[str, ...]
    profiles: tuple[ProfileRecord, ...]
    num_layers: Annotated[int, Field(ge=1)]
    build_time_s: Annotated[float, Field(ge=0)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = (self.plugin_library is not None, self.plugin_library_sha256 is not None)
        if self.plugins == "plugin" and not all(named):
            raise ValueError('plugin_library and plugin_library_sha256, since plugins is "plugin"')
        if self.plugins == "layers" and any(named):
            raise ValueError('no plugin_library, since plugins is "layers"')
        return self


def plan_name(rank: int) -> str:
    return f"rank{rank}.engine"
