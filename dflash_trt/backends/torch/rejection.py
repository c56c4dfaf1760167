"""Rejection sampling of drafts in PyTorch: the definition that every other backend must match.

Of a request whose `draft_stream` is DRAFTS (`philox.py`), the draft d of a position was drawn from q, the `chances` of
its `choices`. Where the target gives p, filtered and at its temperature, d is the token of the position if

    v q(d) < p(d)            v uniform, of the stream TESTS: with probability min(1, p(d) / q(d))

and otherwise the token is a sample of max(0, p - q), made with the noise of TOKENS as every token is. So the token is
a sample of p, and d is accepted with probability 1 - d_TV(p, q), the most that two distributions can agree.

A draft without a chance was not drawn: q is 1 for it then. Streams keep the three draws independent of each other, and
a position's numbers decide about that position alone, so that they may serve again in a later step which draws a draft
of the position anew.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (arXiv 2211.17192). Chen et
al., "Accelerating large language model decoding with speculative sampling" (arXiv 2302.01318).
"""

from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from dflash_trt.backends.torch.dflash2 import chances_of, most_likely
from dflash_trt.backends.torch.philox import DRAFTS, gumbel_noise_of
from dflash_trt.network.ops import StepInputs

LOWEST: Final = torch.finfo(torch.float32).min  # of a token that only rounding leaves a chance


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnTests:
    """The drafts that a step has to test: M of the N rows of logits that a caller samples."""

    rows: Tensor  # int64 [M], indices of those rows
    drafts: Tensor  # int64 [M]
    choices: Tensor  # int64 [M, C]
    chances: Tensor  # float32 [M, C]

    @classmethod
    def of(cls, inputs: StepInputs[Tensor], rows: Tensor) -> Self | None:  # int64 [N], among all R*(K+1)
        """None where no draft was drawn apart."""
        if inputs.choices is None or inputs.chances is None or not bool((inputs.draft_stream > 0).any()):
            return None
        width = inputs.logit_rows.shape[1]
        requests, slots = rows // width, rows % width
        is_tested = (slots < inputs.num_candidates[requests]) & (inputs.draft_stream[requests] == DRAFTS)
        [at] = is_tested.nonzero(as_tuple=True)
        if not len(at):
            return None
        requests, slots = requests[at], slots[at]
        token_rows = inputs.logit_rows[requests, slots].long()
        num_choices = inputs.choices.shape[1] // (width - 1)
        columns = slots[:, None] * num_choices + torch.arange(num_choices)
        return cls(
            rows=at,
            drafts=inputs.token_ids[token_rows + 1].long(),
            choices=inputs.choices[requests[:, None], columns].long(),
            chances=inputs.chances[requests[:, None], columns],
        )

    def decide(
        self,
        scores: Tensor,  # float32 [N, V], at most 0; those of rejected drafts become scores of the residual
        is_kept: Tensor,  # bool [N, V]
        temperature: Tensor,  # float32 [N]
        numbers: Tensor,  # float32 [N], v
    ) -> Tensor:
        """bool [M]: the drafts that are their row's token."""
        degree = temperature[self.rows, None]
        masses = torch.where(is_kept[self.rows], (scores[self.rows] / degree).exp(), 0.0)  # [M, V], unnormalised p
        total = masses.sum(dim=1, keepdim=True)
        chance = (self.chances * (self.choices == self.drafts[:, None])).sum(dim=1)
        chance = torch.where(chance > 0, chance, 1.0)
        is_accepted = numbers[self.rows] * chance * total[:, 0] < masses.gather(1, self.drafts[:, None])[:, 0]
        residual = masses.gather(1, self.choices) - self.chances * total  # [M, C]
        left = torch.where(residual > 0, degree * residual.log(), LOWEST)
        changed = scores[self.rows].scatter(1, self.choices, left).scatter(1, self.drafts[:, None], LOWEST)
        [rejected] = (~is_accepted).nonzero(as_tuple=True)
        scores[self.rows[rejected]] = changed[rejected]
        return is_accepted


def draw_apart(
    *,
    logits: Tensor,  # float32 [N, V or draft vocabulary]
    seed: Tensor,  # int64 [N]
    position: Tensor,  # int64 [N]
    temperature: Tensor,  # float32 [N]
    draft_to_target: Tensor | None,
    num_choices: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts int64 [N], and what they were drawn from: choices int64 [N, C], best first, and chances [N, C]."""
    indices = most_likely(logits, num_choices)
    choices = indices if draft_to_target is None else draft_to_target[indices].long()
    scores = logits.gather(1, indices).nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    noise = gumbel_noise_of(seed, position, choices, DRAFTS)
    best = (scores + temperature[:, None] * noise).argmax(dim=1, keepdim=True)
    return choices.gather(1, best)[:, 0], choices, chances_of(scores, temperature[:, None])
