"""Decode context parallelism: ranks that divide the positions of latents give every request what one rank gives it."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import ConfigError
from dflash_trt.engine_dir import EngineDir
from tests.executor.attention_dp import engine_loop, requests, run
from tests.executor.rank_engines import build, opened, write_calibration_prompts
from tests.executor.test_attention_dp import make_pair, verified
from tests.factories import make_target, make_zlab_drafter
from tests.traces import PROMPTS


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    make_pair(root, "deepseek_v3")
    return root


@pytest.fixture(scope="module")
def one_rank(root: Path) -> EngineDir:
    return build(root, tp_size=1)


@pytest.fixture(scope="module")
def two_ranks(root: Path) -> EngineDir:
    return build(root, tp_size=2, dcp_size=2)


@pytest.fixture(scope="module")
def expected(one_rank: EngineDir) -> list[Any]:
    with engine_loop(one_rank) as loop:
        return verified(run(loop, requests()))


def texts(found: list[Any]) -> list[Any]:
    return [tokens for tokens, _ in found]


def outputs_of(engine: EngineDir) -> dict[str, Any]:
    with engine_loop(engine) as loop:
        found = {
            "greedy": run(loop, requests(), at_once=4),
            "sampled": run(loop, requests(0.9)),
            "rejection": run(loop, requests(0.9, is_reproducible=False), at_once=2),
        }
        statistics = loop.statistics().scheduler
        assert statistics.num_prefix_hit_tokens > 0
        assert statistics.num_emitted_by_verify > statistics.num_verify_blocks, "no draft was accepted"
    return {name: verified(outputs) for name, outputs in found.items()}


@pytest.mark.parametrize(("family", "num_ranks"), [("deepseek_v3", 2), ("deepseek_v3", 4), ("glm_moe_dsa", 2)])
def test_ranks_give_each_request_what_one_gives(tmp_path: Path, family: str, num_ranks: int) -> None:
    """With both samplers, prompts beside verify blocks, prefix hits, and ranks before whose positions a row stands."""
    make_pair(tmp_path, family)
    divided = build(tmp_path, tp_size=num_ranks, ep_size=num_ranks, dcp_size=num_ranks)
    assert outputs_of(divided) == outputs_of(build(tmp_path, tp_size=1))


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_scheduling": True},
        {"adaptive_draft_length": True, "draft_length": None},
        {"ngram": True},
        {"host_cache_bytes": 1 << 20},
        {"deterministic": True},
    ],
    ids=", ".join,
)
def test_no_setting_changes_a_text(two_ranks: EngineDir, expected: list[Any], options: dict[str, Any]) -> None:
    with engine_loop(two_ranks, **options) as loop:
        assert texts(verified(run(loop, requests(), at_once=3))) == texts(expected)


def test_deterministic_log_probabilities_do_not_depend_on_batch_mates(two_ranks: EngineDir) -> None:
    """To the last bit, alone and beside others, with chunks of other lengths."""
    wanted = [replace(each, sampling=replace(each.sampling, logprobs=True)) for each in requests()]
    alone = wanted[4]
    with engine_loop(two_ranks, deterministic=True, enable_prefix_caching=False) as loop:
        [first] = run(loop, [alone])
        mates = {output.request_id: output for output in run(loop, wanted, at_once=3)}
    assert mates[alone.request_id].token_ids == first.token_ids
    assert mates[alone.request_id].logprobs == first.logprobs


def test_preempted_requests_come_back(two_ranks: EngineDir, expected: list[Any]) -> None:
    """18 pages of 4 tokens hold one sequence of max_seq_len."""
    page_bytes = 4 * two_ranks.manifest.pretrained_config.states().bytes_per_token
    with engine_loop(two_ranks, kv_cache_bytes=18 * page_bytes, enable_prefix_caching=False) as loop:
        assert loop.page_plan.num_pages == 18
        assert texts(verified(run(loop, requests()))) == texts(expected)
        assert loop.statistics().scheduler.num_preemptions > 0


def test_packed_experts_and_fp8_pages_too(tmp_path: Path) -> None:
    if find_spec("modelopt") is None:
        pytest.skip("modelopt is not installed: scripts/test installs it")
    make_pair(tmp_path, "deepseek_v3")
    write_calibration_prompts(tmp_path)
    packed = {"target": "fp8", "kv_cache": "fp8", "calibration": {"prompts": "prompts.jsonl"}}
    found = []
    for fields in ({"tp_size": 1}, {"tp_size": 2, "dcp_size": 2}):
        with engine_loop(build(tmp_path, quantization=packed, **fields)) as loop:
            found.append(verified(run(loop, requests(), at_once=3)))
    assert found[1] == found[0]


def test_each_rank_keeps_its_part_of_the_positions(tmp_path: Path) -> None:
    """Four ranks have pages for nearly four times the tokens of one; those that divide heads alone have fewer."""
    make_pair(tmp_path, "deepseek_v3")
    tokens = {}
    for name, fields in (
        ("one", {"tp_size": 1}),
        ("heads", {"tp_size": 4}),
        ("positions", {"tp_size": 4, "dcp_size": 4}),
    ):
        engine = build(tmp_path, overwrite=True, max_batch_size=64, **fields)
        with engine_loop(engine, kv_cache_bytes=100 << 10) as loop:
            tokens[name] = loop.limits.num_pages * loop.limits.page_size
    assert tokens["positions"] > 3.9 * tokens["one"]
    assert tokens["heads"] < 0.75 * tokens["positions"]


# Twice the largest difference to one rank's float32: 5e-6, and in bfloat16 0.16, where one rank has 0.13.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.32)])
def test_logits_are_those_of_one_rank(tmp_path: Path, dtype: str, tolerance: float) -> None:
    """Of layers without experts, whose choice may fall differently in bfloat16."""
    target = make_target(
        tmp_path / "target", family="deepseek_v3", vocab_size=12, tokenizer=False, first_k_dense_replace=4
    )
    make_zlab_drafter(tmp_path / "drafter", target_dir=target, intermediate_size=96)
    one, two = build(tmp_path, tp_size=1), build(tmp_path, tp_size=2, dcp_size=2, dtype=dtype)
    with opened(one) as whole, opened(two) as divided:
        for prompt in PROMPTS:
            found = divided.target_logits(prompt).float()
            torch.testing.assert_close(found, whole.target_logits(prompt), rtol=0, atol=tolerance)


def test_prefixes_on_disk_are_read_by_the_next_engine(
    two_ranks: EngineDir, expected: list[Any], tmp_path: Path
) -> None:
    disk = {"host_cache_bytes": 1 << 20, "disk_cache_dir": str(tmp_path), "publish_prompts": True}
    for turn in range(2):
        with engine_loop(two_ranks, **disk) as loop:
            assert texts(verified(run(loop, requests(), at_once=1))) == texts(expected)
            while not loop.has_kept([b"no block"]):  # nor anything on its way
                loop.step()
            assert (loop.statistics().scheduler.num_loaded_blocks > 0) == (turn == 1)


def test_sizes_that_do_not_fit_are_refused() -> None:
    divided = {"target": "target", "tp_size": 4, "dcp_size": 4}
    for fields, reason in (
        ({"dcp_size": 2}, "dcp_size 2 is neither 1 nor tp_size 4"),
        ({"page_size": 6}, "page_size 6 is no multiple of dcp_size 4"),
        ({"backend": "tensorrt"}, "dcp_size needs backend torch"),
        ({"attention_dp": True}, "with attention_dp each has requests of its own"),
    ):
        with pytest.raises(ValueError, match=reason):
            BuildConfig(**(divided | fields))


def test_targets_without_latents_are_refused(tmp_path: Path) -> None:
    make_pair(tmp_path, "qwen3_moe")
    with pytest.raises(ConfigError, match="dcp_size: expected a target with latents"):
        build(tmp_path, tp_size=2, dcp_size=2)
