"""The loop that serves, with and without a thread, plain and overlapped."""

import gc
import threading
import time
from pathlib import Path

import pytest

from dflash_trt.core.batch import RequestResult, StepBatch
from dflash_trt.core.errors import QueueFullError, RequestError
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.text import TextCodec
from tests.fake_executor import FakeExecutor
from tests.scheduler.driver import expected_tokens, make_limits, make_request
from tests.serving.engines import VOCAB_SIZE, WAIT_S, Clock, GatedExecutor, make_executor, make_loop, run, until


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
    loop.close()


def test_the_overlapped_loop_plans_before_the_running_step_is_over(loops: list[EngineLoop]) -> None:
    executor = GatedExecutor(make_limits(), vocab_size=VOCAB_SIZE)
    scheduler = Scheduler(executor.limits)
    loop = EngineLoop(executor, scheduler, overlaps=True)
    loops.append(loop)
    stream = loop.submit(make_request("r", max_new_tokens=30))
    loop.start()
    assert executor.entered.wait(WAIT_S)
    until(lambda: len(scheduler._planned) == 2)
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
    run(loop, reads=[stream])
    output = stream.result()
    assert output.text == text.split(stop)[0]
    assert output.finish_reason == "stop"
    assert output.token_ids == plain.result().token_ids[: len(output.token_ids)]
    assert len(output.token_ids) < 40
    statistics = loop.statistics()
    assert statistics.scheduler.num_finished == statistics.num_requests_by_finish_reason == {"length": 1, "stop": 1}
    assert statistics.num_emitted_tokens == 40 + len(output.token_ids)
    loop.close()


def test_a_stop_string_that_nobody_reads_is_cut_all_the_same(codec: TextCodec, overlaps: bool) -> None:
    """The engine has counted what it gave: it never saw the string."""
    loop = make_loop(overlaps=overlaps)
    read = loop.submit(make_request("read", max_new_tokens=40), codec.detokenizer())
    run(loop)
    text = str(read.result().text)
    unread = loop.submit(make_request("unread", max_new_tokens=40, stop=(text[8:10],)), codec.detokenizer())
    run(loop)
    assert unread.is_done
    assert unread.result().text == text.split(text[8:10])[0]
    assert unread.result().finish_reason == "stop"
    assert loop.statistics().scheduler.num_finished == {"length": 2}
    loop.close()


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
    assert loop.statistics().scheduler.num_paused_now == 1
    tokens: list[int] = []
    while not slow.is_done:
        chunk = slow.take()
        assert chunk is not None and len(chunk.token_ids) <= 6
        tokens += chunk.token_ids
        run(loop)
    tokens += [token for chunk in slow for token in chunk.token_ids]
    assert tokens == expected_tokens(executor, slow_request)
    loop.close()


def test_a_reader_gone_for_too_long_ends_its_request() -> None:
    clock = Clock()
    loop = make_loop(clock=clock, max_paused_s=5.0)
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


def test_an_idle_loop_looks_after_readers_that_are_gone(loops: list[EngineLoop]) -> None:
    clock = Clock()
    loop = make_loop(clock=clock, max_paused_s=5.0)
    loops.append(loop)
    stream = loop.submit(make_request("r", max_new_tokens=50), max_pending_tokens=2)
    loop.start()
    until(lambda: loop.statistics().scheduler.num_paused_now == 1)
    clock.now += 5.0
    until(lambda: stream.is_done)
    assert stream.result(WAIT_S).finish_reason == "timeout"


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


def test_an_id_is_in_use_until_its_reader_has_the_end() -> None:
    """Also while a step runs after the scheduler has ended the request, as by its timeout in the queue."""
    clock, refused = Clock(), list[str]()

    class Submitting(FakeExecutor):
        def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
            if not waiting.is_done:
                with pytest.raises(RequestError, match="request id: expected a new one, found 'waiting', in use"):
                    loop.submit(make_request("waiting"))
                refused.append("waiting")
            return super().run_rows(batch)

    loop = make_loop(Submitting(make_limits(max_batch_size=1), vocab_size=VOCAB_SIZE), clock=clock)
    first = loop.submit(make_request("first", max_new_tokens=20))
    waiting = loop.submit(make_request("waiting", queue_timeout_s=1.0))
    loop.step()
    clock.now += 1.0
    run(loop)
    assert (waiting.result().finish_reason, first.result().finish_reason) == ("timeout", "length")
    assert len(refused) >= 2


def test_a_full_queue_refuses_the_newcomer_only() -> None:
    loop = make_loop(max_queue_len=1)
    stream = loop.submit(make_request("a"))
    with pytest.raises(QueueFullError):
        loop.submit(make_request("b"))
    run(loop)
    assert stream.result().finish_reason == "length"


# Threads


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


def test_a_paused_request_of_a_forgotten_stream_is_found_while_idle(loops: list[EngineLoop]) -> None:
    loop = make_loop()
    loops.append(loop)
    stream = loop.submit(make_request("r", max_new_tokens=50), max_pending_tokens=2)
    loop.start()
    until(lambda: loop.statistics().scheduler.num_paused_now == 1)
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
    loop.close()
    assert {stream.result(WAIT_S).finish_reason for stream in streams} <= {"cancelled", "length"}
    with pytest.raises(RequestError, match="an open engine"):
        loop.submit(make_request("late"))
    loop.close()


@pytest.mark.parametrize("has_thread", [False, True], ids=["stepped", "threaded"])
def test_draining_lets_everybody_finish(overlaps: bool, has_thread: bool) -> None:
    loop = make_loop(overlaps=overlaps)
    streams = [loop.submit(make_request(f"r{i}")) for i in range(6)]
    if has_thread:
        loop.start()
    loop.close(drains=True)
    assert [stream.result(WAIT_S).finish_reason for stream in streams] == ["length"] * 6
    loop.close()


# Statistics


def test_statistics_tell_times_and_counts() -> None:
    clock = Clock()

    class SlowExecutor(FakeExecutor):
        def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
            clock.now += 0.5
            return super().run_rows(batch)

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
    assert statistics.as_dict()["scheduler"]["prefix_hit_fraction"] == 0.0


def test_statistics_of_an_unused_engine_are_empty() -> None:
    statistics = make_loop().statistics()
    assert statistics.num_requests == 0
    assert statistics.time_to_first_token_s.mean is None
    assert statistics.time_to_first_token_s.p99 is None


def test_the_lock_is_free_while_the_device_runs(tmp_path: Path) -> None:
    """Otherwise a slow step would hold up every submit and every statistic."""
    loop: EngineLoop

    class Asking(FakeExecutor):
        def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
            asked = threading.Thread(target=loop.statistics)
            asked.start()
            asked.join(WAIT_S)
            assert not asked.is_alive(), "statistics wait for the device"
            return super().run_rows(batch)

    loop = make_loop(Asking(make_limits()))
    stream = loop.submit(make_request("r"))
    run(loop)
    assert stream.result().finish_reason == "length"
