import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import scripts.soak
from dflash_trt.core.batch import RequestResult, StepBatch
from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.tensorrt_llm.engine import URL
from scripts.soak import SoakReport, Traffic, _Sender, _wait_until_idle, soak
from tests.engine_dir.building import build
from tests.factories import make_target, make_zlab_drafter
from tests.fake_executor import FakeExecutor, right_with_probability
from tests.serving.engines import VOCAB_SIZE, GatedExecutor, make_executor, make_generator
from tests.serving.trtllm_server import trtllm_server
from tests.serving.trtllm_stand_in.tensorrt_llm import Model

TRAFFIC = Traffic(duration_s=2.0, mean_gap_s=0.004, max_prompt_tokens=40, max_new_tokens=24)
LIMITS = ExecutorLimits(max_batch_size=8, max_seq_len=96, max_num_tokens=64, max_draft_len=4, page_size=4, num_pages=30)


class Slow(FakeExecutor):
    """Slower than the traffic, so that requests queue, run together and run out of pages."""

    def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
        time.sleep(0.01)
        return super().run_rows(batch)


def test_random_traffic_loses_no_page_and_no_request():
    executor = Slow(LIMITS, vocab_size=VOCAB_SIZE, draft_rule=right_with_probability(0.7))
    with make_generator(executor, max_queue_len=16) as engine:
        report = soak(engine, VOCAB_SIZE, TRAFFIC)
    assert report.num_leaked_pages == 0
    assert sum(report.num_by_outcome.values()) == report.num_sent > 20
    assert report.num_by_outcome["cancelled"] > 0 and report.num_by_outcome["length"] > 0
    assert report.num_preemptions > 0  # otherwise the pages were too many for the test to mean anything
    assert report.prefix_hit_fraction is not None and report.prefix_hit_fraction > 0.1


def test_every_other_interval_is_a_rush():
    with make_generator(make_executor(LIMITS)) as engine:
        sender = _Sender(engine, VOCAB_SIZE, replace(SHORT, rush_s=2.0, mean_gap_s=0.05))
        assert [sender._gap_s(second) for second in (0.0, 1.9, 2.0, 3.9, 4.0)] == [0.05, 0.05, 0.005, 0.005, 0.05]


def test_a_leaked_page_is_noticed():
    with make_generator(make_executor(LIMITS)) as engine:
        store = engine._engine._scheduler._request_pool.store
        store.allocate(1)  # by nobody: it will never be given back
        traffic = Traffic(duration_s=0.1, mean_gap_s=0.01, max_prompt_tokens=20, max_new_tokens=8, drain_timeout_s=2.0)
        with pytest.raises(AssertionError):
            soak(engine, VOCAB_SIZE, traffic)


SHORT = Traffic(
    duration_s=0.2,
    mean_gap_s=0.01,
    max_prompt_tokens=20,
    max_new_tokens=24,
    cancelled_fraction=0.0,
    slow_fraction=0.0,
    forgotten_fraction=0.0,
)


def test_every_token_of_every_request_is_counted(monkeypatch):
    with make_generator(make_executor(LIMITS)) as engine:
        asked, submit = [], engine.submit

        def recorded(prompt, sampling, **options):
            asked.append(sampling.max_new_tokens)
            return submit(prompt, sampling, **options)

        monkeypatch.setattr(engine, "submit", recorded)
        report = soak(engine, VOCAB_SIZE, SHORT)
    assert report.num_by_outcome == {"length": len(asked)}
    assert report.num_output_tokens == sum(asked)


@pytest.mark.parametrize("fraction", ["cancelled_fraction", "forgotten_fraction"])
def test_cancelled_and_forgotten_requests_end_early(fraction):
    executor = Slow(LIMITS, vocab_size=VOCAB_SIZE, draft_rule=right_with_probability(0.0))
    with make_generator(executor) as engine:
        report = soak(engine, VOCAB_SIZE, replace(SHORT, **{fraction: 1.0}))
    assert report.num_by_outcome["cancelled"] > report.num_sent / 4  # some are quicker than their reader


@pytest.mark.parametrize(
    ("count", "said"),
    [
        ("num_arrivals", "arrived"),
        ("num_pages_in_use_now", "1 pages leaked"),
        ("num_window_pages_in_use_now", "1 pages leaked"),
        (None, "by the check"),
    ],
)
def test_whatever_is_lost_is_said(monkeypatch, count, said):
    """The engine reports one too many."""
    read = Generator.statistics.fget

    def wrong(engine):
        found = read(engine)
        return replace(found, scheduler=replace(found.scheduler, **{count: getattr(found.scheduler, count) + 1}))

    def check_integrity(engine):
        raise AssertionError("found by the check")

    with make_generator(make_executor(LIMITS)) as engine:
        if count is None:
            monkeypatch.setattr(Generator, "check_integrity", check_integrity)
        else:
            monkeypatch.setattr(Generator, "statistics", property(wrong))
        with pytest.raises(AssertionError, match=said):
            soak(engine, VOCAB_SIZE, SHORT)


def test_a_request_without_an_outcome_is_missed(monkeypatch):
    monkeypatch.setattr("scripts.soak._Sender._count", lambda *arguments: None)
    with make_generator(make_executor(LIMITS)) as engine, pytest.raises(AssertionError, match=", 0 accounted for"):
        soak(engine, VOCAB_SIZE, SHORT)


def test_a_reader_that_waits_for_ever_is_noticed():
    executor = GatedExecutor(LIMITS, vocab_size=VOCAB_SIZE, draft_rule=right_with_probability(0.7))
    with make_generator(executor) as engine:
        with pytest.raises(AssertionError, match="its request has vanished"):
            soak(engine, VOCAB_SIZE, replace(SHORT, drain_timeout_s=0.1))
        executor.open()


@pytest.mark.parametrize("busy", ["num_running_now", "num_waiting_now", "num_paused_now"])
def test_the_count_waits_for_requests_of_every_state(busy):
    idle = dict.fromkeys(("num_running_now", "num_waiting_now", "num_paused_now"), 0)
    left = [idle | {busy: 1}, idle]

    class Engine:
        @property
        def statistics(self):
            return SimpleNamespace(scheduler=SimpleNamespace(**left.pop(0)))

    _wait_until_idle(Engine(), 5.0)
    assert not left


def test_the_script_keeps_the_memory_small_and_says_what_became_of_every_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(tmp_path / "target")
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target)
    build(tmp_path, tmp_path / "engine", target=str(target), drafter=str(drafter), max_seq_len=96)
    seen: list[Any] = []
    run = scripts.soak.soak

    def watched(llm: LLM, vocab_size: int, traffic: Traffic) -> SoakReport:
        seen.extend((llm.config, llm.limits, traffic.seed))
        short = replace(SHORT, seed=traffic.seed, duration_s=traffic.duration_s, max_new_tokens=24)
        return run(llm, vocab_size, short)

    monkeypatch.setattr(scripts.soak, "soak", watched)
    words = [tmp_path / "engine", "--duration", "0.5", "--traffic-seed", "7", "--num-threads", "1"]
    result = CliRunner().invoke(scripts.soak.main, [*map(str, words)])
    assert result.exit_code == 0, result.output
    config, limits, seed = seen
    assert limits.num_pages * limits.page_size <= 2 * 96 + limits.page_size, "memory for two requests at most"
    assert (config.adaptive_draft_length, config.max_queue_len, config.num_threads, seed) == (True, 64, 1, 7)
    first, second = result.stdout.splitlines()
    assert re.fullmatch(r"\d+ requests in \d+ s: \d+ length(, \d+ stop)?", first)
    assert "tokens, " in second and second.endswith("leaked pages: 0")


def test_an_engine_of_tensorrt_llm_loses_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a running server; its requests have no priorities and its pages are not ours."""
    target = make_target(tmp_path / "target")
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target)
    fields = {"max_seq_len": 256, "dtype": "bfloat16", "backend": "tensorrt_llm"}
    build(tmp_path, tmp_path / "engine", target=str(target), drafter=str(drafter), **fields)
    with trtllm_server(Model(str(tmp_path / "engine/target"), max_draft_len=3), None) as (url, _):
        monkeypatch.setenv(URL, url)
        words = [tmp_path / "engine", "--duration", "1"]
        result = CliRunner().invoke(scripts.soak.main, [*map(str, words), "--json"])
        assert result.exit_code == 0, result.output
        report = SoakReport(**json.loads(result.stdout))
        assert sum(report.num_by_outcome.values()) == report.num_sent > 2 and "error" not in report.num_by_outcome
        assert report.num_by_outcome["cancelled"] > 0 and report.num_leaked_pages is None
        text = CliRunner().invoke(scripts.soak.main, list(map(str, words))).stdout
        assert "pages and preemptions are TensorRT-LLM's own" in text


def test_a_request_that_tensorrt_llm_has_not_ended_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without counts of our scheduler, the engine's own."""
    read = Generator.statistics.fget
    monkeypatch.setattr(
        Generator, "statistics", property(lambda engine: replace(read(engine), scheduler=None, num_requests=0))
    )
    with make_generator(make_executor(LIMITS)) as engine, pytest.raises(AssertionError, match="arrived, 0 finished"):
        soak(engine, VOCAB_SIZE, SHORT)
