"""Plans shared by the layers of a step, and splits of a fixed length: a row's result depends on its own keys alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.kernels import attention_launch, attention_plan
from dflash_trt.kernels.attention_launch import AttentionOptions, allocate_workspace
from dflash_trt.kernels.attention_plan import AttentionPlans, RequestTensors
from tests.kernels import attention_steps, reference_attention
from tests.kernels.attention_steps import Step, Tensors
from tests.kernels_on import DEVICE, moved

CONTEXT, ROWS, CHUNK = 200, 12, 5  # of the first request, alone in chunks or beside others
BESIDE = Step(rows=(ROWS, 3, 1), contexts=(CONTEXT, 330, 0))
SPLIT_LENGTH = 128
CPU = torch.device("cpu")
OPTIONS = {
    "all keys": AttentionOptions(),
    "window": AttentionOptions(window=150),
    "a border of chunks among the rows": AttentionOptions(chunk=103),
    "sinks": AttentionOptions(sinks=torch.tensor([0.5, -1.0, 2.0, 4.0], device=DEVICE)),
}


def make_tensors(step: Step) -> Tensors:
    return moved(attention_steps.make_tensors(step))


def attend(tensors: Tensors, options: AttentionOptions, plans: AttentionPlans | None = None) -> Tensor:
    return attention_launch.attend_pages(
        tensors.q,
        tensors.pages,
        tensors.requests,
        options,
        workspace=torch.empty(1 << 20, device=DEVICE),
        num_verify_rows=4,
        plans=plans,
    )


def chunk(tensors: Tensors, first: int, last: int) -> Tensors:
    """Rows of the first request alone, as the prompt chunk of a step."""
    requests = RequestTensors(
        token_offsets=torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
        context_lens=torch.tensor([CONTEXT + first], dtype=torch.int32, device=DEVICE),
        page_table=tensors.requests.page_table[:1].contiguous(),
    )
    return replace(tensors, q=tensors.q[first:last].contiguous(), requests=requests)


def in_chunks(tensors: Tensors, options: AttentionOptions) -> Tensor:
    return torch.cat([attend(chunk(tensors, *rows), options) for rows in ((0, CHUNK), (CHUNK, ROWS))])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.usefixtures("rows_alike")
def test_with_splits_of_a_fixed_length_batch_mates_and_chunks_change_no_bit(options: AttentionOptions) -> None:
    tensors, fixed = make_tensors(BESIDE), replace(options, split_length=SPLIT_LENGTH)
    beside = attend(tensors, fixed)
    assert torch.equal(beside[:ROWS], in_chunks(tensors, fixed))
    want = reference_attention.attend_pages(*moved((tensors.q, tensors.pages, tensors.requests, options), CPU))
    assert float((beside.cpu() - want).abs().max()) <= 3e-6


def test_without_a_fixed_length_they_do() -> None:
    tensors = make_tensors(BESIDE)
    assert not torch.equal(attend(tensors, AttentionOptions())[:ROWS], in_chunks(tensors, AttentionOptions()))


def test_a_split_that_cuts_a_block_of_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="split_length: expected a multiple of 64, found 100"):
        attend(make_tensors(BESIDE), AttentionOptions(split_length=100))


def test_layers_of_a_step_share_a_plan_unless_their_windows_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    write = attention_plan.write_plan
    monkeypatch.setattr(attention_plan, "write_plan", lambda *words: (written.append(words[1]), write(*words))[1])
    tensors, plans = make_tensors(Step(rows=(2, 2), contexts=(20, 3))), AttentionPlans()
    full, windowed = AttentionOptions(), AttentionOptions(window=8)
    results = [attend(tensors, options, plans) for options in (full, windowed, full, windowed)]
    assert len(written) == 2
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert not torch.equal(results[0], results[1])


def test_the_workspace_of_one_wave_has_a_place_for_every_program() -> None:
    assert len(allocate_workspace(kv_heads=2, head_dim=64, device=torch.device("cpu"))) >= 3 * 128 * 2 * (64 + 2)
