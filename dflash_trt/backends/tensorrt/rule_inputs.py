"""Logit rules and token masks as inputs of an engine, whose sampling node adjusts the logits of a step with any.

Such a step has shapes and addresses of its own, so it runs without a graph.
"""

from dataclasses import fields

import torch
from torch import Tensor

from dflash_trt.backends.logit_rules import DeviceRules, mask_tensors
from dflash_trt.backends.padding import StepShape
from dflash_trt.backends.slots import PlanInputs
from dflash_trt.core.step_plan import ExecutorLimits, StepPlan
from dflash_trt.kernels.rule_tensors import MaskTensors, RuleTensors
from dflash_trt.network.ops import StepInputs


class RuleInputs:
    """Rules by slot, at addresses that are bound once, and the masks of each step."""

    def __init__(self, limits: ExecutorLimits, *, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._rules = DeviceRules(limits, device)
        self._no_masks = mask_tensors(None, num_rows=0, vocab_size=vocab_size, device=device)

    @property
    def by_slot(self) -> dict[str, Tensor]:
        """By name of the engine's tensor; their shapes never change."""
        return _named(self._rules.tensors)

    @property
    def without(self) -> dict[str, Tensor]:
        """Masks of a step without rules and masks."""
        return _named(self._no_masks)

    def of_step(self, plan: StepPlan, shape: StepShape) -> dict[str, Tensor] | None:
        """Take over the plan's rules, on the current stream, and upload its masks.

        None for a step whose logits are sampled as they are.
        """
        has_rules = self._rules.update(plan)
        if not has_rules and plan.masks is None:
            return None
        num_rows = shape.num_requests * shape.width
        return _named(mask_tensors(plan.masks, num_rows=num_rows, vocab_size=self._vocab_size, device=self._device))

    def write_tokens(self, plan: PlanInputs, inputs: StepInputs[Tensor]) -> None:
        """See `DeviceRules.write_tokens`."""
        self._rules.write_tokens(plan, inputs)


def _named(tensors: RuleTensors | MaskTensors) -> dict[str, Tensor]:
    return {item.name: getattr(tensors, item.name) for item in fields(tensors)}
