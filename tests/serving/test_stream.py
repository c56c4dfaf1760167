"""From the engine's thread to a reader, who may be slow, asynchronous or gone."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.core.request import FinishReason, GenerationOutput, TokenEvent
from dflash_trt.serving.detokenizer import ByteDetokenizer, Detokenizer
from dflash_trt.serving.output_processor import Mailbox, OutputProcessor, StreamChunk
from dflash_trt.serving.stream import RequestStream
from tests.scheduler.driver import make_request


class Engine:
    """One request, whose tokens are bytes; `ends` is what the reader asked for, and gets at once."""

    def __init__(
        self,
        *,
        detokenizer: Detokenizer | None = None,
        stop: tuple[str, ...] = (),
        max_pending_tokens: int | None = None,
        on_ready: Callable[[], None] | None = None,
        ends_at_once: bool = True,
    ) -> None:
        self.mailbox = Mailbox(arrived_s=0.0, max_pending_tokens=max_pending_tokens, on_ready=on_ready)
        self.ends: list[tuple[FinishReason, str | None]] = []
        self.num_resumed = 0
        self._ends_at_once = ends_at_once
        output_processor = OutputProcessor(make_request("r", stop=stop), detokenizer, arrived_s=0.0)
        self.stream = RequestStream(self.mailbox, output_processor, end=self._end, resume=self._resume)

    def put(self, *token_ids: int, now: float = 1.0) -> bool:
        return self.mailbox.put(TokenEvent(request_id="r", token_ids=token_ids), now)

    def finish(self, reason: FinishReason = "length", *, now: float = 1.0, error: str | None = None) -> None:
        self.mailbox.put(TokenEvent(request_id="r", token_ids=(), finish_reason=reason, error=error), now)
        self.mailbox.run_callbacks()

    def _end(self, reason: FinishReason, error: str | None = None) -> None:
        self.ends.append((reason, error))
        if self._ends_at_once and self.mailbox.last is None:
            self.finish(reason, error=error, now=99.0)

    def _resume(self) -> None:
        self.num_resumed += 1


def detokenizer() -> ByteDetokenizer:
    return ByteDetokenizer(lambda token_id: bytes([token_id]))


def put_text(engine: Engine, text: str, *, now: float = 1.0) -> None:
    engine.put(*text.encode(), now=now)


def test_chunks_come_in_order_and_the_last_one_ends_the_loop() -> None:
    engine = Engine()
    got = []
    engine.put(1)
    for piece in engine.stream:
        got.append(piece.token_ids)
        if len(got) == 1:
            engine.put(2, 3)
        elif len(got) == 2:
            engine.finish()
    assert got == [(1,), (2, 3), ()]
    assert engine.stream.is_done


def test_a_slow_reader_finds_everything_in_one_piece() -> None:
    engine = Engine(detokenizer=detokenizer())
    for text in ("a", "\N{SNOWMAN}", "bc"):
        put_text(engine, text)
    engine.finish()
    (piece,) = list(engine.stream)
    assert (piece.token_ids, piece.text) == (tuple("a\N{SNOWMAN}bc".encode()), "a\N{SNOWMAN}bc")
    assert piece.output is not None and piece.finish_reason == "length"


def test_who_wants_each_step_gets_them_one_by_one_and_does_not_wait() -> None:
    engine = Engine(detokenizer=detokenizer())
    assert engine.stream.take_steps() == []
    put_text(engine, "ab")
    put_text(engine, "c")
    chunks = engine.stream.take_steps()
    assert [(chunk.text, chunk.token_ids) for chunk in chunks] == [("ab", (97, 98)), ("c", (99,))]
    assert [[step.token_ids for step in chunk.steps] for chunk in chunks] == [[(97, 98)], [(99,)]]
    engine.finish()
    (last,) = engine.stream.take_steps()
    assert last.output is not None and last.output.text == "abc"
    assert engine.stream.take_steps() == []


def test_a_reader_waits_for_the_next_chunk() -> None:
    engine = Engine()
    threading.Timer(0.05, engine.put, [7]).start()
    got = engine.stream.take(timeout_s=20)
    assert got is not None and got.token_ids == (7,)


@pytest.mark.parametrize("timeout_s", [0.01, 0])
def test_waiting_can_be_bounded(timeout_s: float) -> None:
    engine = Engine()
    for wait in (engine.stream.take, engine.stream.result):
        with pytest.raises(TimeoutError, match=f"no token within {timeout_s} s"):
            wait(timeout_s=timeout_s)
    assert not engine.mailbox._waiters, "nobody waits any more"


def test_what_gives_no_chunk_does_not_prolong_the_wait() -> None:
    """After the stop string, until the engine has learned of it."""
    engine = Engine(detokenizer=detokenizer(), stop=("a",), ends_at_once=False)
    put_text(engine, "a")
    is_over = threading.Event()

    def put_more() -> None:
        started = time.monotonic()
        while not is_over.wait(0.005) and time.monotonic() < started + 5:
            put_text(engine, "b")

    thread = threading.Thread(target=put_more)
    thread.start()
    with pytest.raises(TimeoutError):
        engine.stream.take(timeout_s=0.05)
    assert thread.is_alive()
    is_over.set()


def test_who_wants_each_step_can_wait_for_them_asynchronously() -> None:
    engine = Engine()
    engine.put(1)
    engine.put(2, 3)

    async def read() -> list[list[tuple[int, ...]]]:
        threading.Timer(0.05, engine.finish).start()
        return [[chunk.token_ids for chunk in await engine.stream.take_steps_async()] for _ in range(3)]

    assert asyncio.run(asyncio.wait_for(read(), 30)) == [[(1,), (2, 3)], [()], []]


def test_a_reader_that_gives_up_while_it_is_woken_leaves_the_others_awake() -> None:
    engines = [Engine(), Engine()]

    async def read() -> StreamChunk | None:
        first, second = (asyncio.create_task(engine.stream.take_async()) for engine in engines)
        await asyncio.sleep(0.01)
        for engine in engines:
            engine.put(7)
        first.cancel()
        return await second

    chunk = asyncio.run(asyncio.wait_for(read(), 10))
    assert chunk is not None and chunk.token_ids == (7,)


def test_async_readers_are_woken_from_another_thread() -> None:
    engine = Engine()

    def feed() -> None:
        for put in (lambda: engine.put(1), lambda: engine.put(2), engine.finish):
            time.sleep(0.02)
            put()

    async def read() -> list[int]:
        return [token async for piece in engine.stream for token in piece.token_ids]

    thread = threading.Thread(target=feed)
    thread.start()
    assert asyncio.run(asyncio.wait_for(read(), 30)) == [1, 2]
    thread.join()


def test_all_readers_of_an_event_loop_are_woken_by_one_call_into_it() -> None:
    """Each call costs the engine's thread as much as ten events."""
    engines = [Engine() for _ in range(20)]
    num_calls = 0

    async def main() -> list[int]:
        nonlocal num_calls
        loop = asyncio.get_running_loop()
        call_soon_threadsafe = loop.call_soon_threadsafe

        def counted(*arguments: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return call_soon_threadsafe(*arguments)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        reading = asyncio.gather(*(engine.stream.take_async() for engine in engines))
        await asyncio.sleep(0.01)
        for number, engine in enumerate(engines):
            engine.put(number)
        return [chunk.token_ids[0] for chunk in await reading if chunk is not None]

    assert asyncio.run(asyncio.wait_for(main(), 30)) == list(range(20))
    assert num_calls == 1


def test_an_async_reader_that_gave_up_does_not_disturb_the_engine() -> None:
    engine = Engine()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.stream.take_async(), 0.01)

    asyncio.run(give_up())
    assert not engine.mailbox._waiters
    engine.put(1)  # its event loop is closed by now
    got = engine.stream.take()
    assert got is not None and got.token_ids == (1,)


def test_an_engine_whose_reader_has_gone_with_its_event_loop_is_not_disturbed() -> None:
    engine = Engine()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(engine.stream.take_async())
    loop.run_until_complete(asyncio.sleep(0.01))
    assert engine.mailbox._waiters
    loop.close()
    engine.put(1)
    engine.finish()
    assert engine.stream.result().token_ids == (1,)
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]


def test_the_result_waits_for_the_end_and_can_be_asked_for_again() -> None:
    engine = Engine()
    engine.put(1)
    threading.Timer(0.05, engine.finish).start()
    output = engine.stream.result(timeout_s=20)
    assert output.finish_reason == "length"
    assert engine.stream.result() is output
    assert engine.stream.take() is None


def test_callbacks_run_once_at_the_end_or_at_once_after_it() -> None:
    engine, got = Engine(detokenizer=detokenizer()), list[GenerationOutput]()
    engine.stream.call_when_done(got.append)
    put_text(engine, "ab")
    engine.finish()
    engine.mailbox.run_callbacks()
    assert [output.text for output in got] == ["ab"]
    engine.stream.call_when_done(got.append)
    assert len(got) == 2
    assert "".join(chunk.text or "" for chunk in engine.stream) == "ab", "the reader still gets all of it"


def test_a_reader_too_far_behind_is_reported_and_asks_to_be_resumed_when_it_has_read() -> None:
    engine = Engine(max_pending_tokens=3)
    assert not engine.put(1, 2)
    engine.stream.take()
    assert not engine.num_resumed
    assert not engine.put(1, 2)
    assert engine.put(3)
    engine.stream.take()
    assert engine.num_resumed == 1
    engine.put(4)
    engine.stream.take()
    assert engine.num_resumed == 1


def test_a_stream_that_has_ended_is_never_full() -> None:
    engine = Engine(max_pending_tokens=1)
    assert engine.put(1)
    end = TokenEvent(request_id="r", token_ids=(2,), finish_reason="length")
    assert not engine.mailbox.put(end, 1.0)
    engine.stream.take()
    assert engine.num_resumed == 0


def test_leaving_a_with_block_cancels() -> None:
    engine = Engine()
    with engine.stream:
        pass
    assert engine.ends == [("cancelled", None)]


def test_the_engine_says_once_that_there_is_something_to_take() -> None:
    ready: list[bool] = []
    engine = Engine(on_ready=lambda: ready.append(True))
    engine.put(1)
    engine.put(2)
    assert len(ready) == 1
    engine.stream.take()
    engine.put(3)
    engine.finish()
    assert len(ready) == 2


def test_a_listener_that_raises_does_not_stop_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(on_ready=lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    engine.put(1)
    assert "a callback of request r failed" in caplog.text
    assert engine.stream.take() is not None


# Stop strings are found by the reader


@pytest.mark.parametrize("ends_at_once", [True, False])
def test_a_stop_string_ends_the_request_and_what_came_after_it_is_ignored(ends_at_once: bool) -> None:
    engine = Engine(detokenizer=detokenizer(), stop=("cd",), ends_at_once=ends_at_once)
    for now, text in enumerate(("ab", "c", "d!", "more", "and more"), 1):
        put_text(engine, text, now=float(now))
    chunks = engine.stream.take_steps()
    assert [chunk.text for chunk in chunks[:2]] == ["ab", ""]
    assert engine.ends == [("stop", None)]
    if not ends_at_once:
        with pytest.raises(TimeoutError):
            engine.stream.take(0.01)
        put_text(engine, "the engine learns of it later")
        engine.finish("stop", now=50.0)
        chunks += engine.stream.take_steps()
    assert [chunk.text for chunk in chunks] == ["ab", "", ""]
    output = chunks[-1].output
    assert output is not None
    assert (output.text, output.token_ids, output.finish_reason) == ("ab", tuple(b"abcd"), "stop")
    assert sum((step.token_ids for step in output.steps), ()) == output.token_ids
    assert (output.time_to_first_token_s, output.total_s) == (1.0, 3.0), "when its last token came"
    assert engine.mailbox.num_tokens == 4
    assert engine.ends == [("stop", None)], "told once"


@pytest.mark.parametrize("reason", ["length", "cancelled", "error", "timeout"])
def test_a_stop_string_read_after_the_end_is_still_why_it_stopped(reason: FinishReason) -> None:
    engine = Engine(detokenizer=detokenizer(), stop=("b",))
    put_text(engine, "abc")
    engine.finish(reason, error="too late")
    output = engine.stream.result()
    assert (output.text, output.finish_reason, output.error) == ("a", "stop", None)


def test_a_callback_at_the_end_finds_the_stop_string_that_nobody_read() -> None:
    engine, got = Engine(detokenizer=detokenizer(), stop=("b",)), list[GenerationOutput]()
    engine.stream.call_when_done(got.append)
    put_text(engine, "abc")
    engine.finish()
    assert [(output.text, output.finish_reason) for output in got] == [("a", "stop")]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_when_the_reader_reads_changes_nothing_but_the_pieces(data: st.DataObject) -> None:
    """Tokens, text, counts and steps are those of a reader that reads after each step."""
    events = [
        TokenEvent(request_id="r", token_ids=ids, num_candidates=len(ids), num_accepted=len(ids) - 1)
        for ids in data.draw(st.lists(st.lists(st.sampled_from(list(b"abc")), min_size=1, max_size=4).map(tuple)))
    ]
    stop = data.draw(st.sampled_from([(), ("ab",), ("ca", "bbb")]))
    answers = []
    for reads in (lambda: True, lambda: data.draw(st.booleans())):
        engine = Engine(detokenizer=detokenizer(), stop=stop, ends_at_once=data.draw(st.booleans()))
        texts = []
        for event in events:
            if engine.mailbox.last is None:
                engine.mailbox.put(event, 1.0)
                if reads():
                    texts += [chunk.text or "" for chunk in engine.stream.take_steps()]
        if engine.mailbox.last is None:
            engine.finish()
        texts += [chunk.text or "" for chunk in engine.stream]
        output = engine.stream.result()
        assert "".join(texts) == output.text
        answers.append(output)
    assert answers[0] == answers[1]


# Errors


class Broken:
    """No text for the byte "x"."""

    def push(self, token_ids: Sequence[int]) -> str:
        if ord("x") in token_ids:
            raise ValueError("no such piece")
        return bytes(token_ids).decode()

    def held(self) -> str:
        return ""

    def flush(self) -> str:
        return ""


def test_tokens_that_cannot_be_made_text_end_their_request(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(detokenizer=Broken())
    put_text(engine, "ab")
    assert engine.stream.take() is not None
    put_text(engine, "x")
    output = engine.stream.result()
    assert engine.ends == [("error", "ValueError: no such piece")]
    assert (output.finish_reason, output.error, output.text) == ("error", "ValueError: no such piece", "ab")
    assert "request r: its tokens could not be turned into text" in caplog.text
