"""provenance.json of an engine directory: the engine's origin, and the hash of its config.json."""

from typing import Annotated, Any

from pydantic import Field

from dflash_trt.core.frozen import Frozen
from dflash_trt.core.hub_name import HubSource

PROVENANCE_NAME = "provenance.json"

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
NumBytes = Annotated[int, Field(ge=0)]


class EngineFile(Frozen):
    sha256: Sha256
    size_bytes: NumBytes


class ComponentBytes(Frozen):
    """Bytes of one component's weights: unquantized (plain_bytes) and as stored (planned_bytes)."""

    component: str
    plain_bytes: NumBytes
    planned_bytes: NumBytes


class BuildRecord(Frozen):
    """The part of provenance.json that is known before config.json is written."""

    command: tuple[str, ...]
    working_dir: str
    config: dict[str, Any]
    checkpoints: dict[str, str]
    hub: dict[str, HubSource] = Field(default_factory=dict)  # checkpoints from the Hugging Face hub, by role
    inputs: dict[str, EngineFile]
    versions: dict[str, str]
    notes: tuple[str, ...]
    component_bytes: tuple[ComponentBytes, ...]
    build_time_s: Annotated[float, Field(ge=0)]


class Provenance(BuildRecord):
    """All of provenance.json. `config_sha256` hashes config.json, which has the hashes of all other files."""

    config_sha256: Sha256
