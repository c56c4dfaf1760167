"""What the engine says about its times: which percentile is which, and which requests count."""

import pytest

from dflash_trt.core.request import FinishReason, RequestStatistics, TokenEvent
from dflash_trt.serving.output_processor import Mailbox
from dflash_trt.serving.statistics import Recorder, Samples
from tests.serving.engines import make_loop


def ended(*token_ids: int, reason: FinishReason = "stop") -> Mailbox:
    """A request of 9.5 s whose first token came after 1.5 s; the others came later."""
    mailbox = Mailbox(arrived_s=10.0)
    for ids, now in ((token_ids[:1], 11.5), (token_ids[1:], 12.0)):
        if ids:
            mailbox.put(TokenEvent(request_id="r", token_ids=ids), now)
    statistics = RequestStatistics(queue_time_s=0.25)
    mailbox.put(TokenEvent(request_id="r", token_ids=(), finish_reason=reason, statistics=statistics), 19.5)
    return mailbox


def test_a_percentile_is_the_value_that_so_many_do_not_exceed() -> None:
    samples = Samples()
    for value in range(1000, 0, -1):
        samples.add(value)
    found = samples.distribution()
    assert (found.p50, found.p90, found.p99, found.max) == (500, 900, 990, 1000)
    assert (found.count, found.mean) == (1000, 500.5)
    few = Samples()
    for value in range(1, 8):
        few.add(value)
    found = few.distribution()
    assert (found.p50, found.p90, found.p99) == (4, 7, 7)


def test_percentiles_are_of_recent_values_and_the_rest_is_of_all() -> None:
    samples = Samples()
    samples.add(1e6)
    for _ in range(4096):
        samples.add(1.0)
    found = samples.distribution()
    assert (found.p99, found.max, found.count) == (1.0, 1e6, 4097)
    assert found.mean == pytest.approx((1e6 + 4096) / 4097)


def test_each_time_goes_to_its_own_distribution() -> None:
    recorder = Recorder(100.0)
    recorder.add(ended(1, 2, 3))
    recorder.add_step(0.125, has_failed=True)
    recorder.add_step(None, has_failed=False)
    found = recorder.statistics(103.0, make_loop().statistics().scheduler)
    means = {name: getattr(found, name).mean for name in found.__dataclass_fields__ if name.endswith("_time_s")}
    assert means == {"queue_time_s": 0.25, "request_time_s": 9.5, "step_time_s": 0.125}
    assert found.time_to_first_token_s.mean == 1.5
    assert found.inter_token_latency_s.mean == 4.0
    assert (found.uptime_s, found.num_failed_steps, found.step_time_s.count) == (3.0, 1, 1)
    assert (found.num_requests, found.num_emitted_tokens) == (1, 3)
    assert found.num_requests_by_finish_reason == {"stop": 1}


def test_a_request_without_tokens_has_no_time_to_first_token() -> None:
    recorder = Recorder(0.0)
    recorder.add(ended(reason="timeout"))
    recorder.add(ended(1, 2, 3))
    found = recorder.statistics(1.0, make_loop().statistics().scheduler)
    assert (found.time_to_first_token_s.count, found.time_to_first_token_s.mean) == (1, 1.5)
    assert (found.inter_token_latency_s.count, found.queue_time_s.count) == (1, 2)


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    mailbox = Mailbox(arrived_s=0.0)
    mailbox.put(TokenEvent(request_id="r", token_ids=(1, 2, 3, 4)), 1.0)
    mailbox.cut(3)
    mailbox.put(TokenEvent(request_id="r", token_ids=(5, 6)), 2.0)
    mailbox.put(TokenEvent(request_id="r", token_ids=(), finish_reason="stop"), 3.0)
    recorder = Recorder(0.0)
    recorder.add(mailbox)
    found = recorder.statistics(3.0)
    assert (found.num_emitted_tokens, found.num_requests_by_finish_reason) == (3, {"stop": 1})
