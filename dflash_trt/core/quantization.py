"""Formats of weights and K/V pages: what a user asks for (QuantizationConfig), what an engine holds (QuantizationSpec).

Knows names only; layouts and arithmetic are in `formats/`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dflash_trt.core.frozen import Frozen

FormatChoice = str  # a name of `formats`, or "none"
PageChoice = Literal["none", "fp8"]

PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class CalibrationConfig(Frozen):
    """What the activations are measured on. Without `prompts`, a small set that comes with the package.

    `prompts` is a JSONL file of rows with `prompt`, `messages` or `prompt_token_ids`, relative to the YAML file.
    Each prompt runs in chunks of `chunk_tokens`, and the drafter drafts one block after each chunk.
    """

    prompts: str | None = None
    num_prompts: int = Field(default=64, ge=1)
    max_prompt_tokens: int = Field(default=512, ge=2)
    chunk_tokens: int = Field(default=32, ge=1)


class QuantizationConfig(Frozen):
    """Which format each part gets; "none" keeps the engine's dtype.

    Parts without a choice follow others: `drafter` and `draft_kv_cache` are like `target` and `kv_cache`, `lm_head`
    stays, and `draft_lm_head`, the drafter's own copy of the head, exists only when it is chosen (a drafter that
    brings a head of its own keeps it plain by default). `overrides` maps patterns over canonical names ("*" matches
    anything) to formats; the last pattern that matches wins.
    """

    target: FormatChoice = "none"
    drafter: FormatChoice | None = None
    lm_head: FormatChoice = "none"
    draft_lm_head: FormatChoice = "none"
    kv_cache: PageChoice = "none"
    draft_kv_cache: PageChoice | None = None
    overrides: dict[str, FormatChoice] = Field(default_factory=dict)
    calibration: CalibrationConfig = CalibrationConfig()

    @model_validator(mode="before")
    @classmethod
    def _from_one_word(cls, value: Any) -> Any:
        return {"target": value} if isinstance(value, str) else value

    @property
    def drafter_format(self) -> FormatChoice:
        return self.target if self.drafter is None else self.drafter

    @property
    def draft_pages(self) -> PageChoice:
        return self.kv_cache if self.draft_kv_cache is None else self.draft_kv_cache


class LayerKvScales(Frozen):
    """FP8 pages of one layer hold e4m3(K / k) and e4m3(V / v), rounded to nearest and saturated at 448."""

    k: PositiveFloat = 1.0
    v: PositiveFloat = 1.0


class Calibration(Frozen):
    """What calibration finds. `input_amax` is the largest magnitude that entered each linear, by canonical name."""

    input_amax: dict[str, PositiveFloat] = Field(default_factory=dict)
    target_kv: tuple[LayerKvScales, ...] | None = None
    draft_kv: tuple[LayerKvScales, ...] | None = None


class QuantizationSpec(Frozen):
    """What an engine, or a checkpoint, holds in low precision.

    `linears` are canonical names; those that are absent have the engine's dtype. It may name `target.lm_head` of a
    target with tied embeddings and `draft.lm_head` of a drafter without a head: quantized copies made for the product.
    K/V scales are one per layer, for FP8 pages; None means pages of the engine's dtype.
    """

    linears: dict[str, str] = Field(default_factory=dict)
    target_kv: tuple[LayerKvScales, ...] | None = None
    draft_kv: tuple[LayerKvScales, ...] | None = None

    def format_of(self, tensor_name: str) -> str | None:
        """Format of the linear that a stored tensor belongs to, codes or scales; None for any other tensor."""
        return self.linears.get(tensor_name, self.linears.get(tensor_name.rpartition(".")[0]))

    @property
    def is_empty(self) -> bool:
        return not self.linears and self.target_kv is None and self.draft_kv is None
