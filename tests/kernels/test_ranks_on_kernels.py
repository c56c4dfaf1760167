"""The GPU's ops among two ranks, under Triton's interpreter and over gloo: what a GPU and NCCL run."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.rank_engines import build, make_zlab_pair, opened
from tests.kernels.rank_on_kernels import REQUESTS, run_rank
from tests.traces import PROMPTS, integers, logprobs, trace

LATENTS = {
    "family": "deepseek_v3",
    "num_hidden_layers": 2,
    "n_group": 1,
    "topk_group": 1,
    "draft": {"target_layer_ids": (0,), "num_layers": 1},
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, and gloo's tensors do not")
@pytest.mark.parametrize(
    ("memory", "target"),
    [((), {}), (("memory",), {}), ((), LATENTS)],
    ids=["gloo", "shared memory", "latents and experts"],
)
def test_two_ranks_on_the_kernels_give_the_tokens_of_one_rank(
    tmp_path: Path, memory: tuple[str, ...], target: dict[str, Any]
) -> None:
    make_zlab_pair(tmp_path, **target)
    engines = [build(tmp_path, tp_size=tp_size) for tp_size in (1, 2)]
    with opened(engines[0]) as one:
        expected, _ = trace(one, **REQUESTS)
        expected_logits = one.target_logits(PROMPTS[0])
    files = [engines[1].path, tmp_path / "store", *(tmp_path / name for name in memory)]
    words = [sys.executable, "-m", "tests.kernels.rank_on_kernels", *files]
    with subprocess.Popen([str(word) for word in words], cwd=Path(__file__).parents[2]) as other:
        try:
            found, perturbed = run_rank(0, *files)
        except BaseException:
            other.kill()
            raise
    assert other.returncode == 0
    assert all(any((tmp_path / name).read_bytes()) for name in memory)
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)
    assert (perturbed - expected_logits).abs().max() > 0.1
