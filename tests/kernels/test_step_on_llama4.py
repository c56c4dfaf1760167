"""Llama 4 over the GPU kernels: chunks of positions, tempered queries and scaled inputs of experts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.core.batch import StepBatch, StepSampling, run_batch
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from tests.factories import make_target, make_zlab_drafter
from tests.kernels.test_step_on_kernels import (
    FP8_LOGPROB_TOLERANCE,
    LOGPROB_TOLERANCE,
    NUM_DRAFT_TOKENS,
    SAMPLED,
    Executor,
    assert_same,
    make_executors,
    next_batch,
    prefill,
)

CHUNK = 6  # a page has 4 positions
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """RoPE in the first layer, temperature and experts in the second."""
    root = tmp_path_factory.mktemp("pair")
    target = make_target(
        root / "target",
        family="llama4_text",
        num_hidden_layers=2,
        no_rope_layers=[1, 0],
        attention_chunk_size=CHUNK,
        floor_scale=3,
        attn_scale=0.5,
        num_local_experts=4,
        **FEW_HEADS,
    )
    drafter = make_zlab_drafter(
        root / "drafter",
        target_dir=target,
        num_layers=1,
        target_layer_ids=(0,),
        block_size=NUM_DRAFT_TOKENS + 1,
        **FEW_HEADS,
    )
    return target, drafter


def start(executor: Executor) -> tuple[StepBatch, Any]:
    """A prompt whose first verify block has a border of chunks behind its anchor, and one of several chunks."""
    requests = (
        prefill("greedy", CHUNK - 1, StepSampling(), first_page=0),
        prefill("sampled", 2 * CHUNK + 1, SAMPLED, first_page=10),
    )
    batch = StepBatch(requests=requests, num_draft_tokens=NUM_DRAFT_TOKENS)
    return batch, run_batch(executor, batch)


def test_a_step_over_the_kernels_gives_the_tokens_of_plain_pytorch(
    pair: tuple[Path, Path], device: torch.device
) -> None:
    reference, executor = make_executors(pair, device)
    for pages in executor.pages:
        pages.fill_(torch.nan)  # as another request may have left them
    batch, expected = start(reference)
    assert_same(run_batch(executor, batch), expected)
    batch = next_batch(batch, expected, num_candidates=lambda r: 2)
    assert [request.context_len for request in batch.requests] == [CHUNK - 1, 2 * CHUNK + 1]
    late = prefill("late", CHUNK + 1, StepSampling(), first_page=30)
    batch = StepBatch(requests=(*batch.requests, late), num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)


def test_what_llama4_alone_has_is_noticed(
    pair: tuple[Path, Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative controls of the test above, one at a time."""
    from dflash_trt.backends.cuda import experts, ops

    reference, executor = make_executors(pair, device)
    prompt = prefill("greedy", CHUNK + 2, StepSampling(), first_page=0)
    batch = StepBatch(requests=(prompt,), num_draft_tokens=0)
    expected = run_batch(reference, batch)[0].logprobs[0]

    def differs() -> bool:
        return abs(run_batch(executor, batch)[0].logprobs[0] - expected) > 10 * LOGPROB_TOLERANCE

    assert not differs()
    options, packed = ops._options, experts.PackedExperts
    changes: list[tuple[Any, str, Any]] = [
        (ops, "_options", lambda *given: replace(options(*given), chunk=None)),
        (ops.TorchGpuOps, "tempered", lambda self, q, rows, temperature: q),
        (experts, "PackedExperts", lambda **given: packed(**given | {"scales_inputs": False})),
    ]
    for owner, name, other in changes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            assert differs(), name


@pytest.mark.slow
@pytest.mark.usefixtures("exact_codes")
def test_fp8_pages_and_weights_give_the_tokens_of_plain_pytorch(pair: tuple[Path, Path], device: torch.device) -> None:
    scales = tuple(LayerKvScales(k=0.02 + 0.01 * i, v=0.01 + 0.002 * i) for i in range(2))
    reference, executor = make_executors(pair, device, weight_format="fp8", pages=QuantizationSpec(target_kv=scales))
    batch, expected = start(reference)
    for row, other in zip(run_batch(executor, batch), expected, strict=True):
        assert (row.emitted_tokens, row.draft_tokens) == (other.emitted_tokens, other.draft_tokens)
        assert row.logprobs == pytest.approx(other.logprobs, abs=FP8_LOGPROB_TOLERANCE)
