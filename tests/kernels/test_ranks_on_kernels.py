"""The GPU's ops among two ranks, under Triton's interpreter and over gloo: what a GPU and NCCL run."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.runtime_config import RuntimeConfig
from tests.dflash2_files import make_dflash2_drafter
from tests.executor.rank_engines import KV_CACHE_BYTES, build, make_zlab_pair, opened
from tests.factories import make_target, make_zlab_drafter
from tests.gemma_targets import EVERYTHING, make_gemma
from tests.kernels.latent_steps import RanksInTurn
from tests.kernels.rank_on_kernels import REQUESTS, prefix_hit, run_rank
from tests.traces import PROMPTS, integers, logprobs, trace

HYBRID: dict[str, Any] = {
    "family": "qwen3_5_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "draft": {"target_layer_ids": (0, 1)},
}


LATENTS: dict[str, Any] = {
    "family": "deepseek_v3",
    "num_hidden_layers": 2,
    "n_group": 1,
    "topk_group": 1,
    "draft": {"target_layer_ids": (0,), "num_layers": 1},
}


LLAMA4: dict[str, Any] = {
    "family": "llama4_text",
    "num_hidden_layers": 2,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 3,
    "floor_scale": 2,
    "draft": {"target_layer_ids": (0,), "num_layers": 1},
}


def make_dflash2_pair(root: Path) -> None:
    make_dflash2_drafter(
        root / "drafter", target_dir=make_target(root / "target", vocab_size=12, tokenizer=False), block_size=4
    )


def make_eagle3_pair(root: Path) -> None:
    from tests.eagle3_files import save_eagle3_head  # skips without `speculators`

    target = make_target(root / "target", vocab_size=12, tokenizer=False)
    save_eagle3_head(root / "drafter", target_dir=target, draft_tokens=(0, 1, 2, 4, 5, 7, 8, 10))


def make_dspark_pair(root: Path) -> None:
    from tests.dspark_files import save_dspark_drafter  # skips without `speculators`

    target = make_target(root / "target", vocab_size=12, tokenizer=False)
    save_dspark_drafter(root / "drafter", target_dir=target, block_size=3, markov_head_type="gated")


def make_mtp_pair(root: Path) -> dict[str, str]:
    from tests.mtp_files import make_mtp_target  # skips without `speculators`

    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    make_mtp_target(root / "target", family="qwen3_5_moe_text", vocab_size=12, tokenizer=False, **layers)
    return {"drafter": "mtp"}


def make_gemma_pair(root: Path) -> None:
    target = make_gemma(root / "target", family="gemma4_text", **EVERYTHING, num_global_key_value_heads=1)
    make_zlab_drafter(root / "drafter", target_dir=target, intermediate_size=96)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, and gloo's tensors do not")
@pytest.mark.parametrize(
    "make_pair",
    [
        pytest.param(make_zlab_pair, id="dense"),
        pytest.param(partial(make_zlab_pair, **HYBRID), id="gated delta nets"),
        pytest.param(partial(make_zlab_pair, **LATENTS), id="latents and experts"),
        pytest.param(partial(make_zlab_pair, **LLAMA4), id="Llama 4", marks=pytest.mark.slow),
        pytest.param(make_dflash2_pair, id="DFlash2", marks=pytest.mark.slow),
        pytest.param(make_dspark_pair, id="DSpark", marks=pytest.mark.slow),
        pytest.param(make_eagle3_pair, id="EAGLE-3", marks=pytest.mark.slow),
        pytest.param(make_mtp_pair, id="MTP", marks=pytest.mark.slow),
        pytest.param(make_gemma_pair, id="Gemma 4", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_on_the_kernels_give_the_tokens_of_one_rank(
    tmp_path: Path, make_pair: Callable[[Path], dict[str, str] | None]
) -> None:
    names = make_pair(tmp_path) or {}
    assert_two_ranks_give_the_tokens_of_one(tmp_path, names, {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, and gloo's tensors do not")
def test_so_do_two_that_divide_the_positions_of_latents(tmp_path: Path) -> None:
    make_zlab_pair(tmp_path, **LATENTS)
    assert_two_ranks_give_the_tokens_of_one(tmp_path, {}, {"dcp_size": 2})


def test_deterministic_steps_of_such_ranks_are_refused_by_name(tmp_path: Path) -> None:
    make_zlab_pair(tmp_path, **LATENTS)
    engine = build(tmp_path, tp_size=2, dcp_size=2)
    config = RuntimeConfig(kv_cache_bytes=KV_CACHE_BYTES, deterministic=True)
    with pytest.raises(ConfigError, match="deterministic: expected dcp_size 1 on a GPU, found dcp_size 2"):
        TorchGpuExecutor.open(engine, config, ranks=RanksInTurn(2), device=torch.device("cpu"))


def assert_two_ranks_give_the_tokens_of_one(tmp_path: Path, names: dict[str, str], ranks: dict[str, int]) -> None:
    sizes = {"max_batch_size": 2, "max_num_tokens": 16}
    engines = [build(tmp_path, tp_size=1, **sizes, **names), build(tmp_path, tp_size=2, **sizes, **names, **ranks)]
    with opened(engines[0]) as one:
        hit = prefix_hit(one)
        assert bool(hit) == (one.limits.num_snapshots is not None)
        expected = trace(one, **REQUESTS)[0] + hit
        expected_logits = one.target_logits(PROMPTS[0])
    files = [engines[1].path, tmp_path / "store"]
    words = [sys.executable, "-m", "tests.kernels.rank_on_kernels", *files]
    with subprocess.Popen([str(word) for word in words], cwd=Path(__file__).parents[2]) as other:
        try:
            found, perturbed = run_rank(0, *files)
        except BaseException:
            other.kill()
            raise
    assert other.returncode == 0
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)
    assert (perturbed - expected_logits).abs().max() > 0.1
