"""Rotary embeddings as data; `network/rope.py` computes their frequencies."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from dflash_trt.core.frozen import Frozen, Scale, Size


class RopeSpec(Frozen):
    """Rotary embedding, rotate-half style. Formulas: `transformers.modeling_rope_utils`.

    `attention_factor` multiplies cos and sin (yarn, longrope); None means yarn's own 0.1 * ln(factor) + 1, and 1 in
    longrope. `divisors` divide the frequency of each pair (longrope). `rotated_fraction` of the frequencies of a head
    are turned, the fast ones, and the others stand still (proportional: Gemma 4; none of them: layers without RoPE).
    """

    theta: Annotated[float, Field(ge=2.0, le=1e15)]  # yarn divides by its logarithm
    scaling: Literal["none", "linear", "llama3", "yarn", "longrope", "proportional"] = "none"
    factor: Annotated[float, Field(ge=1.0, le=1e6)] = 1.0
    original_max_position_embeddings: Size | None = None
    low_freq_factor: Scale | None = None  # llama3
    high_freq_factor: Scale | None = None  # llama3
    beta_fast: Scale = 32.0  # yarn
    beta_slow: Scale = 1.0  # yarn
    attention_factor: Scale | None = None  # yarn, longrope
    divisors: tuple[Scale, ...] = ()  # longrope
    mscale: Scale | None = None  # yarn
    mscale_all_dim: Scale | None = None  # yarn
    truncates_correction_range: bool = True  # yarn
    rotated_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0  # proportional

    @field_validator("high_freq_factor")
    @classmethod
    def _above_low_frequencies(cls, high: float | None, info: ValidationInfo) -> float | None:
        low = info.data.get("low_freq_factor")
        if high is not None and low is not None and high < low:
            raise ValueError(f"at least low_freq_factor {low}")
        return high

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scaling in ("llama3", "yarn") and self.original_max_position_embeddings is None:
            raise ValueError(f"original_max_position_embeddings, as scaling is {self.scaling}")
        if self.scaling == "llama3" and (self.low_freq_factor is None or self.high_freq_factor is None):
            raise ValueError("low_freq_factor and high_freq_factor, as scaling is llama3")
        if self.scaling == "yarn" and self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast of at least beta_slow (not {self.beta_fast} and {self.beta_slow})")
        return self


class Rotary(NamedTuple):
    """A rotary embedding of `head_dim` dimensions of a head. Equal values share their tables."""

    rope: RopeSpec
    head_dim: int
