"""Rows that pages keep by position, and keys that a chain does not see: the kernels against PyTorch's ops."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.torch import paged_rows as torch_rows
from dflash_trt.core.state_spec import PagedRows
from dflash_trt.kernels.attention_launch import allocate_workspace, attend_draft
from dflash_trt.kernels.attention_plan import AttentionOptions, RequestTensors
from dflash_trt.kernels.paged_rows_launch import last_rows, previous_rows
from dflash_trt.network.state import RowCache
from tests.kernels_on import moved

PAGE_SIZE = 4
CONTEXTS, LENGTHS = (0, 4, 6, 0), (5, 1, 3, 0)  # the last request is padding


def make_step(device: torch.device, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, RequestTensors, Tensor]:
    """Rows, pages, requests and positions, with two rows behind the last request."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor((0, *LENGTHS), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = [start + i for start, count in zip(CONTEXTS, LENGTHS, strict=True) for i in range(count)]
    x = torch.randn(len(positions) + 2, width, generator=generator).to(device, dtype)
    pages = torch.randn(13, PAGE_SIZE, width, generator=generator).to(device, dtype)
    requests = RequestTensors(
        token_offsets=offsets.to(device),
        context_lens=torch.tensor(CONTEXTS, dtype=torch.int32, device=device),
        page_table=torch.randperm(12, generator=generator).int().view(4, 3).to(device) + 1,
    )
    return x, pages, requests, torch.tensor([*positions, 0, 0], dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [1, 24, 1040])
def test_rows_behind_which_a_request_continues_are_read_from_its_pages(
    device: torch.device, width: int, dtype: torch.dtype
) -> None:
    x, pages, requests, positions = make_step(device, width, dtype)
    expected = RowCache(pages.cpu().clone(), PagedRows(name="rows", width=width, dtype="float32"))
    on_host = moved(requests, torch.device("cpu"))
    inputs: Any = SimpleNamespace(
        token_offsets=on_host.token_offsets,
        context_lens=on_host.context_lens,
        page_table=on_host.page_table,
        positions=positions[:-2].cpu(),
    )
    before = torch_rows.previous_rows(x[:-2].cpu(), inputs, on_host.page_table, expected)
    found = previous_rows(x, pages, requests, positions)
    assert torch.equal(found[:-2].cpu(), before) and not found[-2:].any()
    assert torch.equal(pages.cpu(), expected.tensor), "rows of padding touch no page"
    assert not before[0].any() and before[1:5].equal(x[:4].cpu())  # position 0 has none before it
    lengths = torch.tensor([1, 4, 12, 0], dtype=torch.int32)
    rows = torch_rows.read_rows(expected, on_host.page_table, lengths.long() - 1)
    assert torch.equal(last_rows(pages, requests.page_table, lengths.to(device)).cpu(), rows) and not rows[3].any()


@pytest.mark.parametrize("window", [None, 3])
def test_a_key_before_the_first_is_hidden_and_no_other(device: torch.device, window: int | None) -> None:
    """Contexts of the first key alone, of a page, and of more keys than one program reads at once."""
    heads, head_dim, num_slots, contexts = 4, 16, 3, (1, 5, 150)
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    pages = randn(64 * len(contexts), 2, PAGE_SIZE, 2, head_dim)
    q, k, v = (randn(len(contexts) * num_slots, n, head_dim) for n in (heads, 2, 2))
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    table = torch.arange(len(pages), dtype=torch.int32, device=device).view(len(contexts), -1)
    requests = RequestTensors(token_offsets=lengths, context_lens=lengths, page_table=table)
    workspace = allocate_workspace(kv_heads=2, head_dim=head_dim, device=device)

    def attended(first_key: int) -> Tensor:
        options = AttentionOptions(window=window, first_key=first_key)
        return attend_draft(q, (k, v), pages, requests, options, workspace=workspace)

    found = attended(1)
    for r, context in enumerate(contexts):
        stored = pages[table[r].long()].transpose(0, 1).flatten(1, 2)[:, :context]  # [2, context, kv_heads, D]
        own = slice(r * num_slots, (r + 1) * num_slots)
        keys, values = (torch.cat((stored[i], x[own])).repeat_interleave(2, dim=1) for i, x in enumerate((k, v)))
        at, query = torch.arange(context + num_slots, device=device), torch.arange(num_slots, device=device) + context
        visible = (at <= query[:, None]) & (at >= 1) & (query[:, None] - at < (window or 1000))
        scores = torch.einsum("qhd,khd->hqk", q[own], keys) * head_dim**-0.5
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), values)
        torch.testing.assert_close(found[own], expected, rtol=1e-5, atol=1e-5)
    others = attended(0)  # the negative control: only where the first key is in sight
    is_changed = [not torch.equal(others[r * num_slots], found[r * num_slots]) for r in range(len(contexts))]
    assert is_changed == ([True, False, False] if window else [True, True, True])
