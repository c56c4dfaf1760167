"""The build configuration: what `dflash-trt build CONFIG.yaml` reads."""

from collections.abc import Mapping as AbcMapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.frozen import Frozen, nearest_name

Backend = Literal["torch"]


class BuildConfig(Frozen):
    """One engine to build. Limits carry TensorRT-LLM's names; paths are relative to the YAML file that names them.

    `drafter` may be left out: the engine then decodes autoregressively. `max_seq_len` and `max_draft_len` default to
    what the checkpoints allow.
    """

    target: str
    drafter: str | None = None
    backend: Backend = "torch"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_batch_size: int = Field(default=64, ge=1)
    max_seq_len: int | None = Field(default=None, ge=2)
    max_num_tokens: int = Field(default=2048, ge=1)
    max_draft_len: int | None = Field(default=None, ge=0)
    page_size: int = Field(default=32, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_tokens {self.max_num_tokens} is less than max_batch_size {self.max_batch_size}: "
                "every request needs at least one token per step"
            )
        return self


def build_config_from(fields: AbcMapping[str, Any], *, source: str) -> BuildConfig:
    """Check foreign fields, naming each wrong one with what was expected and the nearest known name.

    Raises:
        ConfigError: an unknown key, a missing key or a value out of range; all of them in one error.
    """
    try:
        return BuildConfig(**fields)
    except ValidationError as error:
        problems = [_problem_of(details, fields) for details in error.errors()]
        raise_all(ConfigError, source, problems)
        raise AssertionError("pydantic raised without an error") from error


def _problem_of(details: Any, fields: AbcMapping[str, Any]) -> str:
    name = ".".join(str(part) for part in details["loc"]) or "configuration"
    if details["type"] == "extra_forbidden":
        nearest = nearest_name(name, BuildConfig.model_fields)
        mend = f"Did you mean '{nearest}'?" if nearest else f"Known keys: {', '.join(BuildConfig.model_fields)}."
        return problem(f"key '{name}'", expected="a known key", found="an unknown one", mend=mend)
    if details["type"] == "missing":
        return problem(f"key '{name}'", expected="a value", found="none", mend=f"Add '{name}: ...'.")
    found = repr(fields[name]) if name in fields else "this combination"
    return problem(f"key '{name}'", expected=details["msg"], found=found, mend="Change the value.")
