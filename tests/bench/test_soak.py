import time

import pytest

from dflash_trt.bench.soak import Traffic, soak
from dflash_trt.core.batch import ExecutorLimits, StepBatch, StepResult
from dflash_trt.executor.fake import FakeExecutor, right_with_probability
from tests.serving.engines import VOCAB_SIZE, make_executor, make_generator

TRAFFIC = Traffic(duration_s=2.0, mean_gap_s=0.004, max_prompt_tokens=40, max_new_tokens=24)
LIMITS = ExecutorLimits(max_batch_size=8, max_seq_len=96, max_num_tokens=64, max_draft_len=4, page_size=4, num_pages=30)


class Slow(FakeExecutor):
    """Slower than the traffic, so that requests queue, run together and run out of pages."""

    def step(self, batch: StepBatch) -> StepResult:
        time.sleep(0.004)
        return super().step(batch)


def test_random_traffic_loses_no_page_and_no_request():
    executor = Slow(LIMITS, vocab_size=VOCAB_SIZE, draft_rule=right_with_probability(0.7))
    with make_generator(executor, max_queue_len=16) as engine:
        report = soak(engine, VOCAB_SIZE, TRAFFIC)
    assert report.num_leaked_pages == 0
    assert sum(report.num_by_outcome.values()) == report.num_sent > 50
    assert report.num_by_outcome["cancelled"] > 0 and report.num_by_outcome["length"] > 0
    assert report.num_preemptions > 0  # otherwise the pages were too many for the test to mean anything
    assert report.prefix_hit_fraction is not None and report.prefix_hit_fraction > 0.1


def test_a_leaked_page_is_noticed():
    with make_generator(make_executor(LIMITS)) as engine:
        store = engine._loop._scheduler._roster.store
        store.allocate(1)  # by nobody: it will never be given back
        traffic = Traffic(duration_s=0.1, mean_gap_s=0.01, max_prompt_tokens=20, max_new_tokens=8, drain_timeout_s=2.0)
        with pytest.raises(AssertionError):
            soak(engine, VOCAB_SIZE, traffic)
