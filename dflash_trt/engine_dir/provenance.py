"""Records of an engine directory: provenance.json, and what config.json says of plans or of TensorRT-LLM.

provenance.json has the engine's origin, and the hash of config.json. The record of plans is enough to refuse a wrong
machine before loading one. A TensorRT-LLM engine has Hugging Face checkpoints in `target/` and `drafter/`; paths among
its arguments are relative to the directory.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, JsonValue

from dflash_trt.core.frozen import Frozen
from dflash_trt.core.known_pairs import HubSource

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


TARGET_DIR: Final = "target"
DRAFTER_DIR: Final = "drafter"
LLM_ARGS_NAME: Final = "llm_args.yaml"
TRITON_MODEL_NAME: Final = "triton/model.yaml"
TENSORRT_LLM_VERSIONS: Final = ">=1.4.0rc1,<1.5"
CONTAINER: Final = "nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc1"

_CANCELLATION_CHECK_PERIOD_MS = 100


class TensorRTLLMRecord(Frozen):
    """`llm_args` are keyword arguments of tensorrt_llm.LLM, as in llm_args.yaml, for its `versions`."""

    versions: str = TENSORRT_LLM_VERSIONS
    llm_args: dict[str, JsonValue] = Field(min_length=1)

    def required_files(self, *, has_drafter: bool) -> tuple[str, ...]:
        """Files that a directory must have, besides the tensors."""
        configs = [f"{directory}/config.json" for directory in (TARGET_DIR, *([DRAFTER_DIR] if has_drafter else []))]
        return (*configs, LLM_ARGS_NAME, TRITON_MODEL_NAME)

    def resolved_args(self, directory: Path) -> dict[str, Any]:
        """The arguments with absolute paths."""
        root = directory.absolute()
        args: dict[str, Any] = dict(self.llm_args)
        args["model"] = str(root / str(args["model"]))
        speculative = args.get("speculative_config")
        if isinstance(speculative, dict):
            drafter = str(root / str(speculative["speculative_model"]))
            args["speculative_config"] = speculative | {"speculative_model": drafter}
        return args


def triton_model(args: Mapping[str, Any]) -> dict[str, Any]:
    """model.yaml of the llmapi model of TensorRT-LLM's Triton back end."""
    triton_config = {
        "max_batch_size": 0,
        "decoupled": True,
        "cancellation_check_period_ms": _CANCELLATION_CHECK_PERIOD_MS,
    }
    return {**args, "triton_config": triton_config}


def yaml_text(fields: Mapping[str, Any], *, indent: str = "") -> str:
    """Nested mappings as blocks, everything else as JSON, which is YAML too."""
    lines = []
    for name, value in fields.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name}:\n{yaml_text(value, indent=f'{indent}  ')}")
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}\n")
    return "".join(lines)
