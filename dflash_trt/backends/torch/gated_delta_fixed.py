"""Gated delta nets for `--deterministic`: token by token, in calls of one shape.

The parallel form rounds by the place where a block begins, so its states depend on K and on chunks. Here a state is a
function of its tokens: folding a record and computing a token advance it by the same call, whose shape is one request's
state. Everything else is elementwise, or row by row.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.fixed_shapes import in_vectors
from dflash_trt.backends.torch.gated_delta import Block, SlotRows, gated, heads_of, leave_records, leave_state, start_of
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.network.ops import DeltaParameters
from dflash_trt.network.state import RecurrentCache


def gated_delta_in_order(
    qkvz: Tensor,  # [N, channels + v_size]
    ba: Tensor,  # [N, 2 * hv]
    parameters: DeltaParameters[Tensor],
    rows: SlotRows,
    cache: RecurrentCache[Tensor],
    spec: GatedDelta,
    eps: float,
) -> Tensor:  # [N, v_size]
    """See `Ops.gated_delta`."""
    inputs, z = qkvz.split_with_sizes((spec.num_channels, spec.v_size), 1)
    ends = torch.tensor(rows.num_rows).cumsum(0).tolist()
    results = []
    for index, (end, num_rows) in enumerate(zip(ends, rows.num_rows, strict=True)):
        requests, part = torch.tensor([index]), slice(end - num_rows, end)
        state, before = _folded(cache, rows, requests)
        window = torch.cat((before, inputs[None, part]), 1)
        block = _block(window, ba[part].float(), parameters, spec, qkvz.dtype)
        start = state.clone()
        attended, deltas = _run(state, block)
        if num_rows <= cache.spec.num_records:
            leave_records(cache, rows, requests, start[None], window, block, deltas[None])
        else:
            leave_state(cache, rows, requests, state[None], window, num_rows)
        results.append(attended.transpose(0, 1))
    gate = in_vectors(F.silu, z.float())
    return gated(torch.cat(results), gate, parameters, eps, qkvz.dtype)


def _folded(cache: RecurrentCache[Tensor], rows: SlotRows, requests: Tensor) -> tuple[Tensor, Tensor]:
    """State [hv, dk, dv] and inputs [1, conv_size - 1, channels] before the rows of a request."""
    state, before, num_folded = start_of(cache, rows, requests)
    slot, (state, *_) = rows.slot_ids[requests[0]], state.unbind()
    state = state.contiguous()
    keys, deltas = (cache.tensors[name][slot] for name in ("keys", "deltas"))
    decays = in_vectors(torch.exp, cache.tensors["decays"][slot])
    for i in range(int(num_folded)):
        _advance(state, keys[i], deltas[i], decays[i])
    return state, before


def _block(
    window: Tensor,  # [1, conv_size - 1 + n, channels]
    ba: Tensor,  # float32 [n, 2 * hv]
    parameters: DeltaParameters[Tensor],
    spec: GatedDelta,
    dtype: torch.dtype,
) -> Block:
    num_rows, filters, window = len(ba), parameters.conv.float(), window.float()
    mixed = window[:, :num_rows] * filters[:, 0]
    for i in range(1, spec.conv_size):
        mixed = mixed + window[:, i : i + num_rows] * filters[:, i]
    mixed = in_vectors(F.silu, mixed).to(dtype).float()
    b, a = ba.T[None].chunk(2, 1)  # [1, hv, n]
    rate = parameters.log_rate.float().exp()[:, None]
    decay = -rate * in_vectors(F.softplus, a + parameters.dt_bias.float()[:, None])
    return heads_of(mixed.transpose(1, 2), in_vectors(torch.sigmoid, b), decay, spec)


def _run(state: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Results and deltas, [hv, n, dv] each; advances the state [hv, dk, dv] by one request's block."""
    per_key = len(state) // block.k.shape[1]
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (block.q, block.k, block.v))  # [n, heads, D]
    decays = in_vectors(torch.exp, block.decay[0].T)  # [n, hv]
    beta = block.beta[0].T  # [n, hv]
    results, deltas = [], []
    for i in range(len(v)):
        keys = k[i].repeat_interleave(per_key, 0)[:, None]  # [hv, 1, dk]
        decayed = state * decays[i][:, None, None]
        deltas.append(beta[i][:, None] * (v[i] - torch.bmm(keys, decayed)[:, 0]))
        _advance(state, k[i], deltas[-1], decays[i])
        results.append(torch.bmm(q[i].repeat_interleave(per_key, 0)[:, None], state)[:, 0])
    return torch.stack(results, 1), torch.stack(deltas, 1)


def _advance(
    state: Tensor,  # [hv, dk, dv], contiguous; changed
    keys: Tensor,  # [hk, dk]
    deltas: Tensor,  # [hv, dv]
    decay: Tensor,  # [hv], a factor
) -> None:
    per_key = len(state) // len(keys)
    state.mul_(decay[:, None, None]).add_(keys.repeat_interleave(per_key, 0)[..., None] * deltas[:, None])
