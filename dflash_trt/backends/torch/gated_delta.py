"""Gated delta nets in PyTorch: the definition that every other backend must match.

A step computes some tokens of each request from the state S of its slot. Within a block of tokens the recurrence is
solved at once, G being the cumulative log decays (arXiv 2412.06464, section 3.3):

    (I + L) delta = beta (v - e^G S^T k),  L_ij = beta_i e^(G_i - G_j) k_i k_j for j < i
    o_i = e^(G_i) S^T q_i + sum over j <= i of e^(G_i - G_j) (q_i k_j) delta_j
    S after a tokens = e^(G_a) S + sum over j <= a of e^(G_a - G_j) k_j delta_j^T

Rows of a verify block may be rejected, so their k, delta and g are stored as records after S; the next step folds the
accepted ones, `context_len - position` of them, before it computes its own. Longer rows are prompts, of which nothing
is rejected: their blocks are folded at once. Nothing is written to a slot before the step has succeeded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.network.ops import DeltaParameters
from dflash_trt.network.state import RecurrentCache

_CHUNK: Final = 64  # tokens of a prompt in one block
_L2_EPS: Final = 1e-6  # inside of the square root


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRows:
    """The rows of a step by request, and what they write to slots when it has succeeded."""

    slot_ids: Tensor  # int64 [R]
    num_rows: list[int]  # per request
    context_lens: Tensor  # int64 [R]
    writes: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # (tensor [slots, ...], slots, values)

    def store(self) -> None:
        for state, slots, values in self.writes:
            state[slots] = values


@dataclass(frozen=True, slots=True)
class Block:
    """n tokens of G requests, in float32; q and k are normalized, and q is scaled."""

    q: Tensor  # [G, hk, n, dk]
    k: Tensor  # [G, hk, n, dk]
    v: Tensor  # [G, hv, n, dv]
    beta: Tensor  # [G, hv, n]
    decay: Tensor  # [G, hv, n], logarithms

    def part(self, start: int, stop: int) -> "Block":
        rows = slice(start, stop)
        return Block(
            self.q[:, :, rows], self.k[:, :, rows], self.v[:, :, rows], self.beta[..., rows], self.decay[..., rows]
        )


def gated_delta(
    qkvz: Tensor,  # [N, channels + v_size]
    ba: Tensor,  # [N, 2 * hv]
    parameters: DeltaParameters[Tensor],
    rows: SlotRows,
    cache: RecurrentCache[Tensor],
    spec: GatedDelta,
    eps: float,
) -> Tensor:  # [N, v_size]
    """See `Ops.gated_delta`."""
    out = torch.empty(len(qkvz), spec.num_value_heads, spec.value_head_dim)
    inputs, z = qkvz.split_with_sizes((spec.num_channels, spec.v_size), 1)
    for requests, index in _groups(rows, cache.spec.num_records):
        num_rows = index.shape[1]
        state, before = _folded(cache, rows, requests)
        window = torch.cat((before, inputs[index]), 1)
        block = _block(window, ba[index].float(), parameters, spec, qkvz.dtype)
        if num_rows <= cache.spec.num_records:
            attended, deltas = attend_block(state, block)
            leave_records(cache, rows, requests, state, window, block, deltas)
        else:
            attended, state = _run_prompt(state, block)
            leave_state(cache, rows, requests, state, window, num_rows)
        out[index] = attended.transpose(1, 2)
    return gated(out, F.silu(z.float()), parameters, eps, qkvz.dtype)


def gated(
    attended: Tensor,  # float32 [N, hv, dv]
    gate: Tensor,  # float32 [N, v_size]
    parameters: DeltaParameters[Tensor],
    eps: float,
    dtype: torch.dtype,
) -> Tensor:  # [N, v_size]
    """The results, normed by head, times their gate."""
    normed = F.rms_norm(attended, attended.shape[-1:], eps=eps).to(dtype) * parameters.norm
    return (normed.float() * gate.view(normed.shape)).to(dtype).flatten(1)


def attend_block(state: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Results and deltas of a block, [G, hv, n, dv] each, from the state [G, hv, dk, dv] before it."""
    per_key = state.shape[1] // block.k.shape[1]
    q, k = (x.repeat_interleave(per_key, 1) for x in (block.q, block.k))
    total = block.decay.cumsum(-1)  # [G, hv, n]
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    from_state = total.exp()[..., None]
    rate = block.beta[..., None]
    lower = (rate * between * (k @ k.transpose(-1, -2))).tril(-1)
    wanted = rate * (block.v - from_state * (k @ state))
    deltas = torch.linalg.solve_triangular(lower, wanted, upper=False, unitriangular=True)
    attended = from_state * (q @ state) + (between * (q @ k.transpose(-1, -2))) @ deltas
    return attended, deltas


def fold(
    state: Tensor,  # [G, hv, dk, dv]
    keys: Tensor,  # [G, hk, n, dk]
    deltas: Tensor,  # [G, hv, n, dv]
    decays: Tensor,  # [G, hv, n]
    is_folded: Tensor,  # bool [G, n]
) -> Tensor:
    """The state after the tokens that are folded, the first ones of each request; others may hold NaN."""
    is_stale = ~is_folded[:, None, :, None]
    keys, deltas = keys.masked_fill(is_stale, 0.0), deltas.masked_fill(is_stale, 0.0)
    total = decays.masked_fill(is_stale[..., 0], 0.0).cumsum(-1)
    weight = (total[..., -1:] - total).exp()
    keys = keys.repeat_interleave(state.shape[1] // keys.shape[1], 1)
    return total[..., -1].exp()[..., None, None] * state + (keys * weight[..., None]).transpose(-1, -2) @ deltas


def _groups(rows: SlotRows, num_records: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Requests with equally many rows: their indices, int64 [G], and their rows, int64 [G, n]."""
    counts = torch.tensor(rows.num_rows)
    starts = counts.cumsum(0) - counts
    for count in sorted(set(rows.num_rows)):
        requests = (counts == count).nonzero()[:, 0]
        yield requests, starts[requests, None] + torch.arange(count)


def start_of(cache: RecurrentCache[Tensor], rows: SlotRows, requests: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stored state, inputs [G, conv_size - 1, channels] before the first row, and records between both."""
    slots, starts = rows.slot_ids[requests], rows.context_lens[requests]
    tensors, spec = cache.tensors, cache.spec
    is_new = starts == 0
    num_folded = torch.where(is_new, 0, starts - tensors["position"][slots])
    assert bool(((num_folded >= 0) & (num_folded <= spec.num_records)).all()), "a row is not where its slot's state is"
    columns = num_folded[:, None] + torch.arange(spec.conv_size - 1)
    before = tensors["window"][slots[:, None], columns].masked_fill(is_new[:, None, None], 0.0)
    return tensors["state"][slots].masked_fill(is_new[:, None, None, None], 0.0), before, num_folded


def _folded(cache: RecurrentCache[Tensor], rows: SlotRows, requests: Tensor) -> tuple[Tensor, Tensor]:
    """State, and the inputs before it [G, conv_size - 1, channels], at the first of their rows."""
    state, before, num_folded = start_of(cache, rows, requests)
    slots, tensors = rows.slot_ids[requests], cache.tensors
    is_folded = torch.arange(cache.spec.num_records) < num_folded[:, None]  # [G, records]
    state = fold(
        state,
        tensors["keys"][slots].transpose(1, 2),
        tensors["deltas"][slots].transpose(1, 2),
        tensors["decays"][slots].transpose(1, 2),
        is_folded,
    )
    is_new = rows.context_lens[requests] == 0  # whatever the slot's records are
    return state.masked_fill(is_new[:, None, None, None], 0.0), before


def _block(
    window: Tensor,  # [G, conv_size - 1 + n, channels]
    ba: Tensor,  # float32 [G, n, 2 * hv]
    parameters: DeltaParameters[Tensor],
    spec: GatedDelta,
    dtype: torch.dtype,
) -> Block:
    filters = parameters.conv.float()[:, None]
    mixed = F.silu(F.conv1d(window.float().transpose(1, 2), filters, groups=spec.num_channels)).to(dtype).float()
    b, a = ba.transpose(1, 2).chunk(2, 1)  # [G, hv, n]
    decay = -parameters.log_rate.float().exp()[:, None] * F.softplus(a + parameters.dt_bias.float()[:, None])
    return heads_of(mixed, b.sigmoid(), decay, spec)


def heads_of(
    mixed: Tensor,  # float32 [G, channels, n]
    beta: Tensor,  # [G, hv, n]
    decay: Tensor,  # [G, hv, n]
    spec: GatedDelta,
) -> Block:
    """Convolution outputs, split by heads."""
    heads = ((spec.num_key_heads, spec.key_head_dim),) * 2 + ((spec.num_value_heads, spec.value_head_dim),)
    parts = mixed.split_with_sizes([count * size for count, size in heads], 1)
    q, k, v = (x.view(len(x), *shape, -1).transpose(2, 3) for x, shape in zip(parts, heads, strict=True))
    return Block(_normalized(q) * spec.key_head_dim**-0.5, _normalized(k), v, beta, decay)


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def _run_prompt(state: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Results of all blocks, and the state after the last one."""
    results = []
    for start in range(0, block.v.shape[2], _CHUNK):
        part = block.part(start, start + _CHUNK)
        attended, deltas = attend_block(state, part)
        state = fold(state, part.k, deltas, part.decay, torch.ones(len(state), deltas.shape[2], dtype=torch.bool))
        results.append(attended)
    return torch.cat(results, 2), state


def leave_records(
    cache: RecurrentCache[Tensor],
    rows: SlotRows,
    requests: Tensor,
    state: Tensor,
    window: Tensor,
    block: Block,
    deltas: Tensor,
) -> None:
    """Store the state before a block, and the block as records."""
    slots, tensors, missing = rows.slot_ids[requests], cache.tensors, cache.spec.num_records - deltas.shape[2]
    records = {"keys": block.k.transpose(1, 2), "deltas": deltas.transpose(1, 2), "decays": block.decay.transpose(1, 2)}
    for name, values in (*records.items(), ("window", window)):
        rows.writes.append((tensors[name], slots, F.pad(values, (0, 0) * (values.dim() - 2) + (0, missing))))
    rows.writes.append((tensors["state"], slots, state))
    rows.writes.append((tensors["position"], slots, rows.context_lens[requests].int()))


def leave_state(
    cache: RecurrentCache[Tensor], rows: SlotRows, requests: Tensor, state: Tensor, window: Tensor, num_rows: int
) -> None:
    """Store the state after all rows, without records."""
    slots, tensors, num_kept = rows.slot_ids[requests], cache.tensors, cache.spec.conv_size - 1
    last = window[:, window.shape[1] - num_kept :]
    rows.writes.append((tensors["window"], slots, F.pad(last, (0, 0, 0, cache.spec.num_records))))
    rows.writes.append((tensors["state"], slots, state))
    rows.writes.append((tensors["position"], slots, (rows.context_lens[requests] + num_rows).int()))
