"""Rejection sampling of drafts in PyTorch: the definition that every other backend must match.

For a request whose `draft_stream` is DRAFTS (`philox.py`), the draft d of a position is a sample of q, the
`draft_topk_probs` of its `draft_topk_ids`. With the target's distribution p, filtered and at its temperature, d is
accepted if

    v q(d) < p(d)            v uniform, of the stream TESTS: with probability min(1, p(d) / q(d))

and otherwise the token is a sample of the residual max(0, p - q), with the noise of TOKENS like every token. So the
token is a sample of p, and d is accepted with probability 1 - d_TV(p, q), the most that two distributions can agree.

A draft with probability 0 is no sample: q is 1 for it then. Streams keep the three draws independent of each other,
and a position's numbers decide about that position only, so a later step may use them again for a new draft of it.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (arXiv 2211.17192). Chen et
al., "Accelerating large language model decoding with speculative sampling" (arXiv 2302.01318).
"""

from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from dflash_trt.backends.torch.dflash2 import most_likely, topk_probs_of
from dflash_trt.backends.torch.philox import DRAFTS, gumbel_noise_of
from dflash_trt.network.ops import StepInputs

LOWEST: Final = torch.finfo(torch.float32).min  # score of a token whose probability is only a rounding error


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectionTests:
    """The accept tests of a step: drafts of M of the N rows of logits that a caller samples."""

    rows: Tensor  # int64 [M], indices of those rows
    drafts: Tensor  # int64 [M]
    draft_topk_ids: Tensor  # int64 [M, C]
    draft_topk_probs: Tensor  # float32 [M, C]

    @classmethod
    def of(cls, inputs: StepInputs[Tensor], rows: Tensor) -> Self | None:  # int64 [N], among all R*(K+1)
        """None if no request of the step uses rejection sampling."""
        if (
            inputs.draft_topk_ids is None
            or inputs.draft_topk_probs is None
            or not bool((inputs.draft_stream > 0).any())
        ):
            return None
        width = inputs.logit_rows.shape[1]
        requests, slots = rows // width, rows % width
        is_tested = (slots < inputs.num_candidates[requests]) & (inputs.draft_stream[requests] == DRAFTS)
        [at] = is_tested.nonzero(as_tuple=True)
        if not len(at):
            return None
        requests, slots = requests[at], slots[at]
        token_rows = inputs.logit_rows[requests, slots].long()
        draft_topk = inputs.draft_topk_ids.shape[1] // (width - 1)
        columns = slots[:, None] * draft_topk + torch.arange(draft_topk)
        return cls(
            rows=at,
            drafts=inputs.token_ids[token_rows + 1].long(),
            draft_topk_ids=inputs.draft_topk_ids[requests[:, None], columns].long(),
            draft_topk_probs=inputs.draft_topk_probs[requests[:, None], columns],
        )

    def decide(
        self,
        scores: Tensor,  # float32 [N, V], at most 0; for rejected drafts replaced by the residual's scores
        is_kept: Tensor,  # bool [N, V]
        temperature: Tensor,  # float32 [N]
        numbers: Tensor,  # float32 [N], v
    ) -> Tensor:
        """bool [M]: the drafts that are their row's token."""
        degree = temperature[self.rows, None]
        masses = torch.where(is_kept[self.rows], (scores[self.rows] / degree).exp(), 0.0)  # [M, V], unnormalised p
        total = masses.sum(dim=1, keepdim=True)
        prob = (self.draft_topk_probs * (self.draft_topk_ids == self.drafts[:, None])).sum(dim=1)
        prob = torch.where(prob > 0, prob, 1.0)
        is_accepted = numbers[self.rows] * prob * total[:, 0] < masses.gather(1, self.drafts[:, None])[:, 0]
        residual = masses.gather(1, self.draft_topk_ids) - self.draft_topk_probs * total  # [M, C]
        left = torch.where(residual > 0, degree * residual.log(), LOWEST)
        changed = scores[self.rows].scatter(1, self.draft_topk_ids, left).scatter(1, self.drafts[:, None], LOWEST)
        [rejected] = (~is_accepted).nonzero(as_tuple=True)
        scores[self.rows[rejected]] = changed[rejected]
        return is_accepted


def sample_topk(
    *,
    logits: Tensor,  # float32 [N, V or draft vocabulary]
    seed: Tensor,  # int64 [N]
    position: Tensor,  # int64 [N]
    temperature: Tensor,  # float32 [N]
    draft_to_target: Tensor | None,
    draft_topk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts int64 [N], their top-C candidates int64 [N, C], best first, and the probabilities [N, C]."""
    indices = most_likely(logits, draft_topk)
    draft_topk_ids = indices if draft_to_target is None else draft_to_target[indices].long()
    scores = logits.gather(1, indices).nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    noise = gumbel_noise_of(seed, position, draft_topk_ids, DRAFTS)
    best = (scores + temperature[:, None] * noise).argmax(dim=1, keepdim=True)
    return draft_topk_ids.gather(1, best)[:, 0], draft_topk_ids, topk_probs_of(scores, temperature[:, None])
