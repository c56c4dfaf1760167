"""Formats of weights and K/V pages: a user's (QuantizationConfig), an engine's (QuantizationSpec).

Knows names only; layouts and arithmetic are in `formats/`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dflash_trt.core.frozen import Frozen

FormatChoice = str  # a name of `formats`, or "none"
PageChoice = Literal["none", "fp8"]

PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class CalibrationConfig(Frozen):
    """Prompts on which activations are measured; by default a small set that comes with the package.

    `prompts` is a JSONL file of rows with `prompt`, `messages` or `prompt_token_ids`, relative to the YAML file.
    Each prompt runs in chunks of `chunk_tokens`, and the drafter drafts one block after each chunk.
    """

    prompts: str | None = None
    num_prompts: int = Field(default=64, ge=1)
    max_prompt_tokens: int = Field(default=512, ge=2)
    chunk_tokens: int = Field(default=32, ge=1)


class QuantizationConfig(Frozen):
    """Format of each part; "none" keeps the engine's dtype.

    `drafter` and `draft_kv_cache` default to `target` and `kv_cache`; `experts` default to `target`, where the
    checkpoint does not have them in a format already. `draft_lm_head` is a format for the drafter's own head, or for a
    copy of the target's head that only the drafter uses. `overrides` maps patterns over canonical names ("*" matches
    anything) to formats; the last matching pattern wins.
    """

    target: FormatChoice = "none"
    experts: FormatChoice | None = None
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
    """Scales of one layer's FP8 pages: e4m3(K / k) and e4m3(V / v), rounded to nearest, saturated at 448."""

    k: PositiveFloat = 1.0
    v: PositiveFloat = 1.0


class Calibration(Frozen):
    """Result of calibration. `input_amax` is the largest input magnitude by linear layer's canonical name."""

    input_amax: dict[str, PositiveFloat] = Field(default_factory=dict)
    target_kv: tuple[LayerKvScales, ...] | None = None
    draft_kv: tuple[LayerKvScales, ...] | None = None


class QuantizationSpec(Frozen):
    """The quantized parts of an engine or a checkpoint.

    `linears` maps canonical names of linear layers to formats; absent ones have the engine's dtype. `target.lm_head` of
    a target with tied embeddings and `draft.lm_head` of a drafter without a head are quantized copies. K/V scales are
    one per layer, for FP8 pages; None means pages of the engine's dtype.
    """

    linears: dict[str, str] = Field(default_factory=dict)
    target_kv: tuple[LayerKvScales, ...] | None = None
    draft_kv: tuple[LayerKvScales, ...] | None = None

    def format_of(self, tensor_name: str) -> str | None:
        """Format of the linear layer that a stored tensor (codes or scales) belongs to.

        None for other tensors.
        """
        return self.linears.get(tensor_name, self.linears.get(tensor_name.rpartition(".")[0]))

    @property
    def is_empty(self) -> bool:
        return not self.linears and self.target_kv is None and self.draft_kv is None
