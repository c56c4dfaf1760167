"""Logit rules and token masks of one step on a GPU. Such steps sample without a graph."""

from torch import Tensor

from dflash_trt.backends.logit_rules import DeviceRules
from dflash_trt.backends.slots import PlanInputs
from dflash_trt.kernels.rule_tensors import MaskTensors
from dflash_trt.kernels.sampling_launch import SamplingOutputs, adjusted_scores, write_raw_logprobs
from dflash_trt.network.ops import StepInputs


class StepRules:
    """Rules and masks in one step."""

    def __init__(self, rules: DeviceRules, masks: MaskTensors, plan: PlanInputs, inputs: StepInputs[Tensor]) -> None:
        rules.write_tokens(plan, inputs)
        self._rules, self._masks, self._inputs = rules.tensors, masks, inputs
        self._slot_ids = plan.slot_ids

    def scores(self, logits: Tensor) -> Tensor:
        inputs = self._inputs
        return adjusted_scores(
            logits,
            self._rules,
            self._masks,
            slot_ids=self._slot_ids,
            positions=inputs.positions,
            logit_rows=inputs.logit_rows,
        )

    def write_logprobs(self, logits: Tensor, scores: Tensor, outputs: SamplingOutputs) -> None:
        """Log-probabilities under the logits before rules and masks."""
        write_raw_logprobs(
            logits,
            scores,
            self._rules,
            self._masks,
            slot_ids=self._slot_ids,
            emitted_tokens=outputs.emitted_tokens,
            emitted_logprobs=outputs.emitted_logprobs,
        )
