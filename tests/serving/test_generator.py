"""Prompts in, outputs out."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from dflash_trt.core.batch import StepBatch, StepResult
from dflash_trt.core.errors import RequestError
from dflash_trt.core.logit_rules import ANY_TOKEN
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.core.step_plan import StepHandle, StepPlan
from dflash_trt.serving.generation_batch import gathered
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.text import TextCodec
from tests.fake_executor import FakeExecutor
from tests.scheduler.driver import make_limits
from tests.serving.engines import (
    VOCAB_SIZE,
    WAIT_S,
    GatedExecutor,
    make_executor,
    make_generator,
    make_loop,
    make_reader,
)
from tests.serving.tokenizers import write_panicking

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
GREEDY = SamplingParams(max_new_tokens=10)


@pytest.fixture
def executor() -> FakeExecutor:
    return make_executor(make_limits(max_seq_len=200, num_pages=80))


@pytest.fixture
def generator(executor: FakeExecutor, codec: TextCodec) -> Iterator[Generator]:
    with make_generator(executor, codec=codec, eos_token_ids=(7,)) as generator:
        yield generator


@pytest.fixture
def bare(executor: FakeExecutor) -> Iterator[Generator]:
    """Without a tokenizer."""
    with make_generator(executor) as generator:
        yield generator


def test_every_shape_of_prompt_is_understood(generator: Generator, codec: TextCodec) -> None:
    ids = codec.encode("one two")
    messages = [{"role": "user", "content": "hi"}]
    outputs = generator.generate(
        ["one two", ids, {"prompt": "one two"}, {"prompt_token_ids": ids}, {"messages": messages}], GREEDY
    )
    assert len({output.token_ids for output in outputs[:4]}) == 1
    assert outputs[4].num_prompt_tokens == len(codec.encode_chat(messages))
    assert [output.finish_reason for output in outputs] == ["length"] * 5


def test_numbers_of_numpy_are_token_ids(generator: Generator) -> None:
    ids = [5, 9, 2]
    array = np.array(ids, dtype=np.int32)
    plain, *others = generator.generate([ids, array, list(array), {"prompt_token_ids": array}], GREEDY)
    assert [output.token_ids for output in others] == [plain.token_ids] * 3
    assert {type(token_id) for token_id in generator._reader.read(array).prompt_token_ids} == {int}


def test_template_options_come_with_the_messages(generator: Generator, codec: TextCodec) -> None:
    plain, shouted = generator.generate([CHAT, CHAT | {"chat_template_kwargs": {"shout": True}}], GREEDY)
    assert plain.num_prompt_tokens == len(codec.encode_chat(CHAT["messages"]))
    assert shouted.num_prompt_tokens == len(codec.encode_chat(CHAT["messages"], {"shout": True}))
    assert shouted.num_prompt_tokens > plain.num_prompt_tokens


def test_outputs_come_in_the_order_of_the_prompts_with_text(
    generator: Generator, executor: FakeExecutor, codec: TextCodec
) -> None:
    prompts = [codec.encode("one two three four"[: 3 + i]) for i in range(12)]
    outputs = generator.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == executor.target.generate(prompt, 10)
        assert output.text == codec.decode(output.token_ids)
        assert output.num_prompt_tokens == len(prompt)


def test_outputs_are_reported_here_as_they_finish(generator: Generator) -> None:
    reported: list[tuple[int, GenerationOutput]] = []
    threads = set()

    def report(index: int, output: GenerationOutput) -> None:
        reported.append((index, output))
        threads.add(threading.current_thread())

    samplings = [SamplingParams(max_new_tokens=n) for n in (190, 2, 60)]
    outputs = generator.generate([[1], [2], [3]], samplings, on_output=report)
    assert reported == [(i, outputs[i]) for i in (1, 2, 0)]
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "at least 1 token"),
        ([], "at least 1 token"),
        ([1, VOCAB_SIZE], f"an integer from 0 to {VOCAB_SIZE - 1}, found {VOCAB_SIZE}"),
        ([1, -1], "found -1"),
        ([1, True], "found True"),
        ([1, "x"], "found 'x'"),
        (range(200), r"at most 199 tokens \(max_seq_len - 1\)"),
        ({"text": "x"}, "exactly one of prompt, messages, prompt_token_ids, found text"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "found prompt, prompt_token_ids"),
        ({}, "found an empty object"),
        ({"prompt": "x", "chat_template_kwargs": {"shout": True}}, "with messages only, found with prompt"),
        (CHAT | {"chat_template_kwarg": {}}, "Did you mean 'chat_template_kwargs'"),
        (CHAT | {"chat_template_kwargs": [1]}, r"chat_template_kwargs: expected an object, found \[1\]"),
        (CHAT | {"chat_template_kwargs": {"tokenize": True}}, "variables of the chat template, found tokenize"),
        ({"prompt": 5}, "expected a string, found int"),
        ({"messages": []}, "Pass at least one message"),
        ({"messages": ["hi"]}, "a list of objects"),
        ({"prompt_token_ids": "12"}, "expected a list, found str"),
        ({"prompt_token_ids": {1, 2}}, "expected a list, found set"),
        (np.array(5), "expected a list, found ndarray"),
        (np.array([]), "at least 1 token"),
        (np.array([[1, 2]]), r"found array\(\[1, 2\]\)"),
        ([1, np.float64(2.0)], "prompt token: expected an integer from 0"),
        ([1, np.bool_(True)], "prompt token: expected an integer from 0"),
        ([1, np.int32(-1)], "prompt token: expected an integer from 0"),
        (5, "expected a list, found int"),
    ],
)
def test_a_bad_prompt_is_refused_alone(generator: Generator, prompt: Any, message: str) -> None:
    good, bad = generator.generate([[1, 2], prompt], GREEDY)
    assert bad.finish_reason == "error" and bad.token_ids == () and bad.text == ""
    assert good.finish_reason == "length"
    with pytest.raises(RequestError, match=message):
        generator.submit(prompt)
    with pytest.raises(RequestError, match=message):
        generator.stream(prompt)
    with pytest.raises(RequestError, match=message):
        raise RequestError(bad.error)


@pytest.mark.parametrize("prompt", ["text", {"prompt": "text"}, {"messages": [{"role": "user", "content": "hi"}]}])
def test_without_a_tokenizer_only_token_ids_are_taken(bare: Generator, prompt: Any) -> None:
    refused, taken = bare.generate([prompt, [1, 2]], GREEDY)
    assert "this engine has no tokenizer" in str(refused.error)
    assert refused.text is None
    assert taken.text is None and len(taken.token_ids) == 10


def test_bad_words_are_banned_as_the_tokenizer_writes_them_with_and_without_a_space(
    generator: Generator, executor: FakeExecutor, codec: TextCodec
) -> None:
    generator.generate("one", SamplingParams(max_new_tokens=3, bad_words=["two", " two three"]))
    rules = executor.batches[-1].requests[0].logit_rules
    assert rules is not None
    banned = [
        (*(token for token in prefix if token != ANY_TOKEN), last)
        for prefix, last in zip(rules.prefixes.tolist(), rules.token_ids.tolist(), strict=True)
    ]
    texts = ("two", " two", "two three", " two three")
    assert sorted(banned) == sorted({tuple(codec.encode(text)) for text in texts})
    assert all(codec.decode(ids).strip() in ("two", "two three") for ids in banned)


@pytest.mark.parametrize("field", [{"bad_words": "x"}, {"logit_bias": {VOCAB_SIZE: 1.0}}])
def test_a_rule_that_the_engine_cannot_keep_is_refused_by_name(bare: Generator, field: dict[str, Any]) -> None:
    (output,) = bare.generate([[1, 2]], SamplingParams(**field))
    assert output.finish_reason == "error"
    said = "bad_words: expected none" if "bad_words" in field else f"expected token ids from 0 to {VOCAB_SIZE - 1}"
    assert said in (output.error or "")


def test_without_a_tokenizer_stop_strings_are_refused(bare: Generator) -> None:
    (output,) = bare.generate([[1, 2]], SamplingParams(stop=("x",)))
    assert "sampling stop: expected none" in str(output.error)


def test_sampling_comes_once_for_all_or_once_for_each(generator: Generator) -> None:
    assert [len(output.token_ids) for output in generator.generate([[1], [2]], GREEDY)] == [10, 10]
    each = [SamplingParams(max_new_tokens=n) for n in (3, 5)]
    assert [len(output.token_ids) for output in generator.generate([[1], [2]], each)] == [3, 5]
    with pytest.raises(RequestError, match="one for each of 1 prompts, found 2"):
        generator.generate([[1]], each)


def test_no_prompts_give_no_outputs(generator: Generator) -> None:
    assert generator.generate([]) == []


# How generation ends


def test_an_end_of_sequence_token_stops_unless_ignored(generator: Generator, executor: FakeExecutor) -> None:
    prompt = next([n] for n in range(VOCAB_SIZE) if 7 in executor.target.generate([n], 60)[1:])
    plain = executor.target.generate(prompt, 100)
    stopped, ignored = generator.generate(
        [prompt] * 2, [SamplingParams(max_new_tokens=100), SamplingParams(max_new_tokens=100, ignore_eos=True)]
    )
    assert list(stopped.token_ids) == plain[: plain.index(7) + 1]
    assert stopped.finish_reason == "stop"
    assert list(ignored.token_ids) == plain


def test_stop_token_ids_hold_even_when_end_of_sequence_is_ignored(generator: Generator, executor: FakeExecutor) -> None:
    plain = executor.target.generate([1], 10)
    sampling = SamplingParams(max_new_tokens=10, stop_token_ids=(plain[4],), ignore_eos=True)
    (output,) = generator.generate([[1]], sampling)
    assert list(output.token_ids) == plain[:5]


def test_a_stop_string_is_cut_from_the_text(generator: Generator, executor: FakeExecutor, codec: TextCodec) -> None:
    text = codec.decode(executor.target.generate([1], 60))
    stop = next(text[i : i + 3] for i in range(20, 200) if "\N{REPLACEMENT CHARACTER}" not in text[i : i + 3])
    (output,) = generator.generate([[1]], SamplingParams(max_new_tokens=60, stop=(stop,)))
    assert output.text == text[: text.index(stop)]
    assert output.finish_reason == "stop"


def test_a_stop_string_ends_its_request_in_the_midst_of_a_batch(codec: TextCodec) -> None:
    """The calling thread reads while it waits, and while it submits: nothing runs to its length unread."""

    class Patient(FakeExecutor):
        """Steps when everything has been read."""

        deadline_s = time.monotonic() + WAIT_S

        def step(self, batch: StepBatch) -> StepResult:
            while any(mailbox._arrivals for mailbox in list(loop._mailboxes.values())):
                time.sleep(0.001)
                if time.monotonic() > self.deadline_s:
                    break
            return super().step(batch)

    executor = Patient(make_limits(max_seq_len=200, num_pages=80), vocab_size=VOCAB_SIZE)
    loop = make_loop(executor)
    text = codec.decode(executor.target.generate([1], 60))
    stop = next(text[i : i + 3] for i in range(20, 200) if "\N{REPLACEMENT CHARACTER}" not in text[i : i + 3])
    with Generator(loop, make_reader(loop, codec)) as generator:
        outputs = generator.generate([[1]] * 20, SamplingParams(max_new_tokens=190, stop=(stop,)))
        statistics = generator.statistics
    assert {output.text for output in outputs} == {text[: text.index(stop)]}
    assert statistics.scheduler.num_finished == statistics.num_requests_by_finish_reason == {"stop": 20}
    assert statistics.num_emitted_tokens == sum(len(output.token_ids) for output in outputs)


# Seeds


def test_requests_without_a_seed_get_one_each(executor: FakeExecutor) -> None:
    with make_generator(executor) as generator:
        sampled = generator.generate([[1, 2]] * 3, SamplingParams(temperature=1.0, max_new_tokens=12))
    assert len({output.token_ids for output in sampled}) == 3


def test_an_engine_seed_makes_them_reproducible_and_a_refused_prompt_shifts_nothing() -> None:
    def run(seed: int, prompts: list[Any]) -> list[tuple[int, ...]]:
        with make_generator(make_executor(), seed=seed) as generator:
            sampling = SamplingParams(temperature=1.0, max_new_tokens=12)
            return [output.token_ids for output in generator.generate(prompts, sampling)]

    first = run(5, [[1], [2], [3]])
    assert run(5, [[1], [2], [3]]) == first
    assert run(5, [[1], [], [3]])[2] == first[2]
    assert run(6, [[1], [2], [3]]) != first


def test_a_seed_of_its_own_fixes_a_request(executor: FakeExecutor) -> None:
    sampling = SamplingParams(temperature=1.0, seed=11, max_new_tokens=12)
    with make_generator(executor) as generator:
        first = generator.generate([[1, 2]], sampling)
        second = generator.generate([[3]] * 4 + [[1, 2]], sampling)
    assert first[0].token_ids == second[-1].token_ids


def test_drafts_are_drawn_apart_only_where_no_seed_was_given() -> None:
    def streams(sampling: SamplingParams, **options: Any) -> set[int]:
        executor, seen = make_executor(), set[int]()
        submit = executor.submit

        def spy(plan: StepPlan) -> StepHandle:
            seen.update(plan.rows.sampling["draft_stream"].tolist())
            return submit(plan)

        executor.submit = spy  # type: ignore[method-assign]
        with make_generator(executor, **options) as generator:
            generator.generate([[1, 2]], sampling)
        return seen

    sampled = SamplingParams(temperature=1.0, max_new_tokens=4)
    assert streams(sampled) == {1} == streams(replace(sampled, n=3))
    assert streams(replace(sampled, seed=3)) == {0} == streams(replace(sampled, seed=3, n=3))
    assert streams(sampled, seed=7) == {0}  # the engine's
    assert streams(replace(sampled, temperature=0.0)) == {0} == streams(replace(sampled, top_k=1))


def test_of_many_outputs_one_that_fails_ends_the_others() -> None:
    ended: list[str] = []

    async def waits(name: str) -> GenerationOutput:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)
        raise AssertionError

    async def fails() -> GenerationOutput:
        raise RuntimeError("lost")

    async def run() -> None:
        with pytest.raises(RuntimeError, match="lost"):
            await gathered([waits("a"), fails(), waits("b")])
        await asyncio.sleep(0)
        assert ended == ["a", "b"]

    asyncio.run(run())


# Streams


def test_a_stream_gives_the_text_in_pieces_and_the_output_at_its_end(generator: Generator) -> None:
    (whole,) = generator.generate([[1, 2]], SamplingParams(max_new_tokens=40))
    chunks = list(generator.stream([1, 2], SamplingParams(max_new_tokens=40)))
    assert "".join(chunk.text or "" for chunk in chunks) == whole.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    assert all(chunk.output is None and chunk.finish_reason is None for chunk in chunks[:-1])
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].output is not None and chunks[-1].output.token_ids == whole.token_ids


def test_leaving_a_stream_ends_its_request() -> None:
    executor = GatedExecutor(make_limits(), vocab_size=VOCAB_SIZE)
    with make_generator(executor) as generator:
        executor.gate.release()
        for _ in generator.stream([1], SamplingParams(max_new_tokens=50)):
            break
        gc.collect()
        assert generator.statistics.num_requests_by_finish_reason == {"cancelled": 1}
        executor.open()


@pytest.mark.parametrize(("num_samples", "is_async"), [(1, False), (3, False), (1, True)])
def test_so_many_requests_are_given_to_the_engine_and_no_more(num_samples: int, is_async: bool) -> None:
    """A list of any length keeps the places busy, and not the engine's memory."""
    executor = GatedExecutor(make_limits(max_batch_size=1), vocab_size=VOCAB_SIZE)
    most = 4  # for each place
    with make_generator(executor) as generator:
        prompts, sampling = [[i] for i in range(10)], SamplingParams(max_new_tokens=3, n=num_samples)

        def generate() -> None:
            if is_async:
                asyncio.run(generator.generate_async(prompts, sampling))
            else:
                generator.generate(prompts, sampling)

        thread = threading.Thread(target=generate)
        thread.start()
        deadline_s = time.monotonic() + WAIT_S
        while _num_given(generator) < most and time.monotonic() < deadline_s:
            time.sleep(0.001)
        time.sleep(0.1)
        num_given = _num_given(generator)
        executor.open()
        thread.join(WAIT_S)
        assert num_given == most
        assert generator.statistics.num_requests == 10 * num_samples


def _num_given(generator: Generator) -> int:
    statistics = generator.statistics
    return statistics.num_waiting_now + statistics.num_running_now


def test_streams_can_be_read_asynchronously_side_by_side(generator: Generator, executor: FakeExecutor) -> None:
    async def read(prompt: list[int]) -> list[int]:
        return [token async for chunk in generator.submit(prompt, GREEDY) for token in chunk.token_ids]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(read([number]) for number in range(5)))

    got = asyncio.run(asyncio.wait_for(main(), 60))
    assert got == [executor.target.generate([number], 10) for number in range(5)]


def test_logprobs_come_when_asked_for(generator: Generator) -> None:
    with_logprobs, without = generator.generate(
        [[1]] * 2, [SamplingParams(max_new_tokens=9, logprobs=True), SamplingParams(max_new_tokens=9)]
    )
    assert len(with_logprobs.logprobs) == 9 and without.logprobs == ()


# Many, and the end


def test_more_prompts_than_the_queue_holds_are_handed_over_bit_by_bit(executor: FakeExecutor) -> None:
    with make_generator(executor, max_queue_len=2) as generator:
        outputs = generator.generate([[n % 50] for n in range(60)], SamplingParams(max_new_tokens=3))
    assert [output.finish_reason for output in outputs] == ["length"] * 60


def test_a_prompt_on_which_the_tokenizer_panics_fails_alone(executor: FakeExecutor, tmp_path: Path, capfd) -> None:
    codec = TextCodec.open(write_panicking(tmp_path))
    with make_generator(executor, codec=codec) as generator:
        before, bad, after = generator.generate(["one", "a" * 60 + "b", "two"], GREEDY)
    assert [before.finish_reason, bad.finish_reason, after.finish_reason] == ["length", "error", "length"]
    assert bad.error == (
        "prompt: expected text that the tokenizer takes, found PanicException: "
        "Onig: Regex search error: retry-limit-in-match over. Change or shorten it."
    )


def test_a_prompt_that_raises_what_nobody_foresaw_fails_alone(generator: Generator, caplog) -> None:
    class Broken(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            raise ZeroDivisionError("no prompt today")

    bad, good = generator.generate([Broken(), [1, 2]], GREEDY)
    assert bad.error == "ZeroDivisionError: no prompt today"
    assert good.finish_reason == "length"
    assert "request-0: the prompt could not be read" in caplog.text


def test_an_interrupt_while_a_prompt_is_read_goes_through(generator: Generator) -> None:
    class Interrupting(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate([[1, 2], Interrupting()], GREEDY)
    generator.check_integrity()


def test_an_interrupted_call_leaves_nothing_running(generator: Generator) -> None:
    def interrupt(index: int, output: GenerationOutput) -> None:
        raise KeyboardInterrupt

    samplings = [SamplingParams(max_new_tokens=n) for n in (1, 150, 150)]
    with pytest.raises(KeyboardInterrupt):
        generator.generate([[1], [2], [3]], samplings, on_output=interrupt)
    statistics = generator.statistics
    assert statistics.scheduler.num_running_now == statistics.scheduler.num_waiting_now == 0
    generator.check_integrity()


def test_a_list_waits_while_others_fill_the_queue() -> None:
    executor, outputs = GatedExecutor(make_limits(max_batch_size=1), vocab_size=VOCAB_SIZE), list[GenerationOutput]()
    with make_generator(executor, max_queue_len=1) as generator:
        streams = [generator.submit([1], GREEDY)]
        assert executor.entered.wait(WAIT_S)
        streams.append(generator.submit([2], GREEDY))
        thread = threading.Thread(target=lambda: outputs.extend(generator.generate([[3]], GREEDY)))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        executor.open()
        thread.join(WAIT_S)
    assert [output.finish_reason for output in outputs] == ["length"] and all(stream.is_done for stream in streams)


def test_a_generator_checks_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_generator() as generator:
        generator.check_integrity()
        monkeypatch.setattr(generator._engine, "check_integrity", lambda: pytest.fail("a page is lost"))
        with pytest.raises(pytest.fail.Exception, match="a page is lost"):
            generator.check_integrity()


def test_the_longest_prompt_is_taken(generator: Generator) -> None:
    longest = list(range(199))  # max_seq_len is 200
    assert len(generator.generate(longest, GREEDY).token_ids) == 1


def test_a_closed_generator_refuses() -> None:
    generator = make_generator()
    generator.close()
    generator.close()
    (output,) = generator.generate([[1]])
    assert "a closed one" in str(output.error)


def test_a_forgotten_generator_stops_its_thread() -> None:
    generator = make_generator()
    thread = generator._engine._thread
    assert thread is not None and thread.is_alive()
    del generator
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_statistics_are_at_hand(generator: Generator, tmp_path: Path) -> None:
    generator.generate([list(range(20))] * 3, GREEDY)
    statistics = generator.statistics
    assert statistics.num_requests == 3
    assert statistics.num_emitted_tokens == 30
    assert statistics.time_to_first_token_s.count == 3


def test_a_length_that_the_engine_does_not_have_is_said_once(generator: Generator, caplog) -> None:
    most = generator.limits.max_seq_len
    generator.generate([1], SamplingParams(max_new_tokens=most - 1))
    assert "limited" not in caplog.text
    for _ in range(2):
        output = generator.generate([1], SamplingParams(max_new_tokens=most, ignore_eos=True))
        assert (output.finish_reason, len(output.token_ids)) == ("length", most - 1)
    assert caplog.text.count(f"max_new_tokens {most}: limited to {most - 1} after a prompt of 1 tokens") == 1


def test_wrong_arguments_are_refused_before_anything_runs(generator: Generator, executor: FakeExecutor) -> None:
    with pytest.raises(RequestError, match="on_output: expected None, or a function"):
        generator.generate([1], on_output=cast(Any, 5))
    assert generator.statistics.num_requests == 0
    with pytest.raises(RequestError, match=r"sampling stop: expected a string or a list of strings, found array\(5\)"):
        SamplingParams(stop=cast(Any, np.array(5)))
