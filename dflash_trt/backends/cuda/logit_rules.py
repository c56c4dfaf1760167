"""Logit rules of slots on a GPU.

Steps with rules run without a graph; memory is allocated at the first.
"""

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.slots import PlanInputs
from dflash_trt.backends.staging import upload
from dflash_trt.core.array import Array
from dflash_trt.core.logit_rules import ANY_TOKEN, MAX_BAD_WORD_TOKENS, LogitRules
from dflash_trt.core.step_plan import ExecutorLimits, StepPlan
from dflash_trt.kernels.logit_rules_launch import RuleTensors, adjusted_scores, write_raw_logprobs
from dflash_trt.kernels.sampling_launch import SamplingOutputs
from dflash_trt.network.ops import StepInputs


class DeviceRules:
    """Rules and tokens by slot; the last slot is for padding."""

    def __init__(self, limits: ExecutorLimits, device: torch.device) -> None:
        self._size = limits.max_batch_size + 1
        self._max_positions = limits.max_positions
        self._device = device
        self._slots: set[int] = set()  # with rules
        self._tensors: RuleTensors | None = None

    def update(self, plan: StepPlan) -> bool:
        """Take over the updates of a plan, on the current stream; True if a row has rules."""
        for update in plan.slot_updates:
            if update.rules is not None:
                self._slots.add(update.slot)
                self._write(update.slot, update.rules, update.token_ids)
            elif update.slot in self._slots:
                self._slots.remove(update.slot)
                _fill(self.tensors.has_rules, update.slot, 0)
        return bool(self._slots) and not self._slots.isdisjoint(plan.rows.slot_ids.tolist())

    @property
    def tensors(self) -> RuleTensors:
        if self._tensors is None:
            self._tensors = RuleTensors.allocate(self._size, self._max_positions, self._device)
        return self._tensors

    def write_tokens(self, plan: PlanInputs, inputs: StepInputs[Tensor]) -> None:
        """Write the tokens of a step by slot and position; tokens of no request go to the padding slot."""
        num_requests = len(inputs.context_lens)
        slots = plan.slot_ids[plan.token_rows.clamp(max=num_requests - 1)]
        slots = torch.where(plan.token_rows < num_requests, slots, self._size - 1)
        self.tensors.tokens.index_put_((slots, inputs.positions.long()), inputs.token_ids)

    def _write(self, slot: int, rules: LogitRules, token_ids: Array) -> None:
        """A few small copies, once a request; the host does not wait for the device."""
        tensors, num_biases, prefix_len = self.tensors, *rules.prefixes.shape
        penalties = np.array((rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty))
        _fill(tensors.has_rules, slot, 1)
        _fill(tensors.num_prompt_tokens, slot, rules.num_prompt_tokens)
        _fill(tensors.num_biases, slot, num_biases)
        _fill(tensors.prefixes, slot, ANY_TOKEN)
        for place, values in (
            (tensors.penalties[slot], penalties),
            (tensors.bias_tokens[slot, :num_biases], rules.token_ids),
            (tensors.bias_values[slot, :num_biases], rules.biases),
            (tensors.bias_ends[slot, :num_biases], rules.ends),
            (tensors.prefixes[slot, :num_biases, MAX_BAD_WORD_TOKENS - prefix_len :], rules.prefixes),
            (tensors.tokens[slot, : len(token_ids)], token_ids),
        ):
            place.copy_(upload(torch.from_numpy(values).to(place.dtype), self._device))


def _fill(tensor: Tensor, slot: int, value: int) -> None:
    """Unlike an assignment, which copies the number from pageable memory and waits."""
    tensor[slot : slot + 1].fill_(value)


class StepRules:
    """Rules in one step."""

    def __init__(self, rules: DeviceRules, plan: PlanInputs, inputs: StepInputs[Tensor]) -> None:
        rules.write_tokens(plan, inputs)
        self._tensors, self._inputs = rules.tensors, inputs
        self._slot_ids = plan.slot_ids

    def scores(self, logits: Tensor) -> Tensor:
        inputs = self._inputs
        return adjusted_scores(
            logits, self._tensors, slot_ids=self._slot_ids, positions=inputs.positions, logit_rows=inputs.logit_rows
        )

    def write_logprobs(self, logits: Tensor, scores: Tensor, outputs: SamplingOutputs) -> None:
        """Log-probabilities under the logits before the rules."""
        write_raw_logprobs(
            logits,
            scores,
            self._tensors,
            slot_ids=self._slot_ids,
            emitted_tokens=outputs.emitted_tokens,
            emitted_logprobs=outputs.emitted_logprobs,
        )
