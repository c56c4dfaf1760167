"""A gated delta net over a path of tokens from nothing on, one after the other, by transformers' own rule."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated, torch_recurrent_gated_delta_rule

from tests.kernels.gated_delta_steps import EPS, Layer, Row

Seeds = Sequence[int]  # by position: of the draft that stands there


def along(layer: Layer, seeds: Seeds, *, slot: int = 0) -> Tensor:  # float32 [len(seeds), v_size]
    """The results at each token, in float32 whatever the layer's dtype."""
    return run(layer, seeds, slot=slot)[0]


@torch.inference_mode()
def run(layer: Layer, seeds: Seeds, *, slot: int = 0) -> tuple[Tensor, Tensor]:
    """Those, and the state behind the last one, [heads, key_head_dim, value_head_dim]."""
    steps = [layer.inputs([Row(slot, position, 1)], seed=seed) for position, seed in enumerate(seeds)]
    qkvz, ba = (torch.cat(parts).float() for parts in zip(*steps, strict=True))
    spec, parameters = layer.spec, layer.parameters
    inputs, gate = qkvz.split((spec.num_channels, spec.v_size), 1)
    padded = F.pad(inputs, (0, 0, spec.conv_size - 1, 0)).T[None]
    mixed = F.silu(F.conv1d(padded, parameters.conv.float()[:, None], groups=spec.num_channels))[0].T
    q, k, v = mixed.split((spec.k_size, spec.k_size, spec.v_size), 1)
    per_key = spec.num_value_heads // spec.num_key_heads
    q, k = (x.unflatten(1, (-1, spec.key_head_dim)).repeat_interleave(per_key, 1)[None] for x in (q, k))
    b, a = ba.chunk(2, 1)
    decay = -parameters.log_rate.exp() * F.softplus(a + parameters.dt_bias)
    results, state = torch_recurrent_gated_delta_rule(
        q,
        k,
        v.unflatten(1, (-1, spec.value_head_dim))[None],
        decay[None],
        b.sigmoid()[None],
        None,
        True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = Qwen3NextRMSNormGated(spec.value_head_dim, eps=EPS)
    norm.weight = torch.nn.Parameter(parameters.norm.float())
    flat = results[0].reshape(-1, spec.value_head_dim)
    return norm(flat, gate.reshape(flat.shape)).view(len(seeds), -1), state[0]
