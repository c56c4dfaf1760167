"""The record of a TensorRT-LLM engine in config.json, and the files that the directory has for it.

`target/` and `drafter/` are Hugging Face checkpoints. Paths among the arguments are relative to the directory.
"""

from pathlib import Path
from typing import Any, Final

from pydantic import Field, JsonValue

from dflash_trt.core.frozen import Frozen

TARGET_DIR: Final = "target"
DRAFTER_DIR: Final = "drafter"
LLM_ARGS_NAME: Final = "llm_args.yaml"
TRITON_MODEL_NAME: Final = "triton/model.yaml"
TENSORRT_LLM_VERSIONS: Final = ">=1.4.0rc1,<1.5"


class TensorRTLLMRecord(Frozen):
    """`llm_args` are keyword arguments of tensorrt_llm.LLM, as llm_args.yaml has them; `versions` of it know them."""

    versions: str = TENSORRT_LLM_VERSIONS
    llm_args: dict[str, JsonValue] = Field(min_length=1)

    def required_files(self, *, has_drafter: bool) -> tuple[str, ...]:
        """Files that a directory must have, beside the tensors."""
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
