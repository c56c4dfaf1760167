"""Ranks with requests of their own over interpreted TensorRT engines give each request what one rank gives it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.tensorrt.canary import check_pages
from dflash_trt.backends.tensorrt.exchange_check import check_shared_rows
from dflash_trt.compile.tensorrt_check import check_config
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import EngineDirError
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from tests.dflash2_files import make_dflash2_drafter
from tests.dspark_files import save_dspark_drafter
from tests.eagle3_files import save_eagle3_head
from tests.executor.attention_dp import engine_loop, requests, run
from tests.executor.rank_engines import KV_CACHE_BYTES, build
from tests.executor.test_attention_dp import make_pair, scores_of, verified
from tests.factories import make_target
from tests.trt import ranks as rank_networks
from tests.trt.own_requests import open_in_threads, ranks_in_threads

TWO_RANKS: dict[str, Any] = {"tp_size": 2, "ep_size": 2, "attention_dp": True}
CONFIG = RuntimeConfig(device="cpu", num_threads=1, kv_cache_bytes=KV_CACHE_BYTES)

pytestmark = pytest.mark.usefixtures("trt")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_two_ranks_give_each_request_what_one_gives(tmp_path: Path, family: str) -> None:
    """With both samplers, prompts beside verify blocks on the other rank, and steps that are empty on a rank."""
    make_pair(tmp_path, family)
    both = []
    for fields in ({"tp_size": 1}, TWO_RANKS):
        with ranks_in_threads() as opened, engine_loop(build(tmp_path, **fields)) as loop:
            found = {
                "greedy": run(loop, requests(), at_once=4),
                "sampled": run(loop, requests(0.9)),
                "rejection": run(loop, requests(0.9, is_reproducible=False), at_once=2),
                "few": [run(loop, [request])[0] for request in requests()[2:6]],
            }
            both.append({name: verified(outputs) for name, outputs in found.items()})
            statistics = loop.statistics().scheduler
            assert statistics.num_emitted_by_verify > statistics.num_verify_blocks, "no draft was accepted"
    [ranks] = opened
    assert ranks.num_idle > 0 and ranks.num_mixed > 0
    for name in both[0]:
        assert both[1][name] == both[0][name], name


@pytest.mark.parametrize("make_drafter", [save_eagle3_head, save_dspark_drafter, make_dflash2_drafter])
def test_so_do_drafters_of_other_kinds(tmp_path: Path, make_drafter: Callable[..., Any]) -> None:
    target = make_target(tmp_path / "target", family="qwen3_moe")
    make_drafter(tmp_path / "drafter", target_dir=target)
    both = []
    for fields in ({"tp_size": 1}, TWO_RANKS):
        with ranks_in_threads(), engine_loop(build(tmp_path, **fields)) as loop:
            both.append(verified(run(loop, requests()[:5], at_once=3)))
            assert loop.statistics().scheduler.num_verify_blocks > 0
    assert both[1] == both[0]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    make_pair(root, "deepseek_v3")
    return root


@pytest.fixture(scope="module")
def expected(experts: Path) -> list[Any]:
    with engine_loop(build(experts, tp_size=1)) as loop:
        return verified(run(loop, requests()[:6]))


@pytest.fixture(scope="module")
def two_ranks(experts: Path) -> EngineDir:
    return build(experts, **TWO_RANKS)


@pytest.mark.parametrize(
    ("options", "collectives"),
    [
        ({"overlap_scheduling": True}, "plugin"),
        ({"overlap_scheduling": False, "draft_length": {1: 3, 3: 0}}, "native"),
        ({"deterministic": True}, "plugin"),
        ({"host_cache_bytes": 1 << 20}, "native"),
    ],
    ids=str,
)
def test_no_setting_changes_a_text(
    two_ranks: EngineDir, expected: list[Any], options: dict[str, Any], collectives: str
) -> None:
    with ranks_in_threads(collectives=collectives) as opened, engine_loop(two_ranks, **options) as loop:
        found = verified(run(loop, requests()[:6], at_once=3))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    [ranks] = opened
    assert ranks.most_in_flight == 1 + options.get("overlap_scheduling", False)


def test_log_probabilities_are_those_of_one_rank_whichever_ranks_read_a_prompt(
    experts: Path, two_ranks: EngineDir
) -> None:
    """Prompts of two requests, longer than a step takes, beside requests without."""
    wanted = [
        replace(
            request,
            prompt_token_ids=request.prompt_token_ids * 3,
            sampling=replace(
                request.sampling, logprobs=True, top_logprobs=3, prompt_logprobs=2 if i in (1, 2) else None
            ),
        )
        for i, request in enumerate(requests()[:5])
    ]
    both = []
    for engine in (build(experts, tp_size=1, overwrite=True, max_num_tokens=16), two_ranks):
        with ranks_in_threads(), engine_loop(engine) as loop:
            both.append(run(loop, wanted, at_once=3))
    for one, two in zip(*both, strict=True):
        assert two.token_ids == one.token_ids
        assert bool(two.prompt_logprobs) == (one.request_id in ("1", "2"))
        (token_ids, scores), (expected_ids, expected) = scores_of(two), scores_of(one)
        assert token_ids == expected_ids
        assert scores == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_tensorrt_builds_the_network_of_a_rank(experts: Path, is_deterministic: bool) -> None:
    """On this CPU, with stubs of its plugin nodes."""
    sizes = {"max_batch_size": 2, "max_num_tokens": 16, "max_seq_len": 32, "page_size": 8}
    pair = {"target": "target", "drafter": "drafter", "dtype": "float32", "backend": "tensorrt"}
    config = BuildConfig(**pair, **TWO_RANKS, **sizes, deterministic=is_deterministic)
    built = check_config(config, base_dir=experts).built[0]
    assert built.layer_counts["DIST_COLLECTIVE"] > 0


class _Group:
    """A RankGroup of threads, as far as the check asks."""

    num_ranks = 2

    def __init__(self, threads: rank_networks.RankThreads, rank: int) -> None:
        self._threads, self.rank = threads, rank

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return torch.cat(self._threads.exchange(self.rank, x), 1)


def check(two_ranks: EngineDir) -> list[str]:
    """What each rank complains of when it is opened."""
    opened = open_in_threads(two_ranks, CONFIG)

    def work(rank: int) -> str:
        executor: Any = opened.ranks[rank]
        executor.warm_up()
        check_pages(executor)
        try:
            check_shared_rows(executor, _Group(opened.threads, rank))  # type: ignore[arg-type]
        except EngineDirError as error:
            return str(error)
        return ""

    return opened.threads.run(work)


def test_ranks_that_exchange_pass_the_checks_of_opening(two_ranks: EngineDir) -> None:
    assert check(two_ranks) == ["", ""]


def test_sums_that_do_nothing_are_noticed_on_all_ranks(two_ranks: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank keeps its own part."""
    own = rank_networks._RankInterpreter._own
    monkeypatch.setattr(
        rank_networks._RankInterpreter, "_own", lambda self, found: own(self, [found[self._rank]] * len(found))
    )
    first, second = check(two_ranks)
    assert first == second
    assert "expected target_kv.0 of rank 1 as on rank 0, after the same tokens, found something else" in first
