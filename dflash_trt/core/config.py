"""The build configuration, as `dflash-trt build CONFIG.yaml` reads it."""

from collections.abc import Iterator
from collections.abc import Mapping as AbcMapping
from typing import Any, Final, Literal, Self

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from dflash_trt.core.chat_template_options import reserved_problems
from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.frozen import MAX_INT32, Frozen
from dflash_trt.core.kernel_archive import Architecture
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.other_engines import hint_for
from dflash_trt.core.quantization import CalibrationConfig, QuantizationConfig

Backend = Literal["torch", "tensorrt", "tensorrt_llm"]
CollectiveMode = Literal["native", "plugin"]

MTP: Final = "mtp"  # the drafter that is the target's own MTP head


class BuildConfig(Frozen):
    """One engine to build. Limits have TensorRT-LLM's names; paths are relative to the YAML file.

    Checkpoints are directories, or names on the Hugging Face hub (OWNER/NAME or OWNER/NAME@REVISION). A name has its
    known drafter by default, a directory none; without one (`drafter: none`) the engine decodes autoregressively.
    `drafter: mtp` is the MTP head in the target's own checkpoint. `max_seq_len` and `max_draft_len` default to the
    maximum that the checkpoints allow. `drafter_overrides` replace keys of the drafter's config.json,
    `chat_template_options` those that the drafter is known to need.
    """

    target: str
    drafter: str | None = None
    drafter_overrides: dict[str, JsonValue] = Field(default_factory=dict)
    draft_window: int | None = Field(default=None, ge=1, le=MAX_INT32)  # tokens of context that the drafter sees
    chat_template_options: dict[str, JsonValue] = Field(default_factory=dict)
    backend: Backend = "torch"
    dtype: FloatDType = "bfloat16"
    max_batch_size: int = Field(default=64, ge=1, le=MAX_INT32)
    max_seq_len: int | None = Field(default=None, ge=2, le=MAX_INT32)
    max_num_tokens: int = Field(default=2048, ge=1, le=MAX_INT32)
    max_draft_len: int | None = Field(default=None, ge=0, le=MAX_INT32)
    page_size: int = Field(default=32, ge=1, le=MAX_INT32)
    tp_size: int = Field(default=1, ge=1, le=1024)  # one process (and GPU) per rank
    ep_size: int = Field(default=1, ge=1, le=1024)  # groups of ranks that have a part of the experts each
    attention_dp: bool = False  # each rank has requests of its own, and all weights of attention
    dcp_size: int = Field(default=1, ge=1, le=1024)  # 1, or tp_size: ranks that divide the positions of latents
    quantization: QuantizationConfig | None = None
    plugin_library: str | None = None  # backend tensorrt, which needs it
    collectives: CollectiveMode = "native"  # backend tensorrt, several ranks: TensorRT's own layers, or plugins
    deterministic: bool = False  # backend tensorrt: a text depends on its request alone
    compile_for: tuple[Architecture, ...] = ()  # backend torch: GPUs whose compiled kernels the engine ships

    @field_validator("drafter", mode="before")
    @classmethod
    def _none(cls, value: object) -> object:
        return None if value == "none" else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.drafter_overrides and self.drafter is None:
            raise ValueError("drafter_overrides need a drafter")
        for reason in reserved_problems(self.chat_template_options, "chat_template_options"):
            raise ValueError(reason)
        if self.draft_window is not None and self.backend == "tensorrt_llm":
            raise ValueError(
                "draft_window needs backend torch or tensorrt; TensorRT-LLM reads the drafter's own config"
            )
        if self.dtype == "float16" and self.backend == "torch":
            raise ValueError("dtype float16 needs backend tensorrt or tensorrt_llm; torch has float32 and bfloat16")
        if self.compile_for and self.backend != "torch":
            raise ValueError(f"compile_for needs backend torch; engines of {self.backend} run no Triton kernels")
        if self.collectives == "plugin" and self.backend != "tensorrt":
            raise ValueError("collectives plugin needs backend tensorrt")
        if self.deterministic and self.backend != "tensorrt":
            raise ValueError("deterministic needs backend tensorrt; other backends take it where an engine is opened")
        for reason in self._rank_problems():
            raise ValueError(reason)
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_tokens {self.max_num_tokens} is less than max_batch_size {self.max_batch_size}: "
                "every request needs at least one token per step"
            )
        return self

    def _rank_problems(self) -> Iterator[str]:
        if self.tp_size % self.ep_size:
            yield f"ep_size {self.ep_size} does not divide tp_size {self.tp_size}, the number of ranks"
        if self.attention_dp and self.tp_size == 1:
            yield "attention_dp needs several ranks: set tp_size to their number"
        if self.attention_dp and self.backend == "tensorrt_llm":
            yield "attention_dp needs backend torch or tensorrt; TensorRT-LLM checkpoints divide attention"
        if self.dcp_size == 1:
            return
        if self.backend != "torch":
            yield f"dcp_size needs backend torch; engines of {self.backend} keep all positions on every rank"
        if self.attention_dp:
            yield "dcp_size divides what all ranks attend to; with attention_dp each has requests of its own"
        if self.dcp_size != self.tp_size:
            yield f"dcp_size {self.dcp_size} is neither 1 nor tp_size {self.tp_size}"
        if self.page_size % self.dcp_size:
            yield f"page_size {self.page_size} is no multiple of dcp_size {self.dcp_size}, which divides each page"

    @property
    def mapping(self) -> Mapping:
        """That of rank 0."""
        tp_size, dp_size = (1, self.tp_size) if self.attention_dp else (self.tp_size, 1)
        sizes = {"tp_size": tp_size, "dp_size": dp_size, "ep_size": self.ep_size, "dcp_size": self.dcp_size}
        return Mapping(world_size=self.tp_size, **sizes)

    @property
    def drafter_checkpoint(self) -> str | None:
        """The checkpoint with the drafter's tensors: for an MTP head the target's."""
        return self.target if self.drafter == MTP else self.drafter


def build_config_from(fields: AbcMapping[str, Any], *, source: str) -> BuildConfig:
    """Check the fields of a file or a command line.

    Raises:
        ConfigError: an unknown key, a missing key or a value out of range; all of them in one error.
    """
    try:
        return BuildConfig(**fields)
    except ValidationError as error:
        problems = [_problem_of(details) for details in error.errors()]
        raise_all(ConfigError, source, problems)
        raise AssertionError("pydantic raised without an error") from error


_SECTIONS: dict[str, type[Frozen]] = {
    "": BuildConfig,
    "quantization": QuantizationConfig,
    "quantization.calibration": CalibrationConfig,
}


def _problem_of(details: Any) -> str:
    expected = details["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    name = ".".join(str(part) for part in details["loc"])
    if not name:  # fields that contradict one another
        return f"{expected}."
    if details["type"] == "extra_forbidden":
        section, _, key = name.rpartition(".")
        known = _SECTIONS[section].model_fields
        return f"key '{name}' is unknown. {hint_for(key, known)}"
    if details["type"] == "missing":
        return f"key '{name}' is missing."
    return problem(f"key '{name}'", expected=expected, found=f"{details['input']!r:.80}")
