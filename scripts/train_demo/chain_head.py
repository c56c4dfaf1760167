"""The EAGLE-3 head as it is trained: every row of a sequence begins a chain, and all chains take each step together.

Knows the head's arithmetic and the names of its tensors. It refuses to know about losses, corpora and files. It is
written apart from `network/`, whose attention works on pages and has no gradient.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from scripts.train_demo.block_drafter import DrafterShape, GatedMLP, RMSNorm, rotate


@dataclass
class ChainKeys:
    """K and V of the steps so far, rotated: [sequences, rows, kv_heads, head_dim] each."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class ChainHead(nn.Module):
    """`fc_norm`, `fc`, `midlayer`, `norm`, `lm_head`: the tensor names of SafeAILab's checkpoints. No embedding.

    EAGLE-3.1: each tap is normed before `fc`, and a step's feature is normed before the next one reads it.
    """

    def __init__(self, shape: DrafterShape, vocab_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.fc_norm = nn.ModuleList(RMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(shape.num_taps))
        self.fc = nn.Linear(shape.num_taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = ChainLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, vocab_size, bias=False)

    def features(self, taps: Tensor) -> Tensor:  # [sequences, rows, num_taps * hidden] -> [sequences, rows, hidden]
        chunks = taps.chunk(self.shape.num_taps, dim=-1)
        fused: Tensor = self.fc(torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, chunks, strict=True)], dim=-1))
        return fused

    def step(
        self,
        embeddings: Tensor,  # [sequences, rows, hidden], of the token behind each row's chain so far
        features: Tensor,  # [sequences, rows, hidden]
        keys: ChainKeys,  # of the steps before; this one's are appended
    ) -> tuple[Tensor, Tensor]:  # logits [sequences, rows, vocab], the features of the next step
        normed: Tensor = self.norm(self.midlayer(embeddings, features, keys))
        return self.lm_head(normed), normed


class ChainLayer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = ChainAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = GatedMLP(shape)

    def forward(self, embeddings: Tensor, features: Tensor, keys: ChainKeys) -> Tensor:
        x = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(features)], dim=-1)
        hidden = features + self.self_attn(x, keys)
        updated: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return updated


class ChainAttention(nn.Module):
    """A row sees the first step's rows up to its own, and of later steps its own row alone."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(2 * shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, past: ChainKeys) -> Tensor:  # [sequences, rows, 2 * hidden] -> [.., hidden]
        num_rows, step = x.shape[1], len(past.keys)
        rope = self._rotation(torch.arange(step, step + num_rows, device=x.device))
        queries = rotate(self._heads(self.q_proj(x)), rope) * self.shape.head_dim**-0.5
        past.keys.append(rotate(self._heads(self.k_proj(x)), rope))
        past.values.append(self._heads(self.v_proj(x)))
        keys, values = ([self._repeated(each) for each in kept] for kept in (past.keys, past.values))
        context = torch.einsum("bqhd,bkhd->bhqk", queries, keys[0])
        is_later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=x.device).triu(1)
        context = context.masked_fill(is_later, -torch.inf)
        own = [(queries * each).sum(-1).transpose(1, 2).unsqueeze(-1) for each in keys[1:]]  # [.., heads, rows, 1]
        weights = torch.cat([context, *own], dim=-1).softmax(dim=-1)
        attended = torch.einsum("bhqk,bkhd->bqhd", weights[..., :num_rows], values[0])
        for index, each in enumerate(values[1:]):
            attended = attended + weights[..., num_rows + index].transpose(1, 2).unsqueeze(-1) * each
        merged: Tensor = self.o_proj(attended.flatten(2))
        return merged

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.shape.head_dim)

    def _repeated(self, heads: Tensor) -> Tensor:
        return heads.repeat_interleave(self.shape.num_heads // self.shape.num_kv_heads, dim=2)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [1, rows, 1, head_dim]; the two halves of a head turn together."""
        exponents = torch.arange(0, self.shape.head_dim, 2, device=positions.device) / self.shape.head_dim
        angles = positions.unsqueeze(-1).float() * self.shape.rope_theta**-exponents
        angles = torch.cat([angles, angles], dim=-1)[None, :, None]
        return angles.cos(), angles.sin()


def shifted(x: Tensor, step: int) -> Tensor:
    """Column i has that of i + step, and zeros behind the end: [sequences, rows, ...]."""
    return functional.pad(x[:, step:], (0, 0) * (x.dim() - 2) + (0, step))
