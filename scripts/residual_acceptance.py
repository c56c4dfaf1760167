"""Acceptance lengths with rejection sampling from the residual, which the engine does not have: for docs/benchmarks.md.

    python -m scripts.residual_acceptance ENGINE_DIR PROMPTS.jsonl NUM_ROUNDS TEMPERATURE...

A DFlash2 drafter's walk draws each draft from q, the softmax of the selector's scores; the target accepts it with
min(1, p / q), and otherwise draws from max(0, p - q) (Leviathan et al., arXiv 2211.17192). Two streams of random
numbers, apart from those of the requests. Requests run one at a time on a CPU, without filters.
"""

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dflash_trt.backends.torch import sampling
from dflash_trt.backends.torch.dflash2 import _most_likely
from dflash_trt.backends.torch.native.ops import NativeOps
from dflash_trt.backends.torch.ops import TorchOps
from dflash_trt.network.ops import Acceptance, Codebooks, StepInputs
from scripts import sampled_acceptance


class Rejection:
    """Drafts of the one request that runs, and what decides about them in the next step."""

    def __init__(self) -> None:
        self._draws, self._tests = (torch.Generator().manual_seed(seed) for seed in (1, 2))
        self._q: list[Tensor] = []  # by draft: [V]

    def select_tokens(
        self,
        ops: TorchOps,
        logits: Tensor,
        hidden: Tensor,
        codebooks: Codebooks[Tensor],
        acceptance: Acceptance[Tensor],
    ) -> Tensor:
        """In the place of `Ops.select_tokens`."""
        [temperature] = ops._inputs.temperature.tolist()
        candidates = _most_likely(logits.float(), codebooks.top_k)  # [K, M]
        token, path, self._q = acceptance.bonus_tokens.long(), [], []
        for ids, scores, h in zip(candidates, logits.float().gather(1, candidates), hidden.float(), strict=True):
            q = (
                scores + codebooks.successor[ids].float() @ (codebooks.predecessor[token[0]].float() * h)
            ) / temperature
            q = q.softmax(0)
            token = ids[torch.multinomial(q, 1, generator=self._draws)]
            self._q.append(torch.zeros(logits.shape[1]).index_put((ids,), q))
            path.append(token)
        return torch.stack(path, dim=1).int()

    def deciding(self, usual: Callable[..., Acceptance[Tensor]]) -> Callable[..., Acceptance[Tensor]]:
        """In the place of `sample_and_accept`: the usual one is told the tokens that were decided on."""

        def sample_and_accept(logits: Tensor, inputs: StepInputs[Tensor], *rest: object) -> Acceptance[Tensor]:
            with patch.object(sampling, "sample_rows", self._decided):
                return usual(logits, inputs, *rest)

        return sample_and_accept

    def _decided(self, scores: Tensor, inputs: StepInputs[Tensor]) -> Tensor:
        """Tokens by row: accepted drafts, then one that is not the draft, or the one behind all of them."""
        [num_drafts], tokens = inputs.num_candidates.tolist(), scores.argmax(dim=1)
        p = (scores / inputs.temperature[0]).softmax(dim=1)
        for row in range(num_drafts):
            draft = int(inputs.token_ids[int(inputs.logit_rows[0, row]) + 1])
            q, chance = self._q[row], float(torch.rand(1, generator=self._tests))
            if chance * float(q[draft]) < float(p[row, draft]):
                tokens[row] = draft
                continue
            residual = (p[row] - q).clamp(min=0)
            residual[draft] = 0  # it is: p < q there
            tokens[row] = torch.multinomial(residual, 1, generator=self._tests)[0]
            return tokens
        tokens[num_drafts] = torch.multinomial(p[num_drafts], 1, generator=self._tests)[0]
        return tokens


def main() -> None:
    rejection = Rejection()

    def walk(ops: TorchOps, *given: Any) -> Tensor:  # a method of both classes
        return rejection.select_tokens(ops, *given)

    with (
        patch.object(TorchOps, "select_tokens", walk),
        patch.object(NativeOps, "select_tokens", walk),
        patch.object(sampling, "sample_and_accept", rejection.deciding(sampling.sample_and_accept)),
    ):
        sampled_acceptance.main(one_at_a_time=True)


if __name__ == "__main__":
    sys.exit(main())
