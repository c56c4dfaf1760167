"""sample_and_accept and draft_tokens in PyTorch: the definition that every other backend must match.

The target is sampled at every row; a draft is accepted while it equals the sampled token. The output distribution is
therefore the target's at any temperature, whatever is drafted. Drafts are made with the noise that will sample the
target at their position (`philox.py`), so that they meet its token more often than the drafter's likeliest would.
Rejection sampling tests drafts first; they become the token of their row if accepted (`rejection.py`). A row
whose logits give no token (see `core/step_spec.py`) gets the log probability NaN.

`core/logit_rules.py` has the source of each logit rule. Slots cost nothing until a request has rules. A step touches
the tokens that the rules name and, for penalties, the tokens in its requests' texts.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.torch.philox import DRAFTS, gumbel_noise, noise_and_numbers
from dflash_trt.backends.torch.rejection import RejectionTests, sample_topk
from dflash_trt.core.array import Array
from dflash_trt.core.logit_rules import LogitRules, RuledSlots
from dflash_trt.core.step_plan import StepPlan, TokenMasks
from dflash_trt.network.ops import Acceptance, StepInputs
from dflash_trt.network.proposal import Proposal

# float32 scores [R*(K+1), V] of the target, adjusted in place.
AdjustScores = Callable[[Tensor], None]


def sample_and_accept(
    logits: Tensor,  # [R*(K+1), V], any float dtype
    inputs: StepInputs[Tensor],
    adjust: AdjustScores | None = None,
    masks: TokenMasks | None = None,
) -> Acceptance[Tensor]:
    """See `Ops.sample_and_accept`; fp32 from the logits on.

    `adjust`, then `masks` change the sampled distribution, not log-probabilities.
    """
    num_requests, width = inputs.logit_rows.shape
    raw = logits.float()
    scores = raw if adjust is None else _adjusted(raw, adjust)
    scores = scores if masks is None else masked_scores(scores, masks)
    sampled = sample_rows(scores, inputs)  # int64 [R*(K+1)]
    logprobs = raw.log_softmax(dim=1).gather(1, sampled[:, None])  # NaN all along a row that is not finite
    if scores is not raw:  # a row whose tokens are all ruled out gives none, either
        logprobs.masked_fill_(scores.gather(1, sampled[:, None]) == -torch.inf, torch.nan)
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


def _adjusted(raw: Tensor, adjust: AdjustScores) -> Tensor:
    scores = raw.clone()
    adjust(scores)
    return scores


def masked_scores(scores: Tensor, masks: TokenMasks) -> Tensor:  # float32 [R*(K+1), V]
    """-infinity for the tokens that a row must not give."""
    is_allowed = np.unpackbits(masks.bits.view(np.uint8), axis=1, count=scores.shape[1], bitorder="little")
    rows = torch.from_numpy(masks.rows)
    return scores.index_copy(0, rows, scores[rows].masked_fill(torch.from_numpy(is_allowed) == 0, -torch.inf))


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
    """One token per row, int64 [R*(K+1)]: argmax at temperature 0, else sampled after the filters."""
    greedy = scores.argmax(dim=1)
    width = inputs.logit_rows.shape[1]
    rows = _random_rows(inputs, width)
    if not len(rows):
        return greedy

    def per_row(values: Tensor) -> Tensor:
        return values.repeat_interleave(width)[rows]

    chosen, temperature = scores[rows], per_row(inputs.temperature)
    chosen = chosen - chosen.amax(dim=1, keepdim=True)  # at most 0 before it is divided: never infinite
    weights = filtered_weights(
        chosen / temperature[:, None],
        top_k=per_row(inputs.top_k),
        top_p=per_row(inputs.top_p),
        min_p=per_row(inputs.min_p),
    )
    position = inputs.positions[inputs.logit_rows.flatten().long()][rows].long() + 1
    is_kept, place = weights > 0, (per_row(inputs.seed), position, scores.shape[1])
    tests = RejectionTests.of(inputs, rows)
    if tests is None:
        return greedy.index_copy(0, rows, draw(chosen, is_kept, temperature, gumbel_noise(*place)))
    noise, numbers = noise_and_numbers(*place)
    is_accepted = tests.decide(chosen, is_kept, temperature, numbers)
    tokens = draw(chosen, is_kept, temperature, noise)
    tokens[tests.rows] = torch.where(is_accepted, tests.drafts, tokens[tests.rows])
    return greedy.index_copy(0, rows, tokens)


def draft_tokens(
    logits: Tensor,  # [R*K, V or draft vocabulary], any float dtype
    inputs: StepInputs[Tensor],
    acceptance: Acceptance[Tensor],
    draft_to_target: Tensor | None,
    *,
    draft_topk: int,
    first_slot: int = 1,
) -> Proposal[Tensor]:
    """See `Ops.draft_tokens`."""
    num_requests = len(inputs.temperature)
    width = len(logits) // num_requests
    # the token of slot j of a block, from 1 on, is j positions after the bonus token
    slots = torch.arange(first_slot, first_slot + width, device=logits.device)
    positions = (acceptance.next_context_lens[:, None].long() + slots).flatten()
    uses_rejection = (inputs.draft_stream == DRAFTS).repeat_interleave(width)
    random = _random_rows(inputs, width)
    shared, own = random[~uses_rejection[random]], random[uses_rejection[random]]  # by whose noise they use

    def given(rows: Tensor) -> dict[str, Tensor]:
        seed, temperature = (x.repeat_interleave(width)[rows] for x in (inputs.seed, inputs.temperature))
        return {"logits": logits[rows].float(), "seed": seed, "position": positions[rows], "temperature": temperature}

    indices = logits.argmax(dim=1)
    if len(shared):
        indices[shared] = _likeliest_with_noise(**given(shared), draft_to_target=draft_to_target)
    tokens = (indices if draft_to_target is None else draft_to_target[indices]).int()
    if not len(own):
        return Proposal(tokens=tokens.view(num_requests, width))
    drafts, *candidates = sample_topk(**given(own), draft_to_target=draft_to_target, draft_topk=draft_topk)
    tokens[own] = drafts.int()
    draft_topk_ids, draft_topk_probs = (
        values.new_zeros((len(logits), draft_topk)).index_copy_(0, own, values).view(num_requests, -1)
        for values in candidates
    )
    return Proposal(
        tokens=tokens.view(num_requests, width), draft_topk_ids=draft_topk_ids.int(), draft_topk_probs=draft_topk_probs
    )


def _likeliest_with_noise(
    *,
    logits: Tensor,  # float32 [N, V or draft vocabulary]
    seed: Tensor,  # int64 [N]
    position: Tensor,  # int64 [N]
    temperature: Tensor,  # float32 [N]
    draft_to_target: Tensor | None,
) -> Tensor:  # int64 [N]
    vocab_size = logits.shape[1] if draft_to_target is None else int(draft_to_target.max()) + 1
    noise = gumbel_noise(seed, position, vocab_size)
    if draft_to_target is not None:
        noise = noise.index_select(1, draft_to_target.long())
    return (logits + temperature[:, None] * noise).argmax(dim=1)


def _random_rows(inputs: StepInputs[Tensor], width: int) -> Tensor:
    """Rows of the requests that are not greedy, int64 [N]; every request has `width` of them."""
    return (inputs.temperature > 0).repeat_interleave(width).nonzero()[:, 0]


def filtered_weights(
    scaled: Tensor,  # float32 [N, V], logits / temperature, up to a constant of each row
    *,
    top_k: Tensor,  # int [N], 0 off
    top_p: Tensor,  # float32 [N], 1 off
    min_p: Tensor,  # float32 [N], 0 off
) -> Tensor:
    """Unnormalised probabilities, zero for filtered tokens. Ties with the last token kept are kept.

    top_p keeps the shortest prefix, by falling probability and after top_k, whose mass reaches top_p; min_p keeps
    tokens of at least min_p times the largest probability. The most likely token always stays.
    """
    weights = scaled.softmax(dim=1)
    if bool(((top_k > 0) | (top_p < 1)).any()):
        weights = weights * (weights >= _smallest_kept(weights, top_k, top_p))
    return weights * (weights >= min_p[:, None] * weights.amax(dim=1, keepdim=True))


def draw(
    scores: Tensor,  # float32 [N, V]
    is_kept: Tensor,  # bool [N, V]
    temperature: Tensor,  # float32 [N]
    noise: Tensor,  # float32 [N, V]
) -> Tensor:
    """The first argmax of scores + temperature * noise over the kept tokens, int64 [N].

    For scores that are not finite the result is arbitrary, but in the vocabulary.
    """
    return torch.where(is_kept, scores + temperature[:, None] * noise, -torch.inf).argmax(dim=1)


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


def adjustment(slots: RuledSlots, plan: StepPlan, inputs: StepInputs[Tensor]) -> AdjustScores | None:
    """Write the tokens of this step to the slots with rules; None if no row has any."""
    slots.update(plan.slot_updates)
    rows = slots.rows(plan.rows.slot_ids)
    if not rows:
        return None
    offsets, positions, token_ids = (x.numpy() for x in (inputs.token_offsets, inputs.positions, inputs.token_ids))
    for row, _, tokens in rows:
        own = slice(offsets[row], offsets[row + 1])
        tokens[positions[own]] = token_ids[own]
    return partial(_adjust_rows, rows, positions[inputs.logit_rows.numpy()] + 1)


def _adjust_rows(rows: list[tuple[int, LogitRules, Array]], num_known: Array, scores: Tensor) -> None:
    width = num_known.shape[1]
    for row, rules, tokens in rows:
        adjust_scores(scores[row * width : (row + 1) * width], rules, tokens, num_known[row])


def adjust_scores(
    scores: Tensor,  # float32 [W, V], changed
    rules: LogitRules,
    tokens: Array,  # int64 [N], by position
    num_known: Array,  # int [W], tokens before each row's, not falling
) -> None:
    """Apply the rules of one request. Ids beyond the vocabulary have no logits, and are ignored."""
    if len(rules.biases):
        biases = np.where(rules.active_biases(tokens, num_known), rules.biases, _NO_BIAS)
        is_there = rules.token_ids < scores.shape[1]
        columns = torch.from_numpy(rules.token_ids[is_there])
        scores.index_add_(1, columns, torch.from_numpy(biases[:, is_there]))
    if rules.has_penalties:
        first = 0 if rules.repetition_penalty != 1.0 else rules.num_prompt_tokens
        _penalize(scores, rules, tokens[first : num_known[-1]], num_known - first, rules.num_prompt_tokens - first)


def _penalize(scores: Tensor, rules: LogitRules, tokens: Array, num_known: Array, num_prompt_tokens: int) -> None:
    present = np.flatnonzero(np.bincount(tokens))  # U tokens
    indices = np.zeros(int(present.max(initial=0)) + 1, np.int64)
    indices[present] = np.arange(len(present))
    indices = indices[tokens]
    columns = torch.from_numpy(present)
    penalized = scores.index_select(1, columns)  # [W, U]
    if rules.repetition_penalty != 1.0:
        is_seen = _counts(indices, 0, num_known, len(present)) > 0
        penalty = rules.repetition_penalty
        repeated = torch.where(penalized < 0, penalized * penalty, penalized / penalty)
        penalized = torch.where(is_seen, repeated, penalized)
    counts = _counts(indices, num_prompt_tokens, num_known, len(present))
    penalized -= rules.frequency_penalty * counts
    penalized -= rules.presence_penalty * (counts > 0)
    scores.index_copy_(1, columns, penalized)


def _counts(indices: Array, start: int, ends: Array, size: int) -> Tensor:
    """Counts of `indices` from `start` to each end, float32 [W, size]."""
    edges = [start, *np.maximum(ends, start).tolist()]
    counts = [np.bincount(indices[first:end], minlength=size) for first, end in pairwise(edges)]
    return torch.from_numpy(np.cumsum(counts, axis=0, dtype=np.float32))


_NO_BIAS: Final = np.float32(0.0)
