"""The format of each linear layer, decided and checked before any work.

Embeddings, norms and biases are never quantized; routers and gates only if an override names them.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from dflash_trt.core.dtype import FloatDType, num_bytes_of
from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.frozen import nearest_name
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec, engine_weights
from dflash_trt.core.other_engines import VALUES
from dflash_trt.core.quantization import FormatChoice, LayerKvScales, QuantizationConfig, QuantizationSpec
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, is_linear, rank_shard, segments_of
from dflash_trt.formats.registry import quantized_tensors, weight_format, weight_formats

Component = Literal[
    "target", "drafter", "fc", "lm_head", "draft_lm_head", "router", "gates", "experts", "embeddings and norms"
]

_KV_FORMATS = {"none": False, "fp8": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLinear:
    """`format` None keeps the engine's dtype. `is_stored`: the checkpoint already has it in this format."""

    name: str
    component: Component
    spec: WeightSpec
    format: str | None
    is_stored: bool = False

    @property
    def is_to_be_quantized(self) -> bool:
        return self.format is not None and not self.is_stored

    @property
    def shares_weight_scale(self) -> bool:
        """True if all segments use their largest scale; an expert's gate and up do, as in ModelOpt."""
        return weight_format(self.format or "").shares_weight_scale or self.spec.num_experts > 0

    @property
    def needs_activations(self) -> bool:
        return self.is_to_be_quantized and weight_format(self.format or "").has_input_scale


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentSize:
    """Bytes of one part of the engine, with every tensor in the engine's dtype and as planned."""

    component: Component
    plain_bytes: int
    planned_bytes: int


@dataclass(frozen=True, kw_only=True)
class QuantizationPlan:
    """Every linear of the engine, in the order of its weights, and the formats of its pages."""

    linears: tuple[PlannedLinear, ...]
    has_fp8_target_kv: bool
    has_fp8_draft_kv: bool
    stored: QuantizationSpec
    target: TargetSpec
    draft: DraftSpec | None

    @property
    def formats(self) -> dict[str, str]:
        return {linear.name: linear.format for linear in self.linears if linear.format is not None}

    @property
    def needs_calibration(self) -> bool:
        needs_kv = self.has_fp8_target_kv and self.stored.target_kv is None
        return needs_kv or self.has_fp8_draft_kv or any(linear.needs_activations for linear in self.linears)

    def spec(
        self, target_kv: tuple[LayerKvScales, ...] | None = None, draft_kv: tuple[LayerKvScales, ...] | None = None
    ) -> QuantizationSpec:
        """Quantization of the engine, with calibrated K/V scales (default: 1)."""
        num_draft_layers = self.draft.num_layers if self.draft else 0
        target_scales = self.stored.target_kv or target_kv or (LayerKvScales(),) * self.target.num_layers
        draft_scales = draft_kv or (LayerKvScales(),) * num_draft_layers
        return QuantizationSpec(
            linears=self.formats,
            target_kv=target_scales if self.has_fp8_target_kv else None,
            draft_kv=draft_scales if self.has_fp8_draft_kv else None,
        )

    def table(self) -> WeightTable:
        return engine_weights(self.target, self.draft, self.spec())

    def sizes(self, dtype: FloatDType, weights_dtype: FloatDType | None = None) -> tuple[ComponentSize, ...]:
        """Before and after, per component; a copy of the head that only the plan makes counts 0 before."""
        plain: dict[Component, int] = {}
        planned: dict[Component, int] = {}
        formats = self.formats
        models, table = engine_weights(self.target, self.draft, None), self.table()
        for name, spec in table.items():
            component = component_of(name, spec)
            num_elements = math.prod(spec.shape)
            plain_bytes = num_elements * num_bytes_of(spec.stored_dtype(dtype))
            plain[component] = plain.get(component, 0) + (plain_bytes if name in models else 0)
            num_bytes = num_elements * num_bytes_of(spec.matrix_dtype(name, dtype, weights_dtype))
            if name in formats:
                num_bytes = sum(tensor.num_bytes for tensor in quantized_tensors(name, table, formats[name]).values())
            planned[component] = planned.get(component, 0) + num_bytes
        return tuple(
            ComponentSize(component=component, plain_bytes=plain[component], planned_bytes=planned[component])
            for component in planned
        )


def make_plan(
    config: QuantizationConfig, target: TargetSpec, draft: DraftSpec | None, stored: QuantizationSpec
) -> QuantizationPlan:
    """Resolve the requested formats; layers that the checkpoint has quantized keep theirs.

    Raises:
        ConfigError: an override that matches nothing, a shape that a format cannot hold, a choice that contradicts
            the checkpoint or has nothing to apply to; all of them in one error.
    """
    raise_all(ConfigError, "quantization", list(_unknown_formats(config)))
    copies = _head_copies(config, target, draft)
    table = engine_weights(target, draft, QuantizationSpec(linears=copies))
    linears, problems = [], list(_config_problems(config, draft, table, stored))
    for name, spec in table.items():
        if not is_linear(spec, name):
            continue
        asked = copies.get(name) or _asked(name, spec, config, stored)
        planned = _planned(name, spec, asked, stored)
        problems += _linear_problems(planned, asked)
        linears.append(planned)
    raise_all(ConfigError, "quantization", problems)
    return QuantizationPlan(
        linears=tuple(linears),
        has_fp8_target_kv=stored.target_kv is not None or _KV_FORMATS[config.kv_cache],
        has_fp8_draft_kv=draft is not None and _KV_FORMATS[config.draft_pages],
        stored=stored,
        target=target,
        draft=draft,
    )


def sharding_problems(plan: QuantizationPlan, mapping: Mapping) -> list[str]:
    """Reasons why quantized layers cannot be sharded over these ranks: a block is never split."""
    problems = []
    for linear in plan.linears:
        if linear.format is None or mapping.world_size == 1:
            continue
        known, share = weight_format(linear.format), rank_shard(linear.spec, mapping)
        features = "input" if linear.spec.sharding == "columns" else "output"
        whole, sizes = (linear.spec.shape[-1:], share.shape[-1:])
        if features == "output":
            whole, sizes = segments_of(linear.spec), segments_of(share)
        block = known.columns_per_block if features == "input" else known.rows_per_block
        wrong = [size for size, uncut in zip(sizes, whole, strict=True) if size % block and size != uncut]
        if wrong:
            override = "" if linear.is_stored else f", or add the override '{linear.name}: fp8'"
            experts = f", or set ep_size to {mapping.world_size}" if linear.spec.num_experts else ""
            expected = f"{features} features per rank in blocks of {block} for {linear.format}"
            found = f"{wrong[0]} with tp_size {mapping.world_size}"
            hint = f"Choose a smaller tp_size{experts}{override}."
            problems.append(problem(linear.name, expected=expected, found=found, hint=hint))
    return problems


def component_of(name: str, spec: WeightSpec) -> Component:
    """Which row of a size table a canonical tensor belongs to."""
    if spec.num_experts:
        return "experts"
    if not is_linear(spec, name):
        return "embeddings and norms"
    if name == "target.lm_head":
        return "lm_head"
    if name == "draft.lm_head":
        return "draft_lm_head"
    if name.endswith(".router"):
        return "router"
    if name.endswith((".ba", ".shared_gate")):  # a few rows each, on which a whole head or expert depends
        return "gates"
    if name == "draft.fc":
        return "fc"
    return "target" if name.startswith("target.") else "drafter"


def _head_copies(config: QuantizationConfig, target: TargetSpec, draft: DraftSpec | None) -> dict[str, str]:
    """Heads that exist only as quantized copies, by choice or by an override with the full name.

    Patterns make no copies.
    """
    choices = {"target.lm_head": config.lm_head}
    if draft is not None:
        choices["draft.lm_head"] = config.draft_lm_head
    models = engine_weights(target, draft, None)
    asked = {name: config.overrides.get(name, choice) for name, choice in choices.items() if name not in models}
    return {name: choice for name, choice in asked.items() if choice != "none"}


def _asked(name: str, spec: WeightSpec, config: QuantizationConfig, stored: QuantizationSpec) -> FormatChoice:
    overrides = [choice for pattern, choice in config.overrides.items() if fnmatchcase(name, pattern)]
    if overrides:
        return overrides[-1]
    component = component_of(name, spec)
    choices: dict[Component, FormatChoice] = {
        "target": config.target,
        # The target's format is for what has none yet: experts are often stored in one of their own.
        "experts": config.experts or ("none" if name in stored.linears else config.target),
        "drafter": config.drafter_format,
        "fc": config.drafter_format,
        "lm_head": config.lm_head,
        "draft_lm_head": config.draft_lm_head,
    }
    return choices.get(component, "none")


def _planned(name: str, spec: WeightSpec, asked: FormatChoice, stored: QuantizationSpec) -> PlannedLinear:
    component = component_of(name, spec)
    if name in stored.linears:
        return PlannedLinear(name=name, component=component, spec=spec, format=stored.linears[name], is_stored=True)
    weight_format: str | None = None if asked == "none" else asked
    return PlannedLinear(name=name, component=component, spec=spec, format=weight_format)


def _linear_problems(planned: PlannedLinear, asked: FormatChoice) -> Iterator[str]:
    name, columns = planned.name, planned.spec.shape[-1]
    if planned.is_stored and asked not in ("none", planned.format):
        hint = "Quantize the unquantized checkpoint, or leave this part's choice out to take it as it is."
        yield problem(name, expected=f"{planned.format}, as the checkpoint holds it", found=asked, hint=hint)
        return
    if planned.format is None:
        return
    known = weight_format(planned.format)
    if known.max_columns is not None and columns > known.max_columns:
        expected = f"at most {known.max_columns} input features for {planned.format}"
        yield problem(name, expected=expected, found=str(columns), hint=f"Add the override '{name}: none'.")
    block = known.columns_per_block
    if columns % block and not known.has_partial_blocks:
        hint = f"Add the override '{name}: fp8' or '{name}: none'."
        expected = f"input features in blocks of {block} for {planned.format}"
        yield problem(name, expected=expected, found=str(columns), hint=hint)


def _unknown_formats(config: QuantizationConfig) -> Iterator[str]:
    known = ("none", *weight_formats())
    parts = {"target": config.target, "experts": config.experts, "drafter": config.drafter, "lm_head": config.lm_head}
    parts |= {"draft_lm_head": config.draft_lm_head}
    parts |= {f"override '{pattern}'": choice for pattern, choice in config.overrides.items()}
    for part, choice in parts.items():
        if choice not in (None, *known):
            wanted = VALUES.get(str(choice))
            nearest = wanted if wanted in known else nearest_name(str(choice), _differing(str(choice), known))
            hint = f"Did you mean '{nearest}'?" if nearest else "Choose one of them."
            yield problem(f"format of {part}", expected=", ".join(known), found=str(choice), hint=hint)


def _differing(name: str, known: Iterable[str]) -> list[str]:
    """Those that differ from `name` in more than their numbers: int4 is not what int3 was meant to be."""
    return [other for other in known if re.sub(r"\d", "", other) != re.sub(r"\d", "", name)]


def _config_problems(
    config: QuantizationConfig, draft: DraftSpec | None, table: WeightTable, stored: QuantizationSpec
) -> Iterator[str]:
    names = [name for name, spec in table.items() if is_linear(spec, name)]
    names += ["target.lm_head"] if draft is None else ["target.lm_head", "draft.lm_head"]
    for pattern in config.overrides:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        nearest = nearest_name(pattern, names)
        hint = f"Did you mean '{nearest}'? " if nearest else ""
        hint = f"{hint}`dflash-trt build` prints the names in its plan."
        subject = f"override '{pattern}'"
        yield problem(subject, expected="a pattern that matches a linear layer", found="no match", hint=hint)
    choices = (config.drafter, config.draft_kv_cache, config.draft_lm_head)
    if draft is None and any(choice not in (None, "none") for choice in choices):
        subject, found = "quantization", "a choice for the drafter"
        yield problem(subject, expected="no drafter choices, for there is no drafter", found=found, hint="Remove it.")
    stored_head = stored.linears.get("target.lm_head")
    if config.draft_lm_head != "none" and "draft.lm_head" not in stored.linears and stored_head is not None:
        hint = "Leave draft_lm_head out: the drafter uses the target's head."
        found = f"{config.draft_lm_head}, but the target's head is {stored_head} already"
        yield problem("draft_lm_head", expected="none", found=found, hint=hint)
