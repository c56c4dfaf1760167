"""Masked rows of logits on a GPU: a few PyTorch ops in steps without a graph.

None waits for the device.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.staging import upload
from dflash_trt.core.step_plan import TokenMasks
from dflash_trt.kernels.sampling_launch import SamplingOutputs


@dataclass(frozen=True, slots=True)
class DeviceMasks:
    """`core.step_plan.TokenMasks` on the device."""

    rows: Tensor  # int64 [G]
    bits: Tensor  # uint8 [G, ceil(V / 8)]

    @classmethod
    def upload(cls, masks: TokenMasks, device: torch.device) -> Self:
        rows, octets = torch.from_numpy(masks.rows), torch.from_numpy(masks.bits.view(np.uint8))
        return cls(upload(rows, device), upload(octets, device))

    @classmethod
    def none(cls, vocab_size: int, device: torch.device) -> Self:
        """One row that may give no token: for warming up."""
        bits = torch.zeros((1, -(-vocab_size // 8)), dtype=torch.uint8, device=device)
        return cls(torch.zeros(1, dtype=torch.int64, device=device), bits)

    def mask(self, scores: Tensor) -> None:  # float32 [R*(K+1), V]
        """-infinity for the tokens that a row must not give, in place: a batch of scores may be a gigabyte."""
        places = torch.arange(8, dtype=torch.uint8, device=self.bits.device)
        is_allowed = ((self.bits[..., None] >> places) & 1).flatten(1)[:, : scores.shape[1]]
        scores.index_copy_(0, self.rows, scores[self.rows].masked_fill_(is_allowed == 0, -torch.inf))

    def write_logprobs(self, logits: Tensor, scores: Tensor, outputs: SamplingOutputs) -> None:
        """Log-probabilities of the masked rows under the logits before all rules and masks.

        NaN, as in the torch backend, in a row whose tokens are all ruled out.
        """
        tokens = outputs.emitted_tokens.view(-1)[self.rows].long().clamp(min=0)[:, None]
        logprobs = logits[self.rows].float().log_softmax(1).gather(1, tokens)
        logprobs.masked_fill_(scores[self.rows].gather(1, tokens) == -torch.inf, torch.nan)
        outputs.emitted_logprobs.view(-1).index_copy_(0, self.rows, logprobs[:, 0])
