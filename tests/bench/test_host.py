"""The cost of the host, measured without a device."""

import json
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner

from dflash_trt.bench import host
from dflash_trt.bench.host import measure_host
from dflash_trt.cli.main import cli
from dflash_trt.core.step_plan import KnownStep
from dflash_trt.executor.idle import IdleExecutor
from tests.serving.engines import Clock


@pytest.mark.parametrize("is_chained", [False, True])
def test_every_measured_step_is_one_of_verify_blocks(is_chained):
    report = measure_host(3, num_steps=12, num_draft_tokens=2, num_prompt_tokens=40, is_chained=is_chained)
    assert (report.num_requests, report.num_steps, report.is_chained) == (3, 12, is_chained)
    assert report.between_ms > 0 and report.step_ms > 0
    assert not is_chained or report.between_ms < report.step_ms, "events are made after the next submission"


def test_the_host_of_rank_0_is_measured_beside_its_workers():
    before = psutil.Process().children()
    report = measure_host(2, num_steps=5, num_draft_tokens=2, num_prompt_tokens=9, num_ranks=3)
    assert (report.num_requests, report.num_ranks, report.num_steps) == (2, 3, 5)
    assert 0 < report.between_ms < report.step_ms
    assert psutil.Process().children() == before


def test_times_between_submissions_are_those_of_measured_steps(monkeypatch):
    class Numbered(IdleExecutor):
        """Each time is the number of its step."""

        def submit(self, plan) -> KnownStep:
            self.num_steps = getattr(self, "num_steps", -1) + 1
            before = len(self.between_s)
            step = super().submit(plan)
            self.between_s[before:] = [float(self.num_steps)] * (len(self.between_s) - before)
            return step

    monkeypatch.setattr(host, "IdleExecutor", Numbered)
    report = measure_host(2, num_steps=11, num_draft_tokens=2, num_prompt_tokens=40, is_chained=False)
    assert report.between_ms == 1e3 * (1 + 20 + 5), "after the prompts' step and 20 to warm up the median of 11"


def test_a_step_costs_what_the_loop_takes_without_its_executor(monkeypatch):
    clock, executor = Clock(), SimpleNamespace(own_s=7.0)

    def step():
        clock.now += 5.0
        executor.own_s += 2.0

    monkeypatch.setattr(host.time, "thread_time", clock)
    assert host._step_cost_s(SimpleNamespace(step=step), executor) == 3.0


def test_the_table_has_a_row_for_each_size_and_loop():
    words = ["bench", "host", "--requests", "1", "--requests", "2", "--steps", "5", "--prompt-tokens", "9", "--json"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    rows = [(row["num_requests"], row["is_chained"]) for row in json.loads(result.stdout)["reports"]]
    assert rows == [(1, True), (1, False), (2, True), (2, False)]
