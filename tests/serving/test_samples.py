"""n samples of a prompt: each what a request with its seed gives, all of them on the pages of one prompt."""

import asyncio
import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dflash_trt.core.errors import QueueFullError, RequestError
from dflash_trt.core.request import GenerationOutput, Request, SamplingParams
from dflash_trt.core.sampling import MAX_SAMPLES, sample_seed
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.request_reader import RequestReader
from dflash_trt.serving.stream import RequestStream, samples_of
from tests.fake_executor import FakeExecutor
from tests.scheduler.driver import make_limits
from tests.serving.engines import GatedExecutor, make_executor, make_generator, make_loop, until
from tests.serving.engines import run as run_loop

PAGE_SIZE = 4  # of make_limits
PROMPT = list(range(1, 42))  # ten full pages and a token
SAMPLED = SamplingParams(max_new_tokens=6, temperature=0.7, seed=5)
OPTIONS = [SAMPLED, replace(SAMPLED, n=5), replace(SAMPLED, n=3, temperature=0.0)]


@pytest.fixture
def executor() -> FakeExecutor:
    return make_executor(make_limits(max_seq_len=200, num_pages=120))


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def generator(executor: FakeExecutor, request: pytest.FixtureRequest) -> Iterator[Generator]:
    with make_generator(executor, overlaps=request.param, clock=time.monotonic) as generator:
        yield generator


def tokens(output: GenerationOutput) -> list[tuple[int, ...]]:
    return [sample.token_ids for sample in output.samples]


def by_seed(generator: Generator, sampling: SamplingParams) -> list[tuple[int, ...]]:
    """Requests of their own, with the seeds that the documentation names."""
    assert sampling.seed is not None
    seeds = [sampling.seed]
    for index in range(1, sampling.n):
        digest = hashlib.sha256(f"{sampling.seed}/{index}".encode()).digest()
        seeds.append(int.from_bytes(digest[:8], "big") >> 1)
    return [generator.generate(PROMPT, replace(sampling, n=1, seed=seed)).token_ids for seed in seeds]


@pytest.mark.parametrize("sampling", OPTIONS, ids=["one", "five", "greedy"])
def test_every_way_to_ask_gives_the_samples_of_their_seeds(generator: Generator, sampling: SamplingParams) -> None:
    expected = by_seed(generator, sampling)
    output = generator.generate(PROMPT, sampling)
    assert tokens(output) == expected
    assert len(set(expected)) == (sampling.n if sampling.temperature else 1)
    assert [sample.sample_index for sample in output.samples] == list(range(sampling.n))
    listed = generator.generate([PROMPT, [7, 8], PROMPT], [sampling, SAMPLED, sampling])
    assert [tokens(listed[0]), tokens(listed[2])] == [expected, expected] and len(listed[1].samples) == 1
    assert tokens(asyncio.run(generator.generate_async(PROMPT, sampling))) == expected
    listed = asyncio.run(generator.generate_async([PROMPT, PROMPT], sampling))
    assert [tokens(each) for each in listed] == [expected, expected]
    streamed: dict[int, tuple[int, ...]] = {}
    for chunk in generator.stream(PROMPT, sampling):
        streamed[chunk.sample_index] = streamed.get(chunk.sample_index, ()) + chunk.token_ids
    assert [streamed[index] for index in range(sampling.n)] == expected
    assert asyncio.run(_streamed(generator, sampling)) == expected
    generator.check_integrity()


async def _streamed(generator: Generator, sampling: SamplingParams) -> list[tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    async for chunk in generator.stream_async(PROMPT, sampling):
        found[chunk.sample_index] = found.get(chunk.sample_index, ()) + chunk.token_ids
    return [found[index] for index in sorted(found)]


def test_the_samples_compute_their_prompt_once(generator: Generator, executor: FakeExecutor) -> None:
    sampling = replace(SAMPLED, n=4)
    output = generator.generate(PROMPT, sampling)
    assert [sample.statistics.num_prefix_hit_tokens for sample in output.samples] == [0, 40, 40, 40]
    scored = [row for batch in executor.batches for row in batch.requests if row.context_len < len(PROMPT)]
    assert sum(len(row.token_ids) for row in scored) == len(PROMPT) + 3  # and the token behind the full pages


def test_without_the_prefix_cache_every_sample_computes_it(executor: FakeExecutor) -> None:
    with make_generator(executor, enable_prefix_caching=False) as generator:
        output = generator.generate(PROMPT, replace(SAMPLED, n=3))
    assert [sample.statistics.num_prefix_hit_tokens for sample in output.samples] == [0, 0, 0]
    prompts = [row for batch in executor.batches for row in batch.requests if row.context_len < len(PROMPT)]
    assert sum(len(row.token_ids) for row in prompts) == 3 * len(PROMPT)


def test_a_sample_runs_though_the_first_one_was_cancelled_in_its_prompt(executor: FakeExecutor) -> None:
    loop = make_loop(executor, max_prefill_tokens=8)
    generator = _without_thread(loop)
    streams = generator.submit_samples(PROMPT, replace(SAMPLED, n=2))
    loop.step()
    streams.streams[0].cancel()
    run_loop(loop)
    first, second = (stream.result() for stream in streams.streams)
    assert (first.finish_reason, second.finish_reason) == ("cancelled", "length")
    assert len(second.token_ids) == 6


def test_others_run_while_samples_wait_for_their_prompt(executor: FakeExecutor) -> None:
    loop = make_loop(executor)  # 24 tokens a step
    generator = _without_thread(loop)
    streams = [generator.submit_samples(PROMPT, replace(SAMPLED, n=3)), generator.submit([1, 2], SAMPLED)]
    run_loop(loop)
    assert len(streams) == 2  # kept: forgotten ones are cancelled
    first, second, third, *_ = ([row.request_id for row in batch.requests] for batch in executor.batches)
    assert (first, second) == (["request-0"], ["request-0", "request-1"])
    assert set(third) == {"request-0", "request-0/1", "request-0/2", "request-1"}


def test_cancelling_the_handle_ends_all_samples_and_frees_their_pages() -> None:
    executor = GatedExecutor(make_limits(max_seq_len=200, num_pages=120))
    with make_generator(executor) as generator:
        streams = generator.submit_samples(PROMPT, replace(SAMPLED, n=4, max_new_tokens=100))
        assert executor.entered.wait(10)
        streams.cancel()
        executor.open()
        assert [stream.result().finish_reason for stream in streams.streams] == ["cancelled"] * 4
        until(lambda: generator.statistics.scheduler.num_pages_in_use_now == 0)
        generator.check_integrity()


def test_one_stream_is_refused_for_several_samples(generator: Generator) -> None:
    with pytest.raises(RequestError, match="submit_samples"):
        generator.submit(PROMPT, replace(SAMPLED, n=2))
    with pytest.raises(RequestError, match=f"1 to {MAX_SAMPLES}"):
        SamplingParams(n=0)


def test_a_queue_without_room_for_all_samples_refuses_the_prompt_and_starts_none() -> None:
    executor = GatedExecutor(make_limits(max_seq_len=200, num_pages=120))
    with make_generator(executor, max_queue_len=3) as generator:
        with pytest.raises(QueueFullError) as refused:  # whose traceback keeps the streams
            generator.submit_samples(PROMPT, replace(SAMPLED, n=9))
        executor.open()
        until(lambda: generator.statistics.scheduler.num_pages_in_use_now == 0)
        assert refused and set(generator.statistics.num_requests_by_finish_reason) == {"cancelled"}
        listed = generator.generate([PROMPT, [3]], replace(SAMPLED, n=9))  # a list waits for its turn
        assert [len(output.samples) for output in listed] == [9, 9]
        listed = asyncio.run(generator.generate_async([PROMPT, [3]], replace(SAMPLED, n=9)))
        assert [len(output.samples) for output in listed] == [9, 9]


def test_a_refused_prompt_of_a_list_is_refused_once(generator: Generator) -> None:
    refused, taken = generator.generate([[99999], [1]], replace(SAMPLED, n=2))
    assert refused.error is not None and len(refused.samples) == 1
    assert [sample.error for sample in taken.samples] == [None, None]


def test_leaving_the_chunks_of_samples_leaves_no_task_that_waits() -> None:
    executor = GatedExecutor(make_limits(max_seq_len=200, num_pages=120))
    with make_generator(executor) as generator:
        streams = generator.submit_samples(PROMPT, replace(SAMPLED, n=3, max_new_tokens=100))

        async def leave() -> int:
            chunks = aiter(streams)
            await anext(chunks)
            await chunks.aclose()  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
            return len(asyncio.all_tasks())

        executor.gate.release(2)  # the prompt in two steps: the others have nothing to take
        num_tasks = asyncio.run(leave())
        streams.cancel()
        executor.open()
        assert num_tasks == 1


def test_a_sample_that_is_refused_keeps_its_place(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = generator._engine.submit

    def refuse_second(request: Request, *words: Any, **options: Any) -> RequestStream:
        if request.sample_index == 1:
            raise RequestError("no room")
        return submit(request, *words, **options)

    monkeypatch.setattr(generator._engine, "submit", refuse_second)
    (output,) = generator.generate([PROMPT], replace(SAMPLED, n=3))
    assert [(sample.sample_index, sample.error) for sample in output.samples] == [(0, None), (1, "no room"), (2, None)]


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_listener_hears_of_every_sample(num_samples: int) -> None:
    loop, ready = make_loop(), list[bool]()
    generator = _without_thread(loop)
    sampling = replace(SAMPLED, n=num_samples)
    streams = generator.submit_samples(PROMPT[:9], sampling, on_ready=lambda: ready.append(True))
    tokens: dict[int, int] = {}
    while loop.step():
        for chunk in streams.take_steps() if ready else ():
            tokens[chunk.sample_index] = tokens.get(chunk.sample_index, 0) + len(chunk.token_ids)
        ready.clear()
        assert streams.take_steps() == []
    assert tokens == dict.fromkeys(range(num_samples), 6)


def test_seeds_of_samples_are_far_apart() -> None:
    seeds = {sample_seed(seed, index) for seed in range(20) for index in range(20)}
    assert len(seeds) == 400 and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(7, 0) == 7


def _without_thread(loop: object) -> Generator:
    """For a test that takes the steps."""
    loop.start = lambda: None  # type: ignore[attr-defined]
    return Generator(loop, RequestReader(None, vocab_size=420))  # type: ignore[arg-type]


def test_the_samples_of_a_request_differ_in_what_makes_them_samples_alone() -> None:
    sampling = replace(SAMPLED, n=3, prompt_logprobs=2)
    request = Request(request_id="r", prompt_token_ids=tuple(PROMPT), sampling=sampling, seed=5)
    first, *others = samples_of(request)
    assert first == request
    of_samples = replace(sampling, prompt_logprobs=None)
    for index, other in enumerate(others, start=1):
        own = {"request_id": f"r/{index}", "sample_index": index, "shares_prompt_of": "r"}
        assert other == replace(first, sampling=of_samples, seed=sample_seed(5, index), **own)
