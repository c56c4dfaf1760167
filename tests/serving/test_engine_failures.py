"""Failing steps, poisoned requests, bugs, cancellations: who is hurt, and who is not."""

import gc
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dflash_trt.core.batch import RequestResult, StepBatch
from dflash_trt.core.errors import RequestError
from dflash_trt.core.request import GenerationOutput
from dflash_trt.core.step_plan import FinishedStep, StepPlan
from dflash_trt.serving.engine_loop import EngineLoop
from tests.fake_executor import FakeExecutor, result_of
from tests.scheduler.driver import expected_tokens, make_limits, make_request
from tests.serving.engines import WAIT_S, make_executor, make_loop, run


def poisons(*request_ids: str) -> Any:
    """A failure of every step that has one of these requests."""
    return lambda batch: any(row.request_id in request_ids for row in batch.requests)


@pytest.mark.parametrize("repetition_penalty", [1.0, 2.0])
def test_a_step_that_fails_fails_only_the_request_that_cannot_be_computed(
    overlaps: bool, repetition_penalty: float
) -> None:
    executor = make_executor(fails_on=poisons("r2"))
    loop = make_loop(executor, overlaps=overlaps)
    requests = [
        make_request(f"r{i}", range(i, i + 5), max_new_tokens=20, repetition_penalty=repetition_penalty)
        for i in range(4)
    ]
    streams = [loop.submit(request) for request in requests]
    run(loop)
    for request, stream in zip(requests, streams, strict=True):
        output = stream.result()
        if request.request_id == "r2":
            assert output.finish_reason == "error"
            assert output.error == "RuntimeError: the device failed on command"
        else:
            assert list(output.token_ids) == expected_tokens(executor, request)
    assert loop.statistics().num_failed_steps == 1
    loop.close()


def test_a_request_may_turn_poisonous_in_the_middle(overlaps: bool) -> None:
    def fails(batch: StepBatch) -> bool:
        return any(row.request_id == "bad" and row.context_len > 12 for row in batch.requests)

    executor = make_executor(fails_on=fails)
    loop = make_loop(executor, overlaps=overlaps)
    requests = [make_request(name, range(6), max_new_tokens=25) for name in ("good", "bad", "fine")]
    streams = {request.request_id: loop.submit(request) for request in requests}
    run(loop)
    bad = streams["bad"].result()
    right = expected_tokens(executor, requests[1])
    assert bad.finish_reason == "error"
    assert 0 < len(bad.token_ids) < len(right)
    assert list(bad.token_ids) == right[: len(bad.token_ids)]
    for name in ("good", "fine"):
        assert list(streams[name].result().token_ids) == right
    loop.close()


def test_the_engine_serves_on_after_a_step_in_which_everything_failed(overlaps: bool) -> None:
    is_broken = True
    executor = make_executor(fails_on=lambda batch: is_broken)
    loop = make_loop(executor, overlaps=overlaps)
    streams = [loop.submit(make_request(f"r{i}")) for i in range(3)]
    run(loop)
    assert [stream.result().finish_reason for stream in streams] == ["error"] * 3
    is_broken = False
    request = make_request("later")
    stream = loop.submit(request)
    run(loop)
    assert list(stream.result().token_ids) == expected_tokens(executor, request)
    loop.close()


def test_a_failure_that_does_not_come_back_costs_nobody_anything(overlaps: bool) -> None:
    failures = [True, False]
    executor = make_executor(fails_on=lambda batch: len(batch.requests) > 1 and failures.pop(0) if failures else False)
    loop = make_loop(executor, overlaps=overlaps)
    requests = [make_request(f"r{i}", range(i + 1)) for i in range(3)]
    streams = [loop.submit(request) for request in requests]
    run(loop)
    for request, stream in zip(requests, streams, strict=True):
        assert list(stream.result().token_ids) == expected_tokens(executor, request)
    loop.close()


def test_tokens_that_cannot_be_made_text_fail_their_request_only() -> None:
    class Broken:
        def push(self, token_ids: Sequence[int]) -> str:
            raise ValueError("no such piece")

        def held(self) -> str:
            return ""

        def flush(self) -> str:
            raise ValueError("no such piece")

    executor = make_executor()
    loop = make_loop(executor)
    logging.disable(logging.CRITICAL)
    request = make_request("good")
    bad, good = loop.submit(make_request("bad"), Broken()), loop.submit(request)
    run(loop, reads=[bad])
    logging.disable(logging.NOTSET)
    assert bad.result().finish_reason == "error"
    assert bad.result().error == "ValueError: no such piece"
    assert loop.statistics().num_requests_by_finish_reason == {"error": 1, "length": 1}
    assert list(good.result().token_ids) == expected_tokens(executor, request)


class BrokenExecutor(FakeExecutor):
    """Answers with too few rows, which no executor may: a bug, not a failing device."""

    def submit(self, plan: StepPlan) -> FinishedStep:
        return FinishedStep(lambda: result_of((), num_draft_tokens=plan.rows.num_draft_tokens))


def test_a_bug_that_kills_the_loop_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    loop = EngineLoop(BrokenExecutor(make_limits()))
    stream = loop.submit(make_request("r"))
    loop.start()
    output = stream.result(WAIT_S)
    assert output.finish_reason == "error"
    assert output.error is not None and output.error.startswith("the engine stopped: ValueError")
    assert "the engine loop died" in caplog.text
    with pytest.raises(RequestError, match="expected an open engine, found a closed one"):
        loop.submit(make_request("next"))
    loop.close()


def test_a_malformed_result_fails_its_request_alone() -> None:
    class Careless(FakeExecutor):
        def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
            rows = zip(batch.requests, super().run_rows(batch), strict=True)
            return tuple(
                replace(result, next_context_len=0) if row.request_id == "bad" else result for row, result in rows
            )

    executor = Careless(make_limits())
    loop = make_loop(executor)
    request = make_request("good")
    bad, good = loop.submit(make_request("bad")), loop.submit(request)
    run(loop)
    assert bad.result().finish_reason == "error" and "step contract" in str(bad.result().error)
    assert list(good.result().token_ids) == expected_tokens(executor, request)


# Cancellation and departure


def test_a_cancelled_request_keeps_what_it_had(overlaps: bool) -> None:
    executor = make_executor(right=0.0)
    loop = make_loop(executor, overlaps=overlaps)
    request = make_request("r", max_new_tokens=40)
    stream = loop.submit(request)
    for _ in range(6):
        loop.step()
    loop.cancel("r")
    loop.check_integrity()
    output = stream.result()
    assert output.finish_reason == "cancelled"
    assert 0 < len(output.token_ids) < 40
    assert list(output.token_ids) == expected_tokens(executor, request)[: len(output.token_ids)]
    run(loop)
    assert loop.statistics().scheduler.num_pages_in_use_now == 0
    loop.close()


def test_cancelling_twice_or_after_the_end_does_nothing() -> None:
    loop = make_loop()
    stream = loop.submit(make_request("r"))
    run(loop)
    stream.cancel()
    loop.cancel("r")
    loop.cancel("unknown")
    assert stream.result().finish_reason == "length"


def test_an_old_stream_does_not_cancel_a_new_request_of_the_same_id() -> None:
    loop = make_loop()
    old = loop.submit(make_request("r"))
    run(loop)
    new = loop.submit(make_request("r"))
    old.cancel()
    del old
    gc.collect()
    run(loop)
    assert new.result().finish_reason == "length"


def test_a_failed_step_does_not_end_a_later_request_of_the_same_id() -> None:
    later: list[Any] = []

    def fails(batch: StepBatch) -> bool:
        is_bad = any(row.token_ids[0] == 9 for row in batch.requests)
        if is_bad and not later:  # its client leaves while the step runs, and comes again
            loop.cancel("r")
            later.append(loop.submit(make_request("r", range(5), max_new_tokens=8)))
        return is_bad

    executor = make_executor(fails_on=fails)
    loop = make_loop(executor)
    stream = loop.submit(make_request("r", [9, 1, 2], max_new_tokens=8))
    run(loop)
    assert stream.result().finish_reason == "cancelled"
    request = make_request("r", range(5), max_new_tokens=8)
    assert list(later[0].result().token_ids) == expected_tokens(executor, request)
    loop.close()


def test_a_forgotten_stream_ends_its_request() -> None:
    loop = make_loop()
    loop.submit(make_request("r", max_new_tokens=50))
    gc.collect()
    run(loop)
    assert loop.statistics().scheduler.num_finished == {"cancelled": 1}


def test_a_callback_may_submit_and_cancel() -> None:
    executor = make_executor()
    loop = make_loop(executor)
    follow_ups = []

    def follow_up(output: GenerationOutput) -> None:
        loop.cancel("other")
        follow_ups.append(loop.submit(make_request("next", output.token_ids[:5])))

    other = loop.submit(make_request("other", max_new_tokens=60))
    loop.submit(make_request("first", max_new_tokens=6)).call_when_done(follow_up)
    first = loop.submit(make_request("kept", max_new_tokens=6))
    first.call_when_done(follow_up)
    run(loop)
    assert other.result().finish_reason == "cancelled"
    assert [stream.result().finish_reason for stream in follow_ups] == ["length"]


def test_a_callback_that_raises_does_not_stop_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    loop = make_loop()
    stream = loop.submit(make_request("r"))
    stream.call_when_done(lambda output: 1 / 0)  # type: ignore[arg-type, return-value]
    run(loop)
    assert stream.result().finish_reason == "length"
    assert "a callback of request r failed" in caplog.text


# A device that is lost

ROOMY = make_limits(num_pages=200)  # so that nobody is preempted


class Mortal(FakeExecutor):
    """A GPU: it fails on command, and nothing runs after that."""

    can_retry = False

    def __init__(self, *, num_steps: int, has_queue: bool = False) -> None:
        super().__init__(ROOMY, vocab_size=420)
        self._num_steps = num_steps
        self.has_queue = has_queue

    def submit(self, plan: StepPlan) -> FinishedStep:
        self._num_steps -= 1
        if self._num_steps < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().submit(plan)


@pytest.mark.parametrize("has_queue", [False, True])
def test_a_lost_device_fails_what_ran_and_the_engine_reopens_for_those_that_wait(
    overlaps: bool, has_queue: bool
) -> None:
    opened = []

    def reopen() -> FakeExecutor:
        opened.append(make_executor(ROOMY))
        return opened[-1]

    threads = set(threading.enumerate())
    loop = EngineLoop(Mortal(num_steps=4, has_queue=has_queue), overlaps=overlaps, reopen=reopen)
    requests = [make_request(f"r{i}", range(i, i + 5), max_new_tokens=40) for i in range(6)]  # 4 run, 2 wait
    streams = [loop.submit(request) for request in requests]
    run(loop)
    for request, stream in zip(requests, streams, strict=True):
        output, right = stream.result(), expected_tokens(make_executor(ROOMY), request)
        is_lost = request.request_id in ("r0", "r1", "r2", "r3")
        assert output.finish_reason == ("error" if is_lost else "length")
        assert list(output.token_ids) == right[: len(output.token_ids)]
        assert not is_lost or "CUDA error: an illegal memory access" in str(output.error)
    assert len(opened) == 1 and loop.failure is None
    assert loop.statistics().num_failed_steps == 1
    later = make_request("later", range(9))
    stream = loop.submit(later)
    run(loop)
    assert list(stream.result().token_ids) == expected_tokens(make_executor(ROOMY), later)
    assert loop.statistics().scheduler.num_pages_in_use_now == 0
    loop.close()
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("can_reopen", [False, True])
def test_an_engine_that_cannot_be_opened_again_says_why_to_everybody(overlaps: bool, can_reopen: bool) -> None:
    def reopen() -> FakeExecutor:
        raise RuntimeError("CUDA error: unspecified launch failure")

    loop = EngineLoop(Mortal(num_steps=3), overlaps=overlaps, reopen=reopen if can_reopen else None)
    streams = [loop.submit(make_request(f"r{i}", max_new_tokens=40)) for i in range(6)]
    logging.disable(logging.CRITICAL)
    run(loop)
    logging.disable(logging.NOTSET)
    for stream in streams:
        assert stream.result().finish_reason == "error"
        assert "an illegal memory access" in str(stream.result().error)
    assert loop.failure is not None and ("unspecified launch failure" in loop.failure) == can_reopen
    with pytest.raises(RequestError, match=r"expected one that runs, found the device is lost: .*illegal"):
        loop.submit(make_request("next"))
    loop.close()


def test_an_engine_opened_again_with_other_limits_serves_no_more() -> None:
    """What waits was admitted, and its pages counted, by the limits of before."""
    loop = EngineLoop(Mortal(num_steps=1), reopen=lambda: make_executor(replace(ROOMY, num_pages=ROOMY.num_pages - 1)))
    stream = loop.submit(make_request("r", max_new_tokens=40))
    logging.disable(logging.CRITICAL)
    run(loop)
    logging.disable(logging.NOTSET)
    assert stream.result().finish_reason == "error"
    assert loop.failure is not None and "opened again, its limits are" in loop.failure
    loop.close()
