"""Memory of logit rules on a device, as the kernels of `logit_rules.py` read it. Needs no Triton."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dflash_trt.core.logit_rules import MAX_BAD_WORD_TOKENS, MAX_BIASES


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleTensors:
    """Rules by slot; names and shapes of `programs.sampling.RULE_TENSORS`."""

    has_rules: Tensor  # int32 [S]
    num_prompt_tokens: Tensor  # int32 [S]
    penalties: Tensor  # float32 [S, 3]: repetition, presence, frequency
    num_biases: Tensor  # int32 [S]
    bias_tokens: Tensor  # int32 [S, MAX_BIASES]
    bias_values: Tensor  # float32 [S, MAX_BIASES]
    bias_ends: Tensor  # int32 [S, MAX_BIASES]
    prefixes: Tensor  # int32 [S, MAX_BIASES, MAX_BAD_WORD_TOKENS]
    tokens: Tensor  # int32 [S, max_positions]

    @classmethod
    def allocate(cls, num_slots: int, max_positions: int, device: torch.device) -> Self:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros((num_slots, *shape), dtype=dtype, device=device)

        return cls(
            has_rules=zeros(),
            num_prompt_tokens=zeros(),
            penalties=zeros(3, dtype=torch.float32),
            num_biases=zeros(),
            bias_tokens=zeros(MAX_BIASES),
            bias_values=zeros(MAX_BIASES, dtype=torch.float32),
            bias_ends=zeros(MAX_BIASES),
            prefixes=zeros(MAX_BIASES, MAX_BAD_WORD_TOKENS),
            tokens=zeros(max_positions),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskTensors:
    """Token masks of a step's rows of logits."""

    row_masks: Tensor  # int32 [R*(K+1) + 1]: each row's mask from 1 on, or 0; the last entry is of no row
    mask_bits: Tensor  # int32 [any, ceil(V / 32)], mask i in row i - 1
