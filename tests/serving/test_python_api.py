"""The shapes that `generate` and `chat` take and give, and the same from asyncio."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest

from dflash_trt.core.errors import QueueFullError, RequestError
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.text import TextCodec
from tests.fake_executor import FakeExecutor
from tests.scheduler.driver import make_limits
from tests.serving.engines import VOCAB_SIZE, WAIT_S, GatedExecutor, make_generator, until

GREEDY = SamplingParams(max_new_tokens=10)
ENDLESS = SamplingParams(max_new_tokens=150)
HI = [{"role": "user", "content": "hi"}]

T = TypeVar("T")


def get_weather(city: str) -> str:
    """
    The weather.

    Args:
        city: Its name.
    """
    return city


@pytest.fixture
def generator(codec: TextCodec) -> Iterator[Generator]:
    executor = FakeExecutor(make_limits(max_seq_len=200, num_pages=80), vocab_size=VOCAB_SIZE)
    with make_generator(executor, codec=codec) as generator:
        yield generator


@pytest.fixture
def gated(codec: TextCodec) -> Iterator[tuple[Generator, GatedExecutor]]:
    executor = GatedExecutor(make_limits(max_seq_len=200, num_pages=80), vocab_size=VOCAB_SIZE)
    with make_generator(executor, codec=codec) as generator:
        yield generator, executor
        executor.open()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_S))


def is_idle(generator: Generator) -> bool:
    statistics = generator.statistics
    return statistics.num_running_now == 0 and statistics.num_waiting_now == 0


# One or many


@pytest.mark.parametrize(
    "prompt",
    ["one two", {"prompt": "one two"}, {"prompt_token_ids": [5, 9]}, [5, 9], (5, 9), range(5, 9), np.array([5, 9])],
    ids=str,
)
def test_one_prompt_gives_one_output_and_a_list_of_it_a_list(generator: Generator, prompt: Any) -> None:
    one, many = generator.generate(prompt, GREEDY), generator.generate([prompt], GREEDY)
    assert isinstance(one, GenerationOutput) and isinstance(many, list)
    assert [output.token_ids for output in many] == [one.token_ids]
    assert run(generator.generate_async(prompt, GREEDY)).token_ids == one.token_ids
    (in_a_list,) = run(generator.generate_async([prompt], GREEDY))
    assert in_a_list.token_ids == one.token_ids


def test_rows_of_an_array_are_prompts(generator: Generator) -> None:
    rows = np.array([[5, 9], [7, 8]])
    outputs = generator.generate(list(rows), GREEDY)
    assert [output.token_ids for output in generator.generate(rows, GREEDY)] == [o.token_ids for o in outputs]


def test_no_prompts_give_no_outputs(generator: Generator) -> None:
    assert generator.generate([]) == [] == run(generator.generate_async([]))


def test_a_refused_prompt_raises_alone_and_is_an_output_among_others(generator: Generator) -> None:
    for prompt in ("", [1, VOCAB_SIZE], {"text": "x"}):
        with pytest.raises(RequestError):
            generator.generate(prompt)
        with pytest.raises(RequestError):
            run(generator.generate_async(prompt))
        refused, served = generator.generate([prompt, "x"], GREEDY)
        assert (refused.finish_reason, served.finish_reason) == ("error", "length")
        assert refused.error
        refused_async, served_async = run(generator.generate_async([prompt, "x"], GREEDY))
        assert (refused_async.error, served_async.token_ids) == (refused.error, served.token_ids)


@pytest.mark.parametrize("prompts", [5, None, b"bytes", np.array(5)], ids=str)
def test_what_is_no_prompt_and_no_list_is_refused(generator: Generator, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts: expected a prompt or a list of prompts, found"):
        generator.generate(prompts)


def test_messages_without_chat_are_refused_with_the_way_to_pass_them(generator: Generator) -> None:
    with pytest.raises(RequestError, match=r"the messages of a conversation. Call chat\(messages\)"):
        generator.generate(HI)


def test_one_prompt_takes_one_sampling_params(generator: Generator) -> None:
    assert len(generator.generate("x", [GREEDY]).token_ids) == 10  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="expected one for each of 1 prompts, found 2"):
        generator.generate("x", [GREEDY, GREEDY])  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="expected one for each of 2 prompts, found 1"):
        run(generator.generate_async(["x", "y"], [GREEDY]))


def test_the_output_of_one_prompt_is_reported_too(generator: Generator) -> None:
    reported: list[tuple[int, GenerationOutput]] = []
    output = generator.generate("x", GREEDY, on_output=lambda *pair: reported.append(pair))
    assert reported == [(0, output)]


# Conversations


def test_a_conversation_is_rendered_by_the_template(generator: Generator, codec: TextCodec) -> None:
    other = [*HI, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "bye"}]
    one = generator.chat(HI, GREEDY)
    assert one.num_prompt_tokens == len(codec.encode_chat(HI))
    first, second = generator.chat([HI, other], [GREEDY, SamplingParams(max_new_tokens=3)])
    assert (first.token_ids, len(second.token_ids)) == (one.token_ids, 3)
    assert second.num_prompt_tokens == len(codec.encode_chat(other))
    assert "".join(chunk.text or "" for chunk in generator.stream_chat(HI, GREEDY)) == one.text
    assert run(generator.generate_async({"messages": HI}, GREEDY)).token_ids == one.token_ids


def test_variables_and_tools_reach_the_template(generator: Generator, codec: TextCodec, monkeypatch: Any) -> None:
    rendered: list[Any] = []
    encode_chat = codec.encode_chat

    def spy(messages: Any, kwargs: Any = None, **options: Any) -> list[int]:
        rendered.append(kwargs)
        return encode_chat(messages, kwargs, **options)

    monkeypatch.setattr(codec, "encode_chat", spy)
    generator.chat(HI, GREEDY, tools=[get_weather], chat_template_kwargs={"shout": True})
    list(generator.stream_chat(HI, GREEDY, tools=[get_weather]))
    generator.chat([HI], GREEDY, chat_template_kwargs={"shout": True})
    generator.chat(HI, GREEDY)
    assert rendered == [{"shout": True, "tools": [get_weather]}, {"tools": [get_weather]}, {"shout": True}, {}]


@pytest.mark.parametrize("messages", [[], [{"content": "no role"}], ["hi"], [[]]], ids=str)
def test_a_bad_conversation_is_refused(generator: Generator, messages: Any) -> None:
    try:
        refused = generator.chat(messages)
    except RequestError:
        return
    assert [output.finish_reason for output in refused] == ["error"] * len(messages)


# asyncio


def test_an_async_stream_joins_to_the_output(generator: Generator) -> None:
    async def read() -> list[Any]:
        return [chunk async for chunk in generator.stream_async("one two", GREEDY)]

    chunks = run(read())
    whole = generator.generate("one two", GREEDY)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].output.token_ids == whole.token_ids
    with pytest.raises(RequestError):
        run(anext(generator.stream_async("")))  # type: ignore[arg-type]


def test_seeds_follow_the_order_of_the_calls(codec: TextCodec) -> None:
    sampled = SamplingParams(max_new_tokens=12, temperature=1.0)
    prompts = ["one", "two", "three", "four"] * 4

    def fresh() -> Generator:
        return make_generator(codec=codec, seed=3)

    with fresh() as generator:
        expected = [output.token_ids for output in generator.generate(prompts, sampled)]

    async def one_by_one(generator: Generator) -> list[GenerationOutput]:
        return await asyncio.gather(*(generator.generate_async(prompt, sampled) for prompt in prompts))

    for outputs in (lambda g: g.generate_async(prompts, sampled), one_by_one):
        with fresh() as generator:
            assert [output.token_ids for output in run(outputs(generator))] == expected


def test_more_prompts_than_the_queue_takes_wait_for_their_turn(codec: TextCodec) -> None:
    with make_generator(codec=codec, max_queue_len=1) as generator:
        outputs = run(generator.generate_async([[n] for n in range(1, 40)], SamplingParams(max_new_tokens=3)))
        assert [output.finish_reason for output in outputs] == ["length"] * 39


def test_one_prompt_with_a_full_queue_raises(codec: TextCodec) -> None:
    executor = GatedExecutor(make_limits(max_batch_size=1), vocab_size=VOCAB_SIZE)
    with make_generator(executor, codec=codec, max_queue_len=1) as generator:
        streams = [generator.submit([1], GREEDY)]
        assert executor.entered.wait(WAIT_S)
        streams.append(generator.submit([2], GREEDY))
        for ask in (generator.generate, lambda prompt: run(generator.generate_async(prompt))):
            with pytest.raises(QueueFullError):
                ask([3])
        executor.open()
        assert [stream.result(WAIT_S).finish_reason for stream in streams] == ["length", "length"]


Reading = Callable[[Generator], Coroutine[Any, Any, Any]]


async def read_all(chunks: AsyncIterator[Any]) -> None:
    async for _ in chunks:
        pass


@pytest.mark.parametrize(
    "reading",
    [
        lambda generator: generator.generate_async("one", ENDLESS),
        lambda generator: generator.generate_async(["one", "two", "three"], ENDLESS),
        lambda generator: read_all(generator.stream_async("one", ENDLESS)),
    ],
    ids=["one", "many", "stream"],
)
def test_cancelling_the_task_ends_its_requests_and_frees_their_pages(
    gated: tuple[Generator, GatedExecutor], reading: Reading
) -> None:
    generator, executor = gated

    async def cancel_it() -> None:
        task = asyncio.create_task(reading(generator))
        while not executor.entered.is_set():
            await asyncio.sleep(0.001)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancel_it())
    executor.gate.release(4)  # the step that runs, and few others: far from the requests' own end
    until(lambda: is_idle(generator))
    generator.check_integrity()
    assert generator.statistics.num_requests_by_finish_reason.get("cancelled", 0) >= 1


def test_leaving_an_async_stream_early_ends_the_request(gated: tuple[Generator, GatedExecutor]) -> None:
    generator, executor = gated

    async def leave() -> None:
        async for _ in generator.stream_async("one", ENDLESS):
            break

    executor.gate.release(4)
    run(leave())
    gc.collect()
    executor.gate.release(4)
    until(lambda: is_idle(generator))
    generator.check_integrity()


def test_a_task_that_is_cancelled_while_its_prompt_is_read_leaves_no_request(
    gated: tuple[Generator, GatedExecutor], codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, executor = gated
    reads, may_read = threading.Event(), threading.Event()
    encode = codec.encode

    def slow(text: str, **options: Any) -> list[int]:
        reads.set()
        assert may_read.wait(WAIT_S)
        return encode(text, **options)

    monkeypatch.setattr(codec, "encode", slow)

    async def cancel_it() -> None:
        task = asyncio.create_task(generator.generate_async("one", ENDLESS))
        while not reads.is_set():  # the loop is not blocked
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_read.set()

    run(cancel_it())
    executor.gate.release(4)
    until(lambda: generator.statistics.num_requests_by_finish_reason.get("cancelled", 0) == 1 and is_idle(generator))
    generator.check_integrity()


def test_reading_prompts_does_not_block_the_event_loop(
    generator: Generator, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = codec.encode

    def slow(text: str, **options: Any) -> list[int]:
        time.sleep(0.3)
        return encode(text, **options)

    monkeypatch.setattr(codec, "encode", slow)

    async def ticks() -> int:
        task = asyncio.create_task(generator.generate_async("one", GREEDY))
        count = 0
        while not task.done():
            await asyncio.sleep(0.01)
            count += 1
        return count

    assert run(ticks()) >= 5
