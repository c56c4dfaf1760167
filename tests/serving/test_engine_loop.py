"""The loop that serves, with and without a thread, plain and overlapped."""

import gc
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.core.batch import RequestResult, StepBatch, StepResult
from dflash_trt.core.errors import QueueFullError, RequestError
from dflash_trt.core.request import GenerationOutput
from dflash_trt.executor.fake import FakeExecutor
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.text import TextCodec
from tests.scheduler.driver import expected_tokens, make_limits, make_request
from tests.serving.engines import VOCAB_SIZE, Clock, GatedExecutor, make_codec, make_executor, make_loop, run

WAIT_S = 60.0


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return make_codec(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def loops() -> Iterator[list[EngineLoop]]:
    """Loops put here are shut down at the end of the test."""
    opened: list[EngineLoop] = []
    yield opened
    for loop in opened:
        loop.shutdown()


def poisons(*request_ids: str) -> Any:
    """A failure of every step that has one of these requests."""
    return lambda batch: any(row.request_id in request_ids for row in batch.requests)


def test_requests_get_their_tokens(overlaps: bool) -> None:
    executor = make_executor()
    loop = make_loop(executor, overlaps=overlaps)
    requests = [make_request(f"r{i}", range(1, 3 + 5 * i), max_new_tokens=3 * i + 1) for i in range(8)]
    streams = [loop.submit(request) for request in requests]
    run(loop)
    for request, stream in zip(requests, streams, strict=True):
        output = stream.result()
        assert list(output.token_ids) == expected_tokens(executor, request)
        assert output.finish_reason == "length"
    loop.shutdown()


def test_the_overlapped_loop_plans_before_the_running_step_is_over(loops: list[EngineLoop]) -> None:
    executor = GatedExecutor(make_limits(), vocab_size=VOCAB_SIZE)
    scheduler = Scheduler(executor.limits)
    loop = EngineLoop(executor, scheduler, overlaps=True)
    loops.append(loop)
    stream = loop.submit(make_request("r", max_new_tokens=30))
    loop.start()
    assert executor.entered.wait(WAIT_S)
    until(lambda: len(scheduler._flights) == 2)
    executor.open()
    assert stream.result(WAIT_S).finish_reason == "length"


def test_a_stop_string_ends_the_request_and_frees_its_pages(codec: TextCodec, overlaps: bool) -> None:
    executor = make_executor()
    loop = make_loop(executor, overlaps=overlaps)
    plain = loop.submit(make_request("plain", max_new_tokens=40), codec.detokenizer())
    run(loop)
    text = plain.result().text
    assert text is not None
    stop = next(text[i : i + 2] for i in range(8, len(text)) if "\N{REPLACEMENT CHARACTER}" not in text[i : i + 2])
    stream = loop.submit(make_request("r", max_new_tokens=40, stop=(stop,)), codec.detokenizer())
    run(loop)
    output = stream.result()
    assert output.text == text.split(stop)[0]
    assert output.finish_reason == "stop"
    assert output.token_ids == plain.result().token_ids[: len(output.token_ids)]
    assert len(output.token_ids) < 40
    assert loop.statistics().scheduler.num_finished == {"length": 1, "stop": 1}
    loop.shutdown()


# Failures


def test_a_step_that_fails_fails_only_the_request_that_cannot_be_computed(overlaps: bool) -> None:
    executor = make_executor(fails_on=poisons("r2"))
    loop = make_loop(executor, overlaps=overlaps)
    requests = [make_request(f"r{i}", range(i, i + 5), max_new_tokens=20) for i in range(4)]
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
    loop.shutdown()


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
    loop.shutdown()


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
    loop.shutdown()


def test_a_failure_that_does_not_come_back_costs_nobody_anything(overlaps: bool) -> None:
    failures = [True, False]
    executor = make_executor(fails_on=lambda batch: len(batch.requests) > 1 and failures.pop(0) if failures else False)
    loop = make_loop(executor, overlaps=overlaps)
    requests = [make_request(f"r{i}", range(i + 1)) for i in range(3)]
    streams = [loop.submit(request) for request in requests]
    run(loop)
    for request, stream in zip(requests, streams, strict=True):
        assert list(stream.result().token_ids) == expected_tokens(executor, request)
    loop.shutdown()


def test_tokens_that_cannot_be_made_text_fail_their_request_only() -> None:
    class Broken:
        def push(self, token_id: int) -> str:
            raise ValueError("no such piece")

        def flush(self) -> str:
            raise ValueError("no such piece")

    executor = make_executor()
    loop = make_loop(executor)
    logging.disable(logging.CRITICAL)
    request = make_request("good")
    bad, good = loop.submit(make_request("bad"), Broken()), loop.submit(request)
    run(loop)
    logging.disable(logging.NOTSET)
    assert bad.result().finish_reason == "error"
    assert bad.result().error == "ValueError: no such piece"
    assert list(good.result().token_ids) == expected_tokens(executor, request)


class BrokenExecutor(FakeExecutor):
    """Answers with too few rows, which no executor may: a bug, not a failing device."""

    def step(self, batch: StepBatch) -> StepResult:
        return StepResult(requests=())


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
    loop.shutdown()


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
    loop.shutdown()


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


# Readers


def test_a_reader_that_does_not_read_gives_its_place_to_others(overlaps: bool) -> None:
    executor = make_executor(make_limits(max_batch_size=1), right=0.0)
    loop = make_loop(executor, overlaps=overlaps)
    slow_request = make_request("slow", max_new_tokens=30)
    slow = loop.submit(slow_request, max_pending_tokens=4)
    other = loop.submit(make_request("other"))
    run(loop)
    assert other.result().finish_reason == "length"
    assert not slow.is_done
    assert loop.statistics().scheduler.num_parked_now == 1
    tokens: list[int] = []
    while not slow.is_done:
        chunk = slow.take()
        assert chunk is not None and len(chunk.token_ids) <= 6
        tokens += chunk.token_ids
        run(loop)
    tokens += [token for chunk in slow for token in chunk.token_ids]
    assert tokens == expected_tokens(executor, slow_request)
    loop.shutdown()


def test_a_reader_gone_for_too_long_ends_its_request() -> None:
    clock = Clock()
    loop = make_loop(clock=clock, max_parked_s=5.0)
    stream = loop.submit(make_request("r", max_new_tokens=50), max_pending_tokens=2)
    run(loop)
    clock.now += 5.0
    run(loop)
    chunk = stream.take()
    assert chunk is not None and chunk.finish_reason == "timeout"
    assert chunk.output is not None and "expected a reader that takes its tokens within 5.0 s" in str(
        chunk.output.error
    )
    loop.check_integrity()


def test_waiting_too_long_in_the_queue_is_told() -> None:
    clock = Clock()
    loop = make_loop(make_executor(make_limits(max_batch_size=1)), clock=clock)
    first = loop.submit(make_request("first", max_new_tokens=60))
    waiting = loop.submit(make_request("waiting", queue_timeout_s=1.0))
    loop.step()
    clock.now += 1.0
    run(loop)
    assert waiting.result().finish_reason == "timeout"
    assert waiting.result().statistics.queue_time_s == 1.0
    assert first.result().finish_reason == "length"


def test_a_full_queue_refuses_the_newcomer_only() -> None:
    loop = make_loop(max_queue_len=1)
    stream = loop.submit(make_request("a"))
    with pytest.raises(QueueFullError):
        loop.submit(make_request("b"))
    run(loop)
    assert stream.result().finish_reason == "length"


# Threads


def until(is_true: Any) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)


def test_many_threads_submit_read_and_cancel_at_once(overlaps: bool, loops: list[EngineLoop]) -> None:
    executor = make_executor(make_limits(num_pages=16))
    loop = make_loop(executor, overlaps=overlaps, clock=time.monotonic)
    loops.append(loop)
    loop.start()
    problems: list[str] = []

    def client(number: int) -> None:
        for turn in range(6):
            request = make_request(f"{number}-{turn}", range(1 + (number + turn) % 9), max_new_tokens=5 + turn)
            stream = loop.submit(request)
            if (number + turn) % 4 == 0:
                stream.cancel()
            output = stream.result(WAIT_S)
            right = expected_tokens(executor, request)
            if list(output.token_ids) != right[: len(output.token_ids)]:
                problems.append(f"{request.request_id}: wrong tokens")
            if output.finish_reason == "length" and len(output.token_ids) != len(right):
                problems.append(f"{request.request_id}: tokens lost")
            if output.finish_reason not in ("length", "cancelled"):
                problems.append(f"{request.request_id}: {output.finish_reason} {output.error}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert problems == []
    until(lambda: not loop._scheduler.has_work)
    loop.check_integrity()
    assert loop.statistics().num_requests == 36
    assert loop.statistics().scheduler.num_pages_in_use_now == 0


def test_submitting_does_not_wait_for_the_device(loops: list[EngineLoop]) -> None:
    executor = GatedExecutor(make_limits(), vocab_size=VOCAB_SIZE)
    loop = EngineLoop(executor)
    loops.append(loop)
    loop.start()
    first = loop.submit(make_request("first"))
    assert executor.entered.wait(WAIT_S)
    second = loop.submit(make_request("second"))  # the device is busy all the while
    second.cancel()
    assert second.result(WAIT_S).finish_reason == "cancelled"
    executor.open()
    assert first.result(WAIT_S).finish_reason == "length"


def test_an_idle_engine_wakes_up_for_a_request(overlaps: bool, loops: list[EngineLoop]) -> None:
    loop = make_loop(overlaps=overlaps)
    loops.append(loop)
    loop.start()
    for turn in range(20):
        assert loop.submit(make_request(f"r{turn}", max_new_tokens=2)).result(WAIT_S).finish_reason == "length"


def test_a_parked_request_of_a_forgotten_stream_is_found_while_idle(loops: list[EngineLoop]) -> None:
    loop = make_loop()
    loops.append(loop)
    stream = loop.submit(make_request("r", max_new_tokens=50), max_pending_tokens=2)
    loop.start()
    until(lambda: loop.statistics().scheduler.num_parked_now == 1)
    del stream
    gc.collect()
    until(lambda: loop.statistics().scheduler.num_finished == {"cancelled": 1})


# Shutting down


@pytest.mark.parametrize("has_thread", [False, True], ids=["stepped", "threaded"])
def test_shutdown_cancels_what_runs(overlaps: bool, has_thread: bool) -> None:
    loop = make_loop(make_executor(right=0.0), overlaps=overlaps)
    streams = [loop.submit(make_request(f"r{i}", max_new_tokens=50)) for i in range(6)]
    if has_thread:
        loop.start()
    loop.shutdown()
    assert {stream.result(WAIT_S).finish_reason for stream in streams} <= {"cancelled", "length"}
    with pytest.raises(RequestError, match="an open engine"):
        loop.submit(make_request("late"))
    loop.shutdown()


@pytest.mark.parametrize("has_thread", [False, True], ids=["stepped", "threaded"])
def test_draining_lets_everybody_finish(overlaps: bool, has_thread: bool) -> None:
    loop = make_loop(overlaps=overlaps)
    streams = [loop.submit(make_request(f"r{i}")) for i in range(6)]
    if has_thread:
        loop.start()
    loop.shutdown(drains=True)
    assert [stream.result(WAIT_S).finish_reason for stream in streams] == ["length"] * 6
    loop.shutdown()


def test_draining_is_bounded() -> None:
    executor = GatedExecutor(make_limits(), vocab_size=VOCAB_SIZE)
    loop = EngineLoop(executor)
    stream = loop.submit(make_request("r"))
    loop.start()
    assert executor.entered.wait(WAIT_S)
    threading.Timer(0.2, executor.open).start()
    loop.shutdown(drains=True, timeout_s=0.05)
    assert stream.result(WAIT_S).finish_reason == "cancelled"


# Statistics


def test_statistics_tell_times_and_counts() -> None:
    clock = Clock()

    class SlowExecutor(FakeExecutor):
        def step(self, batch: StepBatch) -> StepResult:
            clock.now += 0.5
            return super().step(batch)

    executor = SlowExecutor(make_limits(max_batch_size=1))
    loop = make_loop(executor, clock=clock)
    streams = [loop.submit(make_request(f"r{i}", max_new_tokens=7)) for i in range(2)]
    run(loop)
    outputs = [stream.result() for stream in streams]
    assert [output.time_to_first_token_s for output in outputs] == [0.5, 1.5]
    assert [output.statistics.queue_time_s for output in outputs] == [0.0, 1.0]
    statistics = loop.statistics()
    assert statistics.num_requests_by_finish_reason == {"length": 2}
    assert statistics.num_emitted_tokens == 14
    assert statistics.queue_time_s.mean == 0.5 and statistics.queue_time_s.max == 1.0
    assert statistics.time_to_first_token_s.p50 == 0.5 and statistics.time_to_first_token_s.p99 == 1.5
    assert statistics.inter_token_latency_s.mean == pytest.approx(0.5 / 6)
    assert statistics.step_time_s.count == statistics.scheduler.num_steps == 4
    assert statistics.uptime_s == 2.0
    assert statistics.as_dict()["scheduler"]["acceptance_length"] == 6.0


def test_statistics_of_an_unused_engine_are_empty() -> None:
    statistics = make_loop().statistics()
    assert statistics.num_requests == 0
    assert statistics.time_to_first_token_s.mean is None
    assert statistics.time_to_first_token_s.p99 is None


def test_a_malformed_result_fails_its_request_alone() -> None:
    class Careless(FakeExecutor):
        def step(self, batch: StepBatch) -> StepResult:
            results = list(super().step(batch).requests)
            for index, row in enumerate(batch.requests):
                if row.request_id == "bad":
                    results[index] = RequestResult(
                        emitted_tokens=(), logprobs=(), num_accepted=0, draft_tokens=(), next_context_len=0
                    )
            return StepResult(requests=tuple(results))

    executor = Careless(make_limits())
    loop = make_loop(executor)
    request = make_request("good")
    bad, good = loop.submit(make_request("bad")), loop.submit(request)
    run(loop)
    assert bad.result().finish_reason == "error" and "step contract" in str(bad.result().error)
    assert list(good.result().token_ids) == expected_tokens(executor, request)


def test_the_lock_is_free_while_the_device_runs(tmp_path: Path) -> None:
    """Otherwise a slow step would hold up every submit and every statistic."""
    loop: EngineLoop

    class Asking(FakeExecutor):
        def step(self, batch: StepBatch) -> StepResult:
            asked = threading.Thread(target=lambda: loop.statistics())
            asked.start()
            asked.join(WAIT_S)
            assert not asked.is_alive(), "statistics wait for the device"
            return super().step(batch)

    loop = make_loop(Asking(make_limits()))
    stream = loop.submit(make_request("r"))
    run(loop)
    assert stream.result().finish_reason == "length"
