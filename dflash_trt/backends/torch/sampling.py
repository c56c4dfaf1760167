"""sample_and_accept in PyTorch: the definition that every other backend must match.

The target is sampled at every row; a draft is accepted while it equals the sampled token. With greedy (one-hot)
drafts this is rejection sampling, so the output distribution is the target's at any temperature. A row whose logits
give no token (see `core/step_spec.py`) gets the log probability NaN.
"""

import torch
from torch import Tensor

from dflash_trt.backends.torch.philox import uniform
from dflash_trt.network.ops import Acceptance, StepInputs


def sample_and_accept(
    logits: Tensor,  # [R*(K+1), V], any float dtype
    inputs: StepInputs[Tensor],
) -> Acceptance[Tensor]:
    """See `Ops.sample_and_accept`; fp32 from the logits on."""
    num_requests, width = inputs.logit_rows.shape
    scores = logits.float()
    sampled = sample_rows(scores, inputs)  # int64 [R*(K+1)]
    logprobs = scores.log_softmax(dim=1).gather(1, sampled[:, None])  # NaN all along a row that is not finite
    tokens = sampled.view(num_requests, width)
    num_accepted = _num_accepted(tokens, inputs)  # [R]

    num_given = inputs.token_offsets[1:] - inputs.token_offsets[:-1]
    return Acceptance(
        emitted_tokens=tokens.int(),  # an accepted draft equals the token sampled at its row
        emitted_logprobs=logprobs.view(num_requests, width),
        num_accepted=num_accepted.int(),
        bonus_tokens=tokens.gather(1, num_accepted[:, None])[:, 0].int(),
        next_context_lens=(inputs.context_lens + num_given - inputs.num_candidates + num_accepted).int(),
    )


def _num_accepted(tokens: Tensor, inputs: StepInputs[Tensor]) -> Tensor:  # int64 [R, K+1] -> int64 [R]
    num_requests, width = tokens.shape
    if width == 1:
        return tokens.new_zeros(num_requests)
    slots = torch.arange(width - 1, device=tokens.device)
    is_candidate = slots < inputs.num_candidates[:, None]  # [R, K]
    next_rows = (inputs.logit_rows[:, :-1] + 1).clamp(max=inputs.token_ids.numel() - 1)
    candidates = inputs.token_ids[next_rows.long()]  # [R, K]; meaningless where is_candidate is false
    agrees = is_candidate & (candidates == tokens[:, :-1])
    return agrees.long().cumprod(dim=1).sum(dim=1)


def sample_rows(scores: Tensor, inputs: StepInputs[Tensor]) -> Tensor:
    """One token per row, int64 [R*(K+1)]: argmax where temperature is 0, else a draw from the filtered distribution."""
    greedy = scores.argmax(dim=1)
    is_random = inputs.temperature > 0
    if not bool(is_random.any()):
        return greedy
    width = inputs.logit_rows.shape[1]
    rows = is_random.repeat_interleave(width).nonzero()[:, 0]

    def per_row(values: Tensor) -> Tensor:
        return values.repeat_interleave(width)[rows]

    chosen = scores[rows]
    weights = filtered_weights(
        # the largest is 0 before it is divided: no temperature makes it infinite
        (chosen - chosen.amax(dim=1, keepdim=True)) / per_row(inputs.temperature)[:, None],
        top_k=per_row(inputs.top_k),
        top_p=per_row(inputs.top_p),
        min_p=per_row(inputs.min_p),
    )
    drawn_position = inputs.positions[inputs.logit_rows.flatten().long()][rows].long() + 1
    return greedy.index_copy(0, rows, draw(weights, uniform(per_row(inputs.seed), drawn_position)))


def filtered_weights(
    scaled: Tensor,  # float32 [N, V], logits / temperature, up to a constant of each row
    *,
    top_k: Tensor,  # int [N], 0 off
    top_p: Tensor,  # float32 [N], 1 off
    min_p: Tensor,  # float32 [N], 0 off
) -> Tensor:
    """Unnormalised probabilities, zero where a filter removed the token. Ties with the last token kept are kept.

    top_p keeps the shortest prefix, by falling probability and after top_k, whose mass reaches top_p; min_p keeps
    tokens of at least min_p times the largest probability. The most likely token always stays.
    """
    weights = scaled.softmax(dim=1)
    if bool(((top_k > 0) | (top_p < 1)).any()):
        weights = weights * (weights >= _smallest_kept(weights, top_k, top_p))
    return weights * (weights >= min_p[:, None] * weights.amax(dim=1, keepdim=True))


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse of the cumulative distribution in vocabulary order; a token of weight 0 is never drawn. int64 [N].

    Of weights that are not finite the result means nothing, but is in the vocabulary.
    """
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, u[:, None] * total, right=True)[:, 0]
    last_kept = torch.searchsorted(cumulative, total)[:, 0]  # u * total may round up to total
    return torch.minimum(index, last_kept).clamp(max=weights.shape[1] - 1)


def _smallest_kept(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest probability that top_k and then top_p keep, [N, 1]."""
    ordered = weights.sort(dim=1, descending=True).values
    vocab_size = weights.shape[1]
    rank = torch.arange(vocab_size, device=weights.device)
    num_kept = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    ordered = ordered * (rank < num_kept[:, None])
    mass_before = ordered.cumsum(dim=1) - ordered
    is_in_prefix = mass_before < top_p[:, None] * ordered.sum(dim=1, keepdim=True)
    is_in_prefix |= top_p[:, None] >= 1  # the sums of a long tail round up to the total before its end
    is_kept = (ordered > 0) & is_in_prefix
    is_kept[:, 0] = True  # the most likely one, whatever top_p rounds to
    return torch.where(is_kept, ordered, torch.inf).amin(dim=1, keepdim=True)
