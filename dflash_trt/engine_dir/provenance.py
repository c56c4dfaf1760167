"""provenance.json of an engine directory, typed: where an engine came from, and the hash of its config.json."""

from typing import Annotated, Any

from pydantic import Field

from dflash_trt.core.frozen import Frozen

PROVENANCE_NAME = "provenance.json"

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
NumBytes = Annotated[int, Field(ge=0)]


class EngineFile(Frozen):
    sha256: Sha256
    size_bytes: NumBytes


class ComponentBytes(Frozen):
    """Bytes of one part of the weights, with every tensor in the engine's dtype and as they are stored."""

    component: str
    plain_bytes: NumBytes
    planned_bytes: NumBytes


class BuildRecord(Frozen):
    """What a build knows before config.json is written."""

    command: tuple[str, ...]
    working_dir: str
    config: dict[str, Any]
    checkpoints: dict[str, str]
    inputs: dict[str, EngineFile]
    versions: dict[str, str]
    notes: tuple[str, ...]
    component_bytes: tuple[ComponentBytes, ...]
    build_time_s: Annotated[float, Field(ge=0)]


class Provenance(BuildRecord):
    """All of provenance.json. `config_sha256` is that of config.json, which names the hashes of all other files."""

    config_sha256: Sha256
