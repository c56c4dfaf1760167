"""Calibration of a pair: the weights it holds meanwhile, and the order of the passes.

Two passes: the target in the engine's dtype; then the drafter, on the taps of the target as it was just quantized.
The passes themselves are in `calibration_pass`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from dflash_trt.backends.torch.quantized_linear import prepare_linear
from dflash_trt.checkpoint.pair import CheckpointPair
from dflash_trt.compile.calibration_pass import CalibrationPass
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.quantization import Calibration
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.formats.registry import split_quantized
from dflash_trt.network.ops import Linear
from dflash_trt.network.rank_tensors import RankTensors, map_linears
from dflash_trt.network.step import Network, bind_network
from dflash_trt.quantize.calibrate import LinearBank, observe
from dflash_trt.quantize.plan import PlannedLinear, QuantizationPlan
from dflash_trt.quantize.stream import joined, quantize_linear

Advance = Callable[[str, int, int], None]  # ("target" or "draft", prompts done, prompts)


def calibrate_pair(
    pair: CheckpointPair,
    plan: QuantizationPlan,
    prompts: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype,
    chunk_tokens: int,
    advance: Advance,
) -> Calibration:
    """Ranges of everything that the plan quantizes while it runs.

    Raises:
        ConfigError: ModelOpt is missing, or a range is not finite and positive.
        CheckpointError: a weight is unusable.
    """
    weights = _PairWeights(pair, plan, dtype)
    found = Calibration()
    with torch.no_grad():
        wants_target_kv = plan.has_fp8_target_kv and plan.stored.target_kv is None
        if wants_target_kv or _wanted(plan, "target"):
            seen = _measure(weights, plan, "target", prompts, chunk_tokens, advance)
            kv_scales = seen.kv_scales("target") if wants_target_kv else None
            found = Calibration(input_amax=seen.input_amax, target_kv=kv_scales)
        if plan.has_fp8_draft_kv or _wanted(plan, "draft"):
            weights.quantize_target(found)
            seen = _measure(weights, plan, "draft", prompts, chunk_tokens, advance)
            kv_scales = seen.kv_scales("draft") if plan.has_fp8_draft_kv else None
            found = Calibration(
                input_amax=found.input_amax | seen.input_amax, target_kv=found.target_kv, draft_kv=kv_scales
            )
    return found


def _measure(
    weights: "_PairWeights",
    plan: QuantizationPlan,
    part: Literal["target", "draft"],
    prompts: Sequence[Sequence[int]],
    chunk_tokens: int,
    advance: Advance,
) -> CalibrationPass:
    """Run one pass over the prompts while ModelOpt observes the linear layers of one part."""
    names = [linear.name for linear in _wanted(plan, part)]
    calibration_pass = CalibrationPass(weights.network(), max_tokens=max(map(len, prompts)))

    def run(bank: LinearBank) -> None:
        for done, prompt in enumerate(prompts):
            advance(part, done, len(prompts))
            calibration_pass.run(bank, prompt, chunk_tokens=chunk_tokens)
        advance(part, len(prompts), len(prompts))

    if names:
        plain = {name: weights.plain(name) for name in names}
        calibration_pass.input_amax = observe(plain, plan.formats, run)
    else:
        run(LinearBank({}))
    return calibration_pass


def _wanted(plan: QuantizationPlan, part: str) -> list[PlannedLinear]:
    return [x for x in plan.linears if x.needs_activations and x.name.startswith(f"{part}.")]


class _PairWeights:
    """The weights of a pair: unquantized in the engine's dtype until they are quantized."""

    def __init__(self, pair: CheckpointPair, plan: QuantizationPlan, dtype: torch.dtype) -> None:
        self._plan = plan
        self._dtype = dtype
        stream = joined(pair.iter_weights(dtype=dtype, mapping=Mapping()), dtype=dtype)
        table = engine_weights(pair.target, pair.draft, pair.quantization)
        self._plain, self._quantized = split_quantized(dict(stream), table, pair.quantization.linears)
        self._head = self._plain.get("target.embedding" if pair.target.is_embedding_tied else "target.lm_head")

    def plain(self, name: str) -> Tensor:
        """An unquantized weight [out, in]; a copy of the head is the head itself."""
        if name not in self._plain:
            assert name.endswith(".lm_head") and self._head is not None, f"{name} has no plain weight"
            return self._head
        return self._plain[name]

    def quantize_target(self, calibration: Calibration) -> None:
        """The target as the engine will have it."""
        for linear in self._plan.linears:
            if linear.format is not None and not linear.is_stored and linear.name.startswith("target."):
                self._quantized[linear.name] = quantize_linear(linear, self.plain(linear.name), calibration)
                self._plain.pop(linear.name, None)

    def network(self) -> Network[Tensor]:
        """Bound to the weights as they are; the drafter has a head of its own where the plan makes it a copy."""
        target, draft = self._plan.target, self._plan.draft

        def rows(x: Tensor, start: int, stop: int) -> Tensor:
            return x[start:stop]

        plain = self._plain
        if "draft.lm_head" in self._plan.formats and "draft.lm_head" not in self._quantized:
            plain = plain | {"draft.lm_head": self.plain("draft.lm_head")}
        network = bind_network(target, draft, RankTensors(plain=plain, quantized=self._quantized, slice_rows=rows))
        return replace(
            network,
            target_weights=map_linears(network.target_weights, self._dequantized),
            drafter=map_linears(network.drafter, self._dequantized),
        )

    def _dequantized(self, linear: Linear[Tensor]) -> Linear[Tensor]:
        return prepare_linear(linear, self._dtype) if isinstance(linear.weight, QuantizedWeight) else linear
