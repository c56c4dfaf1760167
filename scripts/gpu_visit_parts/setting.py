"""Where and at what size the parts measure: shapes of an 8B model on the GPU, or tiny ones in Triton's interpreter."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dflash_trt.core.model.gated_delta import GatedDelta
from gpu_visit_parts.results import Tables

_QWEN3_5_27B = GatedDelta(num_key_heads=16, num_value_heads=48, key_head_dim=128, value_head_dim=128, conv_size=4)


@dataclass(kw_only=True)
class Setting:
    """One per process; `shrink` makes it that of a dry run."""

    is_dry_run: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    dtype: torch.dtype = torch.bfloat16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    ffn: int = 12288
    vocab: int = 151936
    page_size: int = 32
    delta_net: GatedDelta = _QWEN3_5_27B
    kv_cache_bytes: int | None = None  # of a recipe's engine; None: most of what is free

    @property
    def qkv_heads(self) -> tuple[int, int, int]:
        return (self.heads, self.kv_heads, self.kv_heads)

    @property
    def capability(self) -> tuple[int, int]:
        """Of the GPU that engines are made for."""
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)

    def shrink(self) -> None:
        self.is_dry_run = True
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.float32  # the interpreter's bfloat16 is not to be trusted
        self.heads, self.kv_heads, self.head_dim, self.page_size = 2, 1, 16, 4
        self.hidden, self.ffn, self.vocab = 64, 96, 300
        self.kv_cache_bytes = 1 << 26
        sizes = {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 16, "value_head_dim": 16}
        self.delta_net = self.delta_net.model_copy(update=sizes)


SETTING = Setting()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement. `run` gives its rows by table; what it raises is its result."""

    name: str
    run: Callable[[], Tables]


class LeftOutError(Exception):
    """This machine cannot measure the case; the message says why."""


def context_is_broken() -> bool:
    """After an illegal access nothing works in this process any more."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
        torch.ones(1, device="cuda").add_(1).item()
    except RuntimeError:
        traceback.print_exc()
        return True
    return False
