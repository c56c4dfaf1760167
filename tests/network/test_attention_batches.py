"""Which requests attend together on a CPU, and that it changes nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.backends.torch import attention_plan
from dflash_trt.backends.torch.attention import attend_rows
from dflash_trt.backends.torch.attention_plan import Scratch, plan_attention
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.network.ops import StepInputs
from tests.caches import cache_of
from tests.logit_rows import columns_off

PAGE_SIZE = 8


@given(st.lists(st.integers(1, 3000), max_size=80))
def test_every_request_is_in_one_batch_and_padding_stays_small(ends: list[int]) -> None:
    batches = attention_plan._batches(list(range(len(ends))), ends)
    assert sorted(r for batch in batches for r in batch) == list(range(len(ends)))
    for batch in batches:
        padded = len(batch) * max(ends[r] for r in batch)
        assert padded <= attention_plan._MAX_KEYS_PER_CALL or len(batch) == 1


def test_requests_attended_in_several_calls_get_what_one_call_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    context_lens = [3, 90, 17, 41, 64, 5, 88, 30]
    generator = torch.Generator().manual_seed(0)
    num_requests, width = len(context_lens), 3
    q = torch.randn(num_requests * width, 4, 16, generator=generator)
    k, v = torch.randn(2, num_requests * width, 2, 16, generator=generator)
    pages = torch.randn(num_requests * 12, 2, PAGE_SIZE, 2, 16, generator=generator)
    attended = {}
    for most in (1 << 20, 256):
        monkeypatch.setattr(attention_plan, "_MAX_KEYS_PER_CALL", most)
        plan = plan_attention(_inputs(context_lens, width), page_size=PAGE_SIZE, num_draft_tokens=width - 1)
        attention = AttentionMask(is_causal=True, window=None)
        attended[most] = (len(plan.groups), attend_rows(plan, q, k, v, cache_of(pages.clone()), attention))
    assert attended[1 << 20][0] == 1
    assert attended[256][0] > 2
    torch.testing.assert_close(attended[256][1], attended[1 << 20][1], rtol=0, atol=1e-6)


def test_scratch_is_used_again_and_grows() -> None:
    scratch, like = Scratch(), torch.empty(0, 6)
    k, v = scratch.take(like, 5)
    assert k.shape == v.shape == (5, 6)
    assert k.data_ptr() != v.data_ptr()
    assert scratch.take(like, 3)[0].data_ptr() == k.data_ptr()
    assert scratch.take(like, 50)[0].shape == (50, 6)


def _inputs(context_lens: list[int], width: int) -> StepInputs[torch.Tensor]:
    num_requests = len(context_lens)
    starts = torch.tensor(context_lens)
    lengths = torch.zeros(num_requests, dtype=torch.int32)
    return StepInputs(
        token_ids=torch.zeros(num_requests * width, dtype=torch.int32),
        positions=(starts[:, None] + torch.arange(width)).flatten().int(),
        token_offsets=torch.arange(0, num_requests * width + 1, width, dtype=torch.int32),
        context_lens=starts.int(),
        page_table=torch.arange(num_requests * 12, dtype=torch.int32).view(num_requests, 12),
        logit_rows=torch.zeros(num_requests, width, dtype=torch.int32),
        num_candidates=lengths,
        **columns_off(num_requests),
    )
