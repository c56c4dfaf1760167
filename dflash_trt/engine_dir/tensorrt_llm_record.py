"""The record of a TensorRT-LLM engine in config.json, and the files that the directory has for it.

`target/` and `drafter/` are Hugging Face checkpoints. Paths among the arguments are relative to the directory.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import Field, JsonValue

from dflash_trt.core.frozen import Frozen

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
