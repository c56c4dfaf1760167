"""Gemma 4 as published tools quantize it, over the GPU kernels, against the step over plain PyTorch."""

from pathlib import Path

import pytest
import torch

from dflash_trt.core.batch import run_batch
from tests.checkpoint.quantized_gemma import FEW_HEADS, make_quantized_gemma
from tests.factories import make_zlab_drafter
from tests.kernels.test_step_on_kernels import (
    LOGPROB_TOLERANCE,
    NUM_DRAFT_TOKENS,
    assert_same,
    make_executors,
    next_batch,
    start,
)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_codes")
@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "NVFP4", "INT4 g32"])
def test_a_step_over_the_kernels_gives_the_tokens_of_plain_pytorch(
    tmp_path: Path, device: torch.device, name: str
) -> None:
    target = make_quantized_gemma(tmp_path, name)
    drafter = make_zlab_drafter(
        tmp_path / "drafter",
        target_dir=target,
        num_layers=1,
        target_layer_ids=(0,),
        block_size=NUM_DRAFT_TOKENS + 1,
        **FEW_HEADS,
    )
    reference, executor = make_executors((target, drafter), device)
    batch, expected = start(reference)
    assert_same(run_batch(executor, batch), expected)
    if name != "FP8_DYNAMIC":
        batch = next_batch(batch, expected, num_candidates=(2, 1).__getitem__)
        expected = run_batch(reference, batch)
        assert_same(run_batch(executor, batch), expected)
        return
    with executor.on_stream():
        executor.network.target_weights.layers[1].feed_forward.experts.down.row_scale[:, ::2].mul_(1.5)
    changed = run_batch(executor, batch)  # the negative control: scales of rows
    assert any(
        abs(a.logprobs[0] - b.logprobs[0]) > 2 * LOGPROB_TOLERANCE for a, b in zip(changed, expected, strict=True)
    )
