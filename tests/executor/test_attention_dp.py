"""Attention data parallelism: ranks with requests of their own give every request what one rank gives it."""

import os
import signal
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.torch.process_group import ProcessRanks
from dflash_trt.bench.throughput import compare_policies
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import ConfigError, RankError
from dflash_trt.core.expert_exchange import exchange_costs, sends_by_counts
from dflash_trt.core.request import GenerationOutput
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.scheduler.data_parallel import DataParallelScheduler
from tests.dflash2_files import make_dflash2_drafter
from tests.executor.attention_dp import engine_loop, requests, run
from tests.executor.rank_engines import build, opened, write_calibration_prompts
from tests.factories import make_speculators_drafter, make_target, make_zlab_drafter
from tests.gemma_targets import EXPERTS, make_gemma
from tests.traces import PROMPTS

_PACKED = {"target": "nvfp4_w4a16", "kv_cache": "fp8", "calibration": {"prompts": "prompts.jsonl"}}
FAMILIES = (
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "llama4_text",
    "minimax_m2",
    "qwen3_5_moe_text",
    "gemma4",
)


def make_pair(root: Path, family: str) -> None:
    if family == "gemma4":
        target = make_gemma(root / "target", family="gemma4_text", **EXPERTS)
    else:
        target = make_target(root / "target", family=family, vocab_size=12, tokenizer=False)  # type: ignore[arg-type]
    make_zlab_drafter(root / "drafter", target_dir=target, intermediate_size=96)


def verified(outputs: list[GenerationOutput]) -> list[Any]:
    """Each request's tokens, and verify step by verify step what was accepted."""
    steps = [
        [
            (event.context_len, event.num_candidates, event.num_accepted)
            for event in output.steps
            if event.num_candidates
        ]
        for output in outputs
    ]
    return [(output.token_ids, of_one) for output, of_one in zip(outputs, steps, strict=True)]


def scores_of(output: GenerationOutput) -> tuple[list[int], list[float]]:
    """Tokens and log probabilities of a text and of its prompt."""
    prompt = [token for token in output.prompt_logprobs or () if token is not None]
    rows = [*output.top_logprobs, *(token.top_logprobs for token in prompt)]
    scored = [(token.token_id, token.logprob) for token in (*prompt, *(top for row in rows for top in row))]
    return [token_id for token_id, _ in scored], [*(score for _, score in scored), *output.logprobs]


def assert_two_ranks_draft_as_one(root: Path, **fields: Any) -> None:
    both = []
    for tp_size, ranks in ((1, {}), (2, {"ep_size": 2, "attention_dp": True})):
        with engine_loop(build(root, tp_size=tp_size, **fields, **ranks)) as loop:
            both.append([verified(run(loop, requests(temperature), at_once=3)) for temperature in (0.0, 0.9)])
            assert loop.statistics().scheduler.num_verify_blocks > 0
    assert both[1] == both[0]


@pytest.fixture(scope="module", params=FAMILIES)
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    make_pair(root, str(request.param))
    return root


def test_two_ranks_give_each_request_what_one_gives(root: Path) -> None:
    """With both samplers, prompts and verify blocks in one step, prefix hits, and steps that are empty on a rank."""
    both, names = [], ("greedy", "sampled", "rejection", "few")
    for tp_size, fields in ((1, {}), (2, {"ep_size": 2, "attention_dp": True})):
        with engine_loop(build(root, tp_size=tp_size, overwrite=True, **fields)) as loop:
            found = {
                "greedy": run(loop, requests(), at_once=4),
                "sampled": run(loop, requests(0.9)),
                "rejection": run(loop, requests(0.9, is_reproducible=False), at_once=2),
                "few": [run(loop, [request])[0] for request in requests()[2:6]],
            }
            both.append({name: verified(outputs) for name, outputs in found.items()})
            statistics = loop.statistics().scheduler
            assert statistics.num_prefix_hit_tokens > 0
            assert statistics.num_emitted_by_verify > statistics.num_verify_blocks, "no draft was accepted"
    for name in names:
        assert both[1][name] == both[0][name], name


@pytest.mark.parametrize("drafter", ["a tied target", "its own vocabulary", "dflash2"])
def test_so_do_drafters_with_tables_of_their_own(tmp_path: Path, drafter: str) -> None:
    tied = {"tie_word_embeddings": True} if drafter == "a tied target" else {}
    target = make_target(tmp_path / "target", family="qwen3_moe", vocab_size=12, tokenizer=False, **tied)
    if drafter == "its own vocabulary":
        make_speculators_drafter(tmp_path / "drafter", target_dir=target, draft_vocab_size=8, has_own_embedding=True)
    else:
        make = make_dflash2_drafter if drafter == "dflash2" else make_zlab_drafter
        make(tmp_path / "drafter", target_dir=target, intermediate_size=96)
    assert_two_ranks_draft_as_one(tmp_path)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    make_pair(root, "deepseek_v3")
    return root


@pytest.fixture(scope="module")
def expected(experts: Path) -> list[Any]:
    with engine_loop(build(experts, tp_size=1, overwrite=True)) as loop:
        return verified(run(loop, requests()))


@pytest.mark.parametrize(("num_ranks", "ep_size"), [(2, 1), (4, 4), (4, 2)])
def test_experts_are_divided_by_number_and_by_columns(
    experts: Path, expected: list[Any], num_ranks: int, ep_size: int
) -> None:
    engine = build(experts, tp_size=num_ranks, ep_size=ep_size, attention_dp=True, overwrite=True)
    with engine_loop(engine) as loop:
        assert verified(run(loop, requests(), at_once=3)) == expected


@pytest.fixture
def counted_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that rank 0, which is this process, gets in exchanges by counts."""
    found: list[int] = []
    exchange = ProcessRanks.all_to_all_by_counts

    def recorded(ranks: ProcessRanks, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        found.append(sum(received))
        return exchange(ranks, x, sent, received)

    monkeypatch.setattr(ProcessRanks, "all_to_all_by_counts", recorded)
    return found


@pytest.mark.parametrize(
    ("family", "num_ranks", "ep_size", "is_counted"),
    [
        ("qwen3_moe", 2, 2, True),
        ("qwen3_moe", 4, 4, True),
        ("qwen3_moe", 4, 2, True),
        ("qwen3_moe", 2, 1, False),
        ("gemma4", 2, 2, True),
        ("glm4_moe", 2, 2, False),
    ],
)
def test_rows_go_to_experts_as_the_rule_says_and_texts_are_those_of_one_rank(
    tmp_path: Path, counted_rows: list[int], family: str, num_ranks: int, ep_size: int, is_counted: bool
) -> None:
    """With prompts of some ranks beside verify blocks of others, and ranks without rows."""
    make_pair(tmp_path, family)
    found = []
    for ranks in ({"tp_size": 1}, {"tp_size": num_ranks, "ep_size": ep_size, "attention_dp": True}):
        assert not counted_rows
        engine = build(tmp_path, **ranks)
        with engine_loop(engine) as loop:
            found.append([verified(run(loop, requests(temperature)[:6], at_once=3)) for temperature in (0.0, 0.9)])
    assert found[1] == found[0]
    target = engine.manifest.pretrained_config.target
    sizes: dict[str, int] = {"hidden_size": target.hidden_size, "itemsize": 4, "ep_size": ep_size}
    [moe] = set(target.moes)
    assert sends_by_counts(moe, exchange_costs(None), num_rows=[1] * num_ranks, **sizes) == is_counted
    assert bool(counted_rows) == is_counted


def test_packed_experts_and_fp8_pages_too(tmp_path: Path) -> None:
    if find_spec("modelopt") is None:
        pytest.skip("modelopt is not installed: scripts/test installs it")
    make_pair(tmp_path, "qwen3_moe")
    write_calibration_prompts(tmp_path)
    both = []
    for tp_size, fields in ((1, {}), (2, {"ep_size": 2, "attention_dp": True})):
        with engine_loop(build(tmp_path, tp_size=tp_size, quantization=_PACKED, **fields)) as loop:
            both.append(verified(run(loop, requests(), at_once=3)))
    assert both[0] == both[1]


@pytest.fixture(scope="module")
def two_ranks(experts: Path) -> EngineDir:
    return build(experts, tp_size=2, ep_size=2, attention_dp=True, overwrite=True)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_scheduling": True},
        {"adaptive_draft_length": True, "draft_length": None},
        {"draft_length": {1: 3, 3: 0}},
        {"ngram": True},
        {"host_cache_bytes": 1 << 20},
        {"deterministic": True},
    ],
    ids=", ".join,
)
def test_no_setting_changes_a_text(two_ranks: EngineDir, expected: list[Any], options: dict[str, Any]) -> None:
    with engine_loop(two_ranks, **options) as loop:
        found = verified(run(loop, requests(), at_once=3))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_a_rank_that_runs_out_of_pages_preempts_its_own_requests(two_ranks: EngineDir, expected: list[Any]) -> None:
    """18 pages of 4 tokens a rank hold one sequence of max_seq_len."""
    page_bytes = 4 * two_ranks.manifest.pretrained_config.states().bytes_per_token
    with engine_loop(two_ranks, kv_cache_bytes=18 * page_bytes, enable_prefix_caching=False) as loop:
        assert loop.page_plan.num_pages == 18
        found = verified(run(loop, requests()))
        assert loop.statistics().scheduler.num_preemptions > 0
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_two_ranks_hold_twice_the_tokens_of_one(experts: Path, two_ranks: EngineDir) -> None:
    """Latents are whole on each rank: four that divide attention hold less than two with requests of their own."""
    tokens = {}
    engines = {"one": build(experts, tp_size=1, overwrite=True), "own": two_ranks}
    engines["divided"] = build(experts, tp_size=4, ep_size=4, overwrite=True)
    for name, engine in engines.items():
        with engine_loop(engine, kv_cache_bytes=100 << 10) as loop:
            tokens[name] = loop.limits.num_pages * loop.limits.page_size
            assert loop.limits.max_batch_size == (16 if name == "own" else 8)
    assert tokens["own"] == 2 * tokens["one"] > tokens["divided"]


def test_log_probabilities_are_those_of_one_rank_whichever_ranks_read_a_prompt(
    experts: Path, two_ranks: EngineDir
) -> None:
    """Prompts of three requests, longer than a step takes, beside requests without."""
    wanted = [
        replace(
            request,
            prompt_token_ids=request.prompt_token_ids * 3,
            sampling=replace(
                request.sampling, logprobs=True, top_logprobs=3, prompt_logprobs=2 if i in (1, 2, 6) else None
            ),
        )
        for i, request in enumerate(requests())
    ]
    both = []
    for engine in (build(experts, tp_size=1, overwrite=True, max_num_tokens=16), two_ranks):
        with engine_loop(engine) as loop:
            both.append(run(loop, wanted, at_once=3))
    for one, two in zip(*both, strict=True):
        assert two.token_ids == one.token_ids
        assert bool(two.prompt_logprobs) == (one.request_id in ("1", "2", "6"))
        (token_ids, scores), (expected_ids, expected) = scores_of(two), scores_of(one)
        assert token_ids == expected_ids
        assert scores == pytest.approx(expected, abs=1e-4)


def test_logits_are_those_of_one_rank(experts: Path, two_ranks: EngineDir) -> None:
    with opened(build(experts, tp_size=1, overwrite=True)) as one:
        expected_logits = one.target_logits(PROMPTS[1])
    with opened(two_ranks) as two:
        torch.testing.assert_close(two.target_logits(PROMPTS[1]), expected_logits, rtol=0, atol=1e-4)


def test_a_rank_that_dies_fails_what_ran_on_all_and_the_engine_opens_again(
    two_ranks: EngineDir, expected: list[Any]
) -> None:
    with engine_loop(two_ranks, draft_length=0) as loop:
        streams = [loop.submit(request) for request in requests()]
        for _ in range(3):
            loop.step()
        [process_id] = loop._executor.worker_process_ids  # type: ignore[attr-defined]
        os.kill(process_id, signal.SIGKILL)
        while loop.step():
            loop.check_integrity()
        reasons = [stream.result(timeout_s=1).finish_reason for stream in streams]
        assert "error" in reasons and set(reasons) <= {"error", "length"}
        found = verified(run(loop, requests()))
        assert loop._executor.worker_process_ids != (process_id,)  # type: ignore[attr-defined]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_an_error_on_one_rank_ends_the_step_on_all(two_ranks: EngineDir) -> None:
    with opened(two_ranks) as executor:
        scheduler = DataParallelScheduler(executor.limits, num_ranks=2)
        for request in requests()[:4]:
            scheduler.add(request)
        step = scheduler.plan()
        vars(executor._local).pop("_inputs")
        with pytest.raises(RankError, match="rank 0 of 2 failed: AttributeError"):
            executor.submit(step.plan).result()
        assert not executor.can_retry


def test_prefixes_on_disk_are_any_ranks(two_ranks: EngineDir, expected: list[Any], tmp_path: Path) -> None:
    """Another engine with the same directory computes no prompt that the first one has written."""
    disk = {"host_cache_bytes": 1 << 20, "disk_cache_dir": str(tmp_path), "publish_prompts": True}
    with engine_loop(two_ranks, **disk) as loop:
        found = verified(run(loop, requests()))
        while not loop.has_kept([b"no block"]):  # nor anything on its way
            loop.step()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    turned = requests()[::-1]
    with engine_loop(two_ranks, **disk) as loop:
        found = verified(run(loop, turned, at_once=1))
        assert all(rank.statistics().num_loaded_blocks for rank in loop._scheduler.ranks)  # type: ignore[attr-defined]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected[::-1]]


def test_bench_throughput_compares_k_of_all_ranks(two_ranks: EngineDir) -> None:
    [report] = compare_policies(
        two_ranks.path,
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        concurrencies=[3],
        fixed_lengths=[0, 3],
        num_rounds=1,
        requests_per_client=2,
        max_new_tokens=8,
        config=RuntimeConfig(device="cpu", num_threads=1, kv_cache_bytes=1 << 20),
        progress=lambda *_: None,
    )
    lengths = {speed.policy: speed.acceptance_length for speed in report.speeds}
    assert lengths.keys() == {"K = 0", "K = 3", "adaptive"}
    assert lengths["K = 3"] is not None and lengths["K = 3"] > 1, "no draft was accepted"


def test_what_ranks_with_requests_of_their_own_do_not_have_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="attention_dp needs several ranks"):
        BuildConfig(target="target", attention_dp=True)
    with pytest.raises(ValueError, match="attention_dp needs backend torch or tensorrt; TensorRT-LLM"):
        BuildConfig(target="target", tp_size=2, attention_dp=True, backend="tensorrt_llm")
    make_target(tmp_path / "target", family="qwen3", vocab_size=12, tokenizer=False)
    with pytest.raises(ConfigError, match="attention_dp: expected a target with experts"):
        build(tmp_path, tp_size=2, attention_dp=True, drafter=None)
