"""From the engine's thread to a reader, who may be slow, asynchronous or gone."""

import asyncio
import threading
import time

import pytest

from dflash_trt.core.request import GenerationOutput
from dflash_trt.serving.output_processor import OutputProcessor
from dflash_trt.serving.stream import Mailbox, RequestStream, StreamChunk
from tests.scheduler.driver import make_request


def chunk(*token_ids: int, text: str | None = None) -> StreamChunk:
    return StreamChunk(text=text, token_ids=token_ids)


def last_chunk() -> StreamChunk:
    return OutputProcessor(make_request("r"), None, arrived_s=0.0).finish("length", 1.0, statistics=None)


def make_stream(mailbox: Mailbox) -> RequestStream:
    return RequestStream("r", mailbox, lambda: None)


def test_chunks_come_in_order_and_the_last_one_ends_the_loop() -> None:
    mailbox = Mailbox()
    stream = make_stream(mailbox)
    got = []
    mailbox.put(chunk(1))
    for piece in stream:
        got.append(piece.token_ids)
        if len(got) == 1:
            mailbox.put(chunk(2, 3))
        elif len(got) == 2:
            mailbox.put(last_chunk())
    assert got == [(1,), (2, 3), ()]
    assert stream.is_done


def test_a_slow_reader_finds_everything_in_one_piece() -> None:
    mailbox = Mailbox()
    for piece in (chunk(1, text="a"), chunk(2, text=""), chunk(3, 4, text="b"), last_chunk()):
        mailbox.put(piece)
    (piece,) = list(make_stream(mailbox))
    assert (piece.token_ids, piece.text) == ((1, 2, 3, 4), "ab")
    assert piece.output is not None and piece.finish_reason == "length"


def test_a_reader_waits_for_the_next_chunk() -> None:
    mailbox = Mailbox()
    threading.Timer(0.05, mailbox.put, [chunk(7)]).start()
    got = make_stream(mailbox).take(timeout_s=20)
    assert got is not None and got.token_ids == (7,)


def test_waiting_can_be_bounded() -> None:
    with pytest.raises(TimeoutError, match=r"no token within 0.01 s"):
        make_stream(Mailbox()).take(timeout_s=0.01)


def test_async_readers_are_woken_from_another_thread() -> None:
    mailbox = Mailbox()

    def feed() -> None:
        for piece in (chunk(1), chunk(2), last_chunk()):
            time.sleep(0.02)
            mailbox.put(piece)

    async def read() -> list[int]:
        return [token async for piece in make_stream(mailbox) for token in piece.token_ids]

    thread = threading.Thread(target=feed)
    thread.start()
    assert asyncio.run(asyncio.wait_for(read(), 30)) == [1, 2]
    thread.join()


def test_an_async_reader_that_gave_up_does_not_disturb_the_engine() -> None:
    mailbox = Mailbox()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(mailbox.take_async(), 0.01)

    asyncio.run(give_up())
    mailbox.put(chunk(1))  # its event loop is closed by now
    got = mailbox.take()
    assert got is not None and got.token_ids == (1,)


def test_the_result_waits_for_the_end_and_can_be_asked_for_again() -> None:
    mailbox = Mailbox()
    stream = make_stream(mailbox)
    mailbox.put(chunk(1))
    threading.Timer(0.05, mailbox.put, [last_chunk()]).start()
    output = stream.result(timeout_s=20)
    assert output.finish_reason == "length"
    assert stream.result() is output
    assert stream.take() is None


def test_callbacks_run_once_at_the_end_or_at_once_after_it() -> None:
    mailbox, got = Mailbox(), list[GenerationOutput]()
    mailbox.call_when_done(got.append)
    mailbox.put(last_chunk())
    mailbox.run_callbacks()
    mailbox.run_callbacks()
    assert len(got) == 1
    mailbox.call_when_done(got.append)
    assert len(got) == 2


def test_a_reader_too_far_behind_is_reported_and_asks_to_be_resumed_when_it_has_read() -> None:
    resumed = []
    mailbox = Mailbox(max_pending_tokens=3, resume=lambda: resumed.append(True))
    mailbox.put(chunk(1, 2))
    assert not mailbox.pause_if_full()
    mailbox.take()
    assert not resumed
    mailbox.put(chunk(1, 2))
    mailbox.put(chunk(3))
    assert mailbox.pause_if_full()
    mailbox.take()
    assert resumed == [True]


def test_a_stream_that_has_ended_is_never_full() -> None:
    mailbox = Mailbox(max_pending_tokens=1)
    mailbox.put(chunk(1))
    mailbox.put(last_chunk())
    assert not mailbox.pause_if_full()


def test_leaving_a_with_block_cancels() -> None:
    cancelled = []
    with RequestStream("r", Mailbox(), lambda: cancelled.append(True)):
        pass
    assert cancelled == [True]
