"""What `sampling.py` and `argmax.py` compute, in plain PyTorch on any device: the definition their tests hold them to.

The filters are those of the network's own `sample_and_accept`; the arithmetic is fixed point as in the kernels, so
that the sums are exact and the two agree wherever e^x does. The noise is the network's own.
"""

import torch
from torch import Tensor

from dflash_trt.backends.torch.philox import gumbel_noise
from dflash_trt.kernels.sampling_launch import SamplingInputs, SamplingOutputs

_MASS_UNIT = float(1 << 40)


def sample_and_accept(logits: Tensor, inputs: SamplingInputs) -> SamplingOutputs:  # F [R*(K+1), V]
    """See `sampling_launch.sample_and_accept`."""
    num_requests, width = inputs.logit_rows.shape
    scores = logits.float()
    sampled = torch.tensor([_sampled(scores[row], inputs, row, row // width) for row in range(len(scores))])
    tokens = sampled.view(num_requests, width)
    accepted = torch.tensor([_num_accepted(tokens[r], inputs, r) for r in range(num_requests)])
    given = inputs.token_offsets[1:] - inputs.token_offsets[:-1]
    log_sum = scores.logsumexp(dim=1)
    logprobs = scores.gather(1, sampled[:, None])[:, 0] - torch.where(log_sum.isfinite(), log_sum, torch.nan)
    return SamplingOutputs(
        emitted_tokens=tokens.int(),
        emitted_logprobs=logprobs.view(num_requests, width),
        num_accepted=accepted.int(),
        bonus_tokens=tokens.gather(1, accepted[:, None])[:, 0].int(),
        next_context_lens=(inputs.context_lens + given - inputs.num_candidates + accepted).int(),
    )


def kept_masses(
    scores: Tensor,  # float32 [V], one row
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> Tensor:
    """int64 [V]: e^((score - largest) / temperature) in units of 2^-40, 0 where a filter removed the token."""
    exponentials = ((scores - scores.max()) / torch.tensor(temperature, dtype=torch.float32)).exp()
    masses = _masses(exponentials)
    threshold = torch.zeros(())
    total = int(masses.sum())
    if 0 < top_k < len(scores):
        ordered = exponentials.sort(descending=True).values[:top_k]
        threshold, total = ordered[-1], int(_masses(ordered).sum())
    if top_p < 1:
        limit = torch.tensor(top_p, dtype=torch.float32).double() * float(total)
        rising = exponentials.sort()
        up_to = masses[rising.indices].cumsum(0)
        last_equal = torch.searchsorted(rising.values, rising.values, right=True) - 1
        is_kept = up_to[-1] - up_to[last_equal] < int(limit.ceil())  # the mass of larger ones
        smallest = rising.values[is_kept][0] if bool(is_kept.any()) else rising.values[-1]
        threshold = torch.maximum(threshold, smallest)
    threshold = threshold.clamp(min=min(min_p, 1.0))
    return masses * (exponentials >= threshold)


def draft_tokens(
    logits: Tensor,  # F [R*K, V]
    temperature: Tensor,
    seed: Tensor,
    next_context_lens: Tensor,
    draft_to_target: Tensor | None = None,
) -> Tensor:
    """See `sampling_launch.draft_tokens`; NaN is below every number."""
    num_slots = len(logits) // len(temperature)
    targets = torch.arange(logits.shape[1]) if draft_to_target is None else draft_to_target.cpu()
    tokens = []
    for row, scores in enumerate(logits.cpu().float()):
        request, slot = divmod(row, num_slots)
        degree, position = temperature[request].cpu(), int(next_context_lens[request]) + 1 + slot
        noise = _noise(int(seed[request]), position, int(targets.max()) + 1)[targets] if degree > 0 else 0.0
        tokens.append(int(argmax_tokens((scores + degree * noise)[None])[0]))
    return targets[tokens].int().view(-1, num_slots)


def argmax_tokens(logits: Tensor) -> Tensor:  # F [rows, V] -> int32 [rows]
    """The first largest of each row; NaN is below every number."""
    scores = logits.float().nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    is_largest = scores == scores.amax(dim=1, keepdim=True)
    return is_largest.int().argmax(dim=1).int()


def _sampled(scores: Tensor, inputs: SamplingInputs, row: int, request: int) -> int:
    temperature = float(inputs.temperature[request])
    if temperature <= 0 or not bool(scores.logsumexp(0).isfinite()):
        return int(argmax_tokens(scores[None])[0])
    masses = kept_masses(
        scores,
        temperature=temperature,
        top_k=int(inputs.top_k[request]),
        top_p=float(inputs.top_p[request]),
        min_p=float(inputs.min_p[request]),
    )
    position = int(inputs.positions[inputs.logit_rows.flatten()[row]]) + 1
    noise = _noise(int(inputs.seed[request]), position, len(scores))
    return int(torch.where(masses > 0, scores - scores.max() + temperature * noise, -torch.inf).argmax())


def _num_accepted(sampled: Tensor, inputs: SamplingInputs, request: int) -> int:
    for j in range(int(inputs.num_candidates[request])):
        if inputs.token_ids[inputs.logit_rows[request, j] + 1] != sampled[j]:
            return j
    return int(inputs.num_candidates[request])


def _noise(seed: int, position: int, vocab_size: int) -> Tensor:
    return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), vocab_size)[0]


def _masses(exponentials: Tensor) -> Tensor:
    return (exponentials * _MASS_UNIT).long()
