"""Logit rules of slots and token masks of steps, in a device's memory. No operation waits for the device."""

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.slots import PlanInputs, upload
from dflash_trt.core.array import Array
from dflash_trt.core.logit_rules import ANY_TOKEN, MAX_BAD_WORD_TOKENS, LogitRules
from dflash_trt.core.step_plan import ExecutorLimits, StepPlan, TokenMasks
from dflash_trt.kernels.rule_tensors import MaskTensors, RuleTensors
from dflash_trt.network.ops import StepInputs


class DeviceRules:
    """Rules and tokens by slot; the last slot is for padding. Memory is allocated when it is first asked for."""

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


def mask_tensors(masks: TokenMasks | None, *, num_rows: int, vocab_size: int, device: torch.device) -> MaskTensors:
    """Masks of a step of `num_rows` rows of logits, R*(K+1); None for a step without any."""
    row_masks = np.zeros(num_rows + 1, np.int32)
    bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
    if masks is not None and len(masks.rows):
        row_masks[masks.rows] = 1 + np.arange(len(masks.rows))
        bits = masks.bits
    return MaskTensors(
        row_masks=upload(torch.from_numpy(row_masks), device), mask_bits=upload(torch.from_numpy(bits), device)
    )
