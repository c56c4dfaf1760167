"""What `norm.py` computes, in plain PyTorch on any device: the definition its tests hold it to."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis, fp32 inside, rounded once."""
    value = x.float()
    scale = torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + eps)
    return (value * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual, rounded, and its norm."""
    total = x + residual
    return total, rms_norm(total, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:  # [N, 2F] -> [N, F]
    """silu, rounded, times up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (gate.float() * gate.float().sigmoid()).to(gate.dtype) * up
