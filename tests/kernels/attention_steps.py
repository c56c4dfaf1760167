"""Steps for the attention kernels: random requests over pages whose unused rows hold NaN, so that reading one shows."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dflash_trt.kernels.attention_launch import AttentionOptions, RequestTensors

PAGE_DTYPES = {torch.float8_e4m3fn: 0.25}  # the size of what is stored, small enough for e4m3


@dataclass(frozen=True, kw_only=True)
class Heads:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64


@dataclass(frozen=True, kw_only=True)
class Step:
    """Requests with `rows` query rows each, after `contexts` stored tokens each."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: Heads = Heads()
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype | None = None
    options: AttentionOptions = field(default_factory=AttentionOptions)
    num_extra_rows: int = 0  # tokens behind the last request's

    @property
    def stored_rows(self) -> tuple[int, ...]:
        """Rows that a target's step finds in its pages: the step's own K/V are written before it attends."""
        return tuple(context + rows for context, rows in zip(self.contexts, self.rows, strict=True))


@dataclass(frozen=True, kw_only=True)
class Tensors:
    q: Tensor
    pages: Tensor
    requests: RequestTensors

    def to(self, device: torch.device) -> "Tensors":
        requests = RequestTensors(
            token_offsets=self.requests.token_offsets.to(device),
            context_lens=self.requests.context_lens.to(device),
            page_table=self.requests.page_table.to(device),
        )
        return Tensors(q=self.q.to(device), pages=self.pages.to(device), requests=requests)


def make_tensors(step: Step, *, seed: int = 0, stored_rows: tuple[int, ...] | None = None) -> Tensors:
    """On the CPU. Pages are in random order; page 0 and everything that is not stored is NaN."""
    generator = torch.Generator().manual_seed(seed)
    heads, page_size = step.heads, step.page_size
    stored_rows = step.stored_rows if stored_rows is None else stored_rows
    num_pages = [-(-n // page_size) for n in stored_rows]
    order = (torch.randperm(sum(num_pages), generator=generator) + 1).int()
    page_table = torch.zeros(len(stored_rows), max(num_pages) + 1, dtype=torch.int32)
    shape = (sum(num_pages) + 1, 2, page_size, heads.num_kv_heads, heads.head_dim)
    pages = torch.full(shape, torch.nan)
    for request, n in enumerate(stored_rows):
        page_table[request, : num_pages[request]], order = order.split(
            [num_pages[request], len(order) - num_pages[request]]
        )
        for position in range(0, n, page_size):
            page, stop = page_table[request, position // page_size], min(page_size, n - position)
            pages[page, :, :stop] = torch.randn(2, stop, *shape[3:], generator=generator)
    offsets = torch.tensor((0, *step.rows)).cumsum(0).int()
    num_rows = int(offsets[-1]) + step.num_extra_rows
    q = torch.randn(num_rows, heads.num_heads, heads.head_dim, generator=generator)
    requests = RequestTensors(
        token_offsets=offsets, context_lens=torch.tensor(step.contexts, dtype=torch.int32), page_table=page_table
    )
    return Tensors(q=q.to(step.dtype), pages=pages.to(step.page_dtype or step.dtype), requests=requests)


def make_block(step: Step, width: int, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    """K and V of the draft blocks as slices of one projection, whose rows are further apart than a row is long."""
    heads = step.heads
    generator = torch.Generator().manual_seed(seed)
    kv_size = heads.num_kv_heads * heads.head_dim
    projected = torch.randn(len(step.contexts) * width, 2 * kv_size, generator=generator).to(step.dtype)
    k, v = (x.unflatten(1, (heads.num_kv_heads, heads.head_dim)) for x in projected.split(kv_size, dim=1))
    return k, v


def on(options: AttentionOptions, device: torch.device) -> AttentionOptions:
    return options if options.sinks is None else replace(options, sinks=options.sinks.to(device))
