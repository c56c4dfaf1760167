"""The GPU's ops among two ranks, under Triton's interpreter and over gloo: what a GPU and NCCL run."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.executor.rank_engines import build, make_zlab_pair, opened
from tests.factories import make_zlab_drafter
from tests.gemma_targets import EVERYTHING, make_gemma
from tests.kernels.rank_on_kernels import REQUESTS, run_rank
from tests.traces import PROMPTS, integers, logprobs, trace


def make_gemma_pair(root: Path) -> None:
    target = make_gemma(root / "target", family="gemma4_text", **EVERYTHING, num_global_key_value_heads=1)
    make_zlab_drafter(root / "drafter", target_dir=target, intermediate_size=96)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, and gloo's tensors do not")
@pytest.mark.parametrize(
    ("make_pair", "memory"),
    [
        pytest.param(make_zlab_pair, (), id="gloo"),
        pytest.param(make_zlab_pair, ("memory",), id="shared memory"),
        pytest.param(make_gemma_pair, ("memory",), id="Gemma 4, shared memory", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_on_the_kernels_give_the_tokens_of_one_rank(
    tmp_path: Path, make_pair: Callable[[Path], None], memory: tuple[str, ...]
) -> None:
    make_pair(tmp_path)
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
