"""DFlash2's ops in PyTorch: the convolution over a draft block, and the token selector."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.philox import DRAFTS, gumbel_noise_of
from dflash_trt.network.ops import Acceptance, Codebooks, StepInputs
from dflash_trt.network.proposal import Proposal

_MAX_INT32 = 2**31 - 1


def block_conv(
    x: Tensor,  # [R*S, H]
    filters: Tensor,  # [R*S, J * groups]
    base: Tensor,  # [1, J, H]
    *,
    num_slots: int,  # S
) -> Tensor:
    """See `Ops.block_conv`."""
    _, num_taps, hidden_size = base.shape
    blocks = x.view(-1, num_slots, hidden_size)
    dynamic = filters.view(*blocks.shape[:2], num_taps, -1)
    group_size = hidden_size // dynamic.shape[-1]
    out = torch.zeros_like(blocks)
    for tap in range(min(num_taps, num_slots)):
        filter_of_tap = base[0, tap] + dynamic[:, :, tap].repeat_interleave(group_size, dim=-1)
        out += filter_of_tap * F.pad(blocks[:, : num_slots - tap], (0, 0, tap, 0))  # zeros before slot 0
    return out.view_as(x)


def select_tokens(
    logits: Tensor,  # [R*K, V], any float dtype
    hidden: Tensor,  # [R*K, r]
    codebooks: Codebooks[Tensor],
    inputs: StepInputs[Tensor],
    acceptance: Acceptance[Tensor],
) -> tuple[Proposal[Tensor], Tensor]:
    """See `Ops.select_tokens`; fp32 from the logits on. Also the candidates' scores [R, K, C].

    Among equal logits the smaller token counts as more likely; among equal scores the more likely token is taken.
    """
    num_requests = len(inputs.temperature)
    ids = most_likely(logits.float(), codebooks.top_k)
    top = (logits.float().gather(1, ids), ids)
    scores, candidates = (x.view(num_requests, -1, codebooks.top_k) for x in top)
    noise = draft_noise(candidates, inputs, acceptance)
    token, path = acceptance.bonus_tokens.long(), []
    scores = scores.clone()
    for slot, h in enumerate(hidden.float().view(num_requests, -1, hidden.shape[1]).unbind(1)):
        ids = candidates[:, slot]
        query = codebooks.predecessor[token].float() * h
        score = scores[:, slot].add_(torch.einsum("rh,rch->rc", query, codebooks.successor[ids].float()))
        if noise is not None:
            score = score + noise[:, slot]
        token = ids.gather(1, score.argmax(dim=1, keepdim=True))[:, 0]
        path.append(token)
    return walked(torch.stack(path, dim=1).int(), candidates, scores, inputs), scores


def walked(
    tokens: Tensor,  # int32 [R, K]
    candidates: Tensor,  # integers [R, K, C]
    scores: Tensor,  # float32 [R, K, C], without noise
    inputs: StepInputs[Tensor],
) -> Proposal[Tensor]:
    """The selector's drafts as a proposal."""
    if not bool((inputs.draft_stream == DRAFTS).any()):
        return Proposal(tokens=tokens)
    degree = torch.where(inputs.temperature > 0, inputs.temperature, 1.0)[:, None, None]
    draft_topk_probs = topk_probs_of(scores, degree)
    return Proposal(
        tokens=tokens, draft_topk_ids=candidates.flatten(1).int(), draft_topk_probs=draft_topk_probs.flatten(1)
    )


def draft_noise(
    candidates: Tensor,  # integers [R, K, M]
    inputs: StepInputs[Tensor],
    acceptance: Acceptance[Tensor],
) -> Tensor | None:  # float32 [R, K, M]; None when no request samples
    """Noise on candidates' scores for sampled requests; slot j, from 1 on, is j positions after the bonus.

    Uses the stream that each request draws its drafts with.
    """
    rows = (inputs.temperature > 0).nonzero()[:, 0]
    if not len(rows):
        return None
    num_slots = candidates.shape[1]
    temperature, start = inputs.temperature[rows], acceptance.next_context_lens[rows]
    positions = start.long()[:, None] + torch.arange(1, num_slots + 1)
    seed, stream = (x[rows].repeat_interleave(num_slots) for x in (inputs.seed, inputs.draft_stream))
    drawn = gumbel_noise_of(seed, positions.flatten(), candidates[rows].flatten(0, 1), stream)
    noise = torch.zeros(candidates.shape)
    noise[rows] = temperature[:, None, None] * drawn.view(len(rows), num_slots, -1)
    return noise


def topk_probs_of(scores: Tensor, temperature: Tensor) -> Tensor:  # float32 [..., C], and one that fits
    """The distribution that noise at the temperature draws from; 0 where the scores give none."""
    draft_topk_probs = ((scores - scores.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    return torch.where(draft_topk_probs.isnan().any(dim=-1, keepdim=True), 0.0, draft_topk_probs)


def most_likely(logits: Tensor, count: int) -> Tensor:  # float32 [N, V] -> int64 [N, count]
    """Best first. A logit and its token form one integer: torch.topk has no rule for ties. NaN is last."""
    bits = (logits.masked_fill(logits.isnan(), -torch.inf) + 0.0).view(torch.int32)  # the zeros are equal
    ordered = torch.where(bits < 0, bits ^ _MAX_INT32, bits).long()
    tokens = torch.arange(logits.shape[1], device=logits.device)
    rankings = (ordered << 32) | (_MAX_INT32 - tokens)
    return _MAX_INT32 - (rankings.topk(count, dim=1).values & _MAX_INT32)
