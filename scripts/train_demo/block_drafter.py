"""The DFlash2 drafter as it is trained: many anchors of one sequence in a single pass.

Knows the drafter's arithmetic and the names of its tensors. It refuses to know about losses, corpora and files. It is
written apart from `network/`, whose attention works on pages and has no gradient.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from scripts.train_demo.dflash2_parts import BlockConv, CandidateSelector

_ANCHORS_PER_GROUP = 8  # attention works on groups of blocks: all blocks at once would square the block keys


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Sizes of the drafter; `rope_theta` is the target's, so that its K/V projections can start from the target's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    num_taps: int
    rms_norm_eps: float
    rope_theta: float


@dataclass(frozen=True, kw_only=True)
class DFlash2Shape(DrafterShape):
    vocab_size: int
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int


class Blocks(NamedTuple):
    """Inputs shared by the attention of every layer: rotations, and the mask."""

    context_rope: tuple[Tensor, Tensor]  # cos, sin: [1, context, 1, head_dim]
    block_rope: tuple[Tensor, Tensor]  # cos, sin: [sequences, anchors * slots, 1, head_dim]
    visible: Tensor  # bool [sequences * groups, 1, queries per group, context + queries per group]
    num_slots: int


class BlockDrafter(nn.Module):
    """`fc`, `hidden_norm`, `layers`, `norm`, `candidate_selector`: names of a z-lab file. No embedding, no head."""

    def __init__(self, shape: DFlash2Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.num_taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.candidate_selector = CandidateSelector(
            hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, rank=shape.selector_rank
        )

    def forward(
        self,
        taps: Tensor,  # [sequences, context, num_taps * hidden]
        block_embeddings: Tensor,  # [sequences, anchors, slots, hidden]: the anchor's, then the mask token's
        anchors: Tensor,  # int64 [sequences, anchors]: positions; a block sees the context rows before its anchor
    ) -> Tensor:  # [sequences, anchors, slots, hidden]
        num_sequences, num_anchors, num_slots, _ = block_embeddings.shape
        context: Tensor = self.hidden_norm(self.fc(taps))
        blocks = self._blocks(anchors, context_len=taps.shape[1], num_slots=num_slots)
        hidden = block_embeddings.flatten(1, 2)
        for layer in self.layers:
            hidden = layer(hidden, context, blocks)
        normed: Tensor = self.norm(hidden)
        return normed.view(num_sequences, num_anchors, num_slots, -1)

    def _blocks(self, anchors: Tensor, *, context_len: int, num_slots: int) -> Blocks:
        context_positions = torch.arange(context_len, device=anchors.device)
        slot_positions = anchors.unsqueeze(-1) + torch.arange(num_slots, device=anchors.device)
        return Blocks(
            context_rope=self._rotation(context_positions.unsqueeze(0)),
            block_rope=self._rotation(slot_positions.flatten(1)),
            visible=visible_keys(anchors, context_len=context_len, num_slots=num_slots),
            num_slots=num_slots,
        )

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [sequences, positions, 1, head_dim]; the two halves of a head turn together."""
        exponents = torch.arange(0, self.shape.head_dim, 2, device=positions.device) / self.shape.head_dim
        angles = positions.unsqueeze(-1).float() * self.shape.rope_theta**-exponents
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
        return angles.cos(), angles.sin()


def visible_keys(
    anchors: Tensor,  # int64 [sequences, anchors]
    *,
    context_len: int,
    num_slots: int,
) -> Tensor:  # bool [sequences * groups, 1, queries per group, context + queries per group]
    """A slot sees the context before its anchor and every slot of its own block, and nothing of other blocks."""
    group_size = _group_size(anchors.shape[1])
    grouped = anchors.view(-1, group_size)  # [sequences * groups, group_size]
    before_anchor = torch.arange(context_len, device=anchors.device) < grouped.unsqueeze(-1)
    before_anchor = before_anchor.repeat_interleave(num_slots, dim=1)  # one row per query
    same_block = torch.eye(group_size, dtype=torch.bool, device=anchors.device)
    same_block = same_block.repeat_interleave(num_slots, 0).repeat_interleave(num_slots, 1)
    return torch.cat([before_anchor, same_block.expand(len(grouped), -1, -1)], dim=-1).unsqueeze(1)


class DrafterLayer(nn.Module):
    def __init__(self, shape: DFlash2Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = GatedMLP(shape)
        self.attention_conv = _conv(shape)
        self.mlp_conv = _conv(shape)

    def forward(self, hidden: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
        slots, conv = blocks.num_slots, self.attention_conv
        x = self.input_layernorm(hidden)
        before, after = conv.filters(x)
        hidden = hidden + conv.after(self.self_attn(conv.before(x, before, slots), context, blocks), after, slots)
        conv = self.mlp_conv
        x = self.post_attention_layernorm(hidden)
        before, after = conv.filters(x)
        updated: Tensor = hidden + conv.after(self.mlp(conv.before(x, before, slots)), after, slots)
        return updated


def _conv(shape: DFlash2Shape) -> BlockConv:
    return BlockConv(
        hidden_size=shape.hidden_size, kernel_size=shape.conv_kernel_size, group_size=shape.conv_group_size
    )


class BlockAttention(nn.Module):
    """Block queries over context and block keys. The context's K/V are computed once and serve all anchors."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(
        self,
        x: Tensor,  # [sequences, anchors * slots, hidden], normed
        context: Tensor,  # [sequences, context, hidden]
        blocks: Blocks,
    ) -> Tensor:
        num_groups = len(blocks.visible) // len(x)
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), blocks.block_rope)
        block_keys = rotate(self.k_norm(self._heads(self.k_proj(x))), blocks.block_rope)
        context_keys = rotate(self.k_norm(self._heads(self.k_proj(context))), blocks.context_rope)
        values, context_values = self._heads(self.v_proj(x)), self._heads(self.v_proj(context))
        attended = functional.scaled_dot_product_attention(
            _split_groups(queries.to(values.dtype), num_groups).transpose(1, 2),
            _join_context(context_keys.to(values.dtype), block_keys.to(values.dtype), num_groups).transpose(1, 2),
            _join_context(context_values, values, num_groups).transpose(1, 2),
            attn_mask=blocks.visible,
            enable_gqa=True,
        )
        merged: Tensor = self.o_proj(attended.transpose(1, 2).reshape(*x.shape[:2], -1))
        return merged

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim)


class GatedMLP(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()  # fp32 inside, back to the input's dtype
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


def rotate(heads: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """NeoX style: the first half of a head's dimensions pairs with the second."""
    cos, sin = rope
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def _group_size(num_anchors: int) -> int:
    return _ANCHORS_PER_GROUP if num_anchors % _ANCHORS_PER_GROUP == 0 else num_anchors


def _split_groups(rows: Tensor, num_groups: int) -> Tensor:
    """[sequences, rows, heads, dim] -> [sequences * groups, rows per group, heads, dim]"""
    return rows.view(len(rows) * num_groups, -1, *rows.shape[2:])


def _join_context(context: Tensor, block: Tensor, num_groups: int) -> Tensor:
    """Keys or values of each group: the whole context, then the group's own blocks."""
    repeated = context.unsqueeze(1).expand(-1, num_groups, -1, -1, -1).flatten(0, 1)
    return torch.cat([repeated, _split_groups(block, num_groups)], dim=1)
