"""What the loop hands on: times to the policy, held text to the reader, ends to whoever waits, threads back."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from dflash_trt.core.batch import RequestResult, StepBatch
from dflash_trt.core.errors import RequestError
from dflash_trt.core.logprobs import TokenLogprob
from dflash_trt.core.request import GenerationOutput, Request, SamplingParams
from dflash_trt.core.step_plan import FinishedStep, StepPlan
from dflash_trt.scheduler.draft_length import DraftLengthPolicy, StepObservation
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving import engine_loop
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.output_processor import StreamChunk, merged
from dflash_trt.serving.stream import RequestStream
from dflash_trt.serving.text import TextCodec
from tests.fake_executor import FakeExecutor
from tests.scheduler.driver import make_limits, make_request
from tests.serving.engines import VOCAB_SIZE, WAIT_S, GatedExecutor, make_executor, make_loop, make_reader, run
from tests.serving.test_engine_failures import BrokenExecutor

STEP_S = 0.004


class Listener(DraftLengthPolicy):
    """A draft length policy that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepObservation] = []

    def choose(self, num_decoding: int) -> int:
        return 3

    def observe(self, step: StepObservation) -> None:
        self.steps.append(step)


class SlowExecutor(FakeExecutor):
    """Each step takes `STEP_S`; the one that has request "bad" fails."""

    def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
        time.sleep(STEP_S)
        if any(row.request_id == "bad" for row in batch.requests):
            raise RuntimeError("no")
        return super().run_rows(batch)


def test_the_policy_learns_how_long_each_step_took(overlaps: bool) -> None:
    policy, executor = Listener(), SlowExecutor(make_limits(), vocab_size=VOCAB_SIZE)
    loop = EngineLoop(executor, Scheduler(executor.limits, policy=policy), overlaps=overlaps)
    streams = [loop.submit(make_request(name, max_new_tokens=20)) for name in ("r", "s")]
    run(loop)
    assert all(stream.is_done for stream in streams)
    measured = [step.elapsed_s for step in policy.steps if step.num_decoding]
    assert len(measured) > 3
    assert all(elapsed_s is not None and STEP_S <= elapsed_s < WAIT_S for elapsed_s in measured)
    assert loop.statistics().step_time_s.count == loop.statistics().scheduler.num_steps
    loop.close()


def test_a_step_that_failed_is_not_a_measurement(overlaps: bool) -> None:
    policy, executor = Listener(), SlowExecutor(make_limits(), vocab_size=VOCAB_SIZE)
    loop = EngineLoop(executor, Scheduler(executor.limits, policy=policy), overlaps=overlaps)
    streams = [loop.submit(make_request(name, max_new_tokens=1)) for name in ("good", "bad")]
    run(loop)
    assert [stream.result().finish_reason for stream in streams] == ["length", "error"]
    assert [step.elapsed_s for step in policy.steps if step.num_prefill_tokens] == [None]
    assert loop.statistics().step_time_s.count == 0
    assert loop.statistics().num_failed_steps == 1
    loop.close()


def test_text_held_for_a_stop_string_comes_when_the_length_ends_the_request(codec: TextCodec, overlaps: bool) -> None:
    def answer(stop: tuple[str, ...]) -> tuple[GenerationOutput, str]:
        loop = make_loop(overlaps=overlaps)
        stream = loop.submit(make_request("r", max_new_tokens=9, stop=stop), codec.detokenizer())
        run(loop)
        texts = [chunk.text or "" for chunk in stream]
        loop.close()
        return stream.result(), "".join(texts)

    whole, _ = answer(())
    assert whole.text
    held = whole.text[-2:]
    output, streamed = answer((held + "\N{SNOWMAN}",))  # it begins as the text ends, and is never completed
    assert output.finish_reason == "length"
    assert output.text == streamed == whole.text


def test_generate_returns_when_the_engine_dies(overlaps: bool) -> None:
    loop = EngineLoop(BrokenExecutor(make_limits()), overlaps=overlaps)
    generator = Generator(loop, make_reader(loop))
    outputs: list[GenerationOutput] = []
    prompts = [[1, 2], [3], [4, 5, 6]]
    caller = threading.Thread(
        target=lambda: outputs.extend(generator.generate(prompts, SamplingParams(max_new_tokens=4))), daemon=True
    )
    caller.start()
    caller.join(10.0)
    assert not caller.is_alive(), "generate waits for ever"
    assert [output.finish_reason for output in outputs] == ["error"] * 3
    assert any("the engine stopped: " in str(output.error) for output in outputs)
    generator.close()


def test_each_failed_row_is_told_its_own_reason(overlaps: bool) -> None:
    class Particular(FakeExecutor):
        def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
            if bad := [row.request_id for row in batch.requests if row.request_id.startswith("bad")]:
                raise ValueError(f"cannot compute {', '.join(bad)}")
            return super().run_rows(batch)

    loop = make_loop(Particular(make_limits(), vocab_size=VOCAB_SIZE), overlaps=overlaps)
    streams = {name: loop.submit(make_request(name)) for name in ("bad 1", "good", "bad 2", "bad 3")}
    run(loop)
    for name, stream in streams.items():
        assert stream.result().error == (None if name == "good" else f"ValueError: cannot compute {name}")
    loop.close()


def test_a_reader_that_comes_back_wakes_the_engine(
    overlaps: bool, loops: list[EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "_PARKED_POLL_S", 3600.0)  # so that nothing else wakes it
    loop = make_loop(make_executor(right=0.0), overlaps=overlaps)
    loops.append(loop)
    stream = loop.submit(make_request("r", max_new_tokens=8), max_pending_tokens=2)
    loop.start()
    taken = 0
    while taken < 8:
        chunk = stream.take(10.0)
        assert chunk is not None
        taken += len(chunk.token_ids)
    assert stream.result(10.0).finish_reason == "length"


def test_shutdown_ends_every_thread_of_the_loop(overlaps: bool) -> None:
    before = set(threading.enumerate())
    loop = make_loop(overlaps=overlaps)
    loop.start()
    assert loop.submit(make_request("r")).result(WAIT_S).finish_reason == "length"
    names = {thread.name.split("_")[0] for thread in set(threading.enumerate()) - before}
    assert names == ({"dflash-engine", "dflash-device"} if overlaps else {"dflash-engine"})
    loop.close()
    assert set(threading.enumerate()) <= before


def test_a_listener_is_called_when_there_is_a_chunk_to_take(codec: TextCodec) -> None:
    loop = make_loop()
    chunks: list[StreamChunk] = []
    ready: list[bool] = []
    stream = loop.submit(make_request("r", logprobs=True), codec.detokenizer(), on_ready=lambda: ready.append(True))
    while loop.step():
        if ready:
            ready.clear()
            chunks += stream.take_steps()
        assert stream.take_steps() == []
    assert not ready
    output = stream.result()
    assert sum((chunk.token_ids for chunk in chunks), ()) == output.token_ids
    assert sum((chunk.logprobs for chunk in chunks), ()) == output.logprobs
    assert "".join(chunk.text or "" for chunk in chunks) == output.text
    assert sum(chunk.num_draft_tokens for chunk in chunks) == output.num_draft_tokens > 0
    assert sum(chunk.num_accepted_tokens for chunk in chunks) == output.num_accepted_tokens > 0
    assert [chunk.finish_reason for chunk in chunks if chunk.output is not None] == ["length"]


def test_a_step_that_was_run_again_in_parts_counts_with_its_own_number_of_drafts(overlaps: bool) -> None:
    policy, executor = Listener(), SlowExecutor(make_limits(), vocab_size=VOCAB_SIZE)
    loop = EngineLoop(executor, Scheduler(executor.limits, policy=policy), overlaps=overlaps)
    streams = [loop.submit(make_request(name, max_new_tokens=10)) for name in ("good", "bad")]
    loop.step()
    loop.step()
    assert [step.num_draft_tokens for step in policy.steps if step.num_prefill_tokens] == [3]
    run(loop)
    assert [stream.result().finish_reason for stream in streams] == ["length", "error"]
    loop.close()


def test_the_events_of_each_step_are_kept_only_where_they_are_asked_for() -> None:
    for records_steps in (True, False):
        executor = make_executor()
        loop = EngineLoop(executor, records_steps=records_steps)
        stream = loop.submit(make_request("r"))
        run(loop)
        assert bool(stream.result().steps) == records_steps


def test_a_stop_string_and_broken_text_are_counted_as_what_they_are(codec: TextCodec) -> None:
    """With the scheduler's statistics of the request: here, what it found computed."""

    class Broken:
        def push(self, token_ids: Sequence[int]) -> str:
            raise ValueError("no such piece")

        def flush(self) -> str:
            return ""

    loop = make_loop()
    first = loop.submit(make_request("first", range(12), max_new_tokens=9), codec.detokenizer())
    run(loop)
    assert first.result().text
    logging.disable(logging.CRITICAL)
    stopped = loop.submit(
        make_request("stopped", range(12), max_new_tokens=9, stop=(str(first.result().text)[:1],)), codec.detokenizer()
    )
    failed = loop.submit(make_request("failed", range(12)), Broken())
    run(loop, reads=[stopped, failed])
    logging.disable(logging.NOTSET)
    for stream, reason in ((stopped, "stop"), (failed, "error")):
        assert stream.result().finish_reason == reason
        assert stream.result().statistics.num_prefix_hit_tokens == 8
    assert loop.statistics().scheduler.num_finished == {"length": 1, "stop": 1, "error": 1}


def test_pending_chunks_become_one_that_has_all_of_them() -> None:
    tops = tuple((TokenLogprob(token, -0.5),) for token in (1, 2, 3))
    own: dict[str, Any] = {"sample_index": 4}
    chunks = [
        StreamChunk(text="a", token_ids=(1,), logprobs=(-0.1,), num_draft_tokens=3, top_logprobs=tops[:1], **own),
        StreamChunk(text="", token_ids=(2, 3), logprobs=(-0.2, -0.3), num_draft_tokens=2, num_accepted_tokens=1,
                    top_logprobs=tops[1:], **own),
        StreamChunk(text="b", token_ids=(), finish_reason="stop", **own),
    ]  # fmt: skip
    assert merged(chunks) == StreamChunk(
        text="ab",
        token_ids=(1, 2, 3),
        logprobs=(-0.1, -0.2, -0.3),
        num_draft_tokens=5,
        num_accepted_tokens=1,
        finish_reason="stop",
        top_logprobs=tops,
        **own,
    )


def test_submit_hands_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop()
    taken: dict[str, Any] = {}
    submit = loop.submit

    def spy(request: Request, *arguments: Any, **options: Any) -> RequestStream:
        taken.update(options, request=request)
        return submit(request, *arguments, **options)

    monkeypatch.setattr(loop, "submit", spy)
    sampling = SamplingParams(max_new_tokens=3, temperature=0.5, top_k=7, stop_token_ids=(9,), logprobs=True, seed=12)
    ready = threading.Event()
    options: dict[str, Any] = {"max_pending_tokens": 77, "on_ready": ready.set}
    with Generator(loop, make_reader(loop), eos_token_ids=(2,)) as generator:
        stream = generator.submit(
            [4, 5], sampling, request_id="mine", priority=3, queue_timeout_s=8.5, cache_salt="tenant", **options
        )
        assert stream.result(WAIT_S).finish_reason in ("length", "stop")
    assert taken == options | {
        "request": Request(
            request_id="mine",
            prompt_token_ids=(4, 5),
            sampling=sampling,
            stop_token_ids=frozenset({2, 9}),
            seed=12,
            priority=3,
            queue_timeout_s=8.5,
            cache_salt="tenant",
        )
    }
    assert ready.is_set()


def test_the_engines_thread_makes_no_text(codec: TextCodec, loops: list[EngineLoop], overlaps: bool) -> None:
    class Watched:
        def __init__(self) -> None:
            self.threads: set[threading.Thread] = set()
            self._detokenizer = codec.detokenizer()

        def push(self, token_ids: Sequence[int]) -> str:
            self.threads.add(threading.current_thread())
            return self._detokenizer.push(token_ids)

        def held(self) -> str:
            self.threads.add(threading.current_thread())
            return self._detokenizer.held()

        def flush(self) -> str:
            self.threads.add(threading.current_thread())
            return self._detokenizer.flush()

    loop = make_loop(overlaps=overlaps)
    loops.append(loop)
    watched = [Watched() for _ in range(3)]
    streams = [
        loop.submit(make_request(f"r{index}", max_new_tokens=20, stop=("no such text",)), detokenizer)
        for index, detokenizer in enumerate(watched)
    ]
    loop.start()
    for stream in streams:
        assert stream.result(WAIT_S).finish_reason == "length"
    assert [each.threads for each in watched] == [{threading.current_thread()}] * 3


@pytest.mark.parametrize("drains", [False, True])
def test_close_lets_requests_finish_when_it_is_asked_to(drains: bool) -> None:
    executor = GatedExecutor(make_limits(), vocab_size=VOCAB_SIZE)
    loop = EngineLoop(executor)
    generator = Generator(loop, make_reader(loop))
    stream = generator.submit([1, 2, 3], SamplingParams(max_new_tokens=20))
    assert executor.entered.wait(WAIT_S)
    threading.Timer(0.1, executor.open).start()
    generator.close(drains=drains)
    assert stream.result(WAIT_S).finish_reason == ("length" if drains else "cancelled")


@pytest.mark.parametrize("option", [{"on_ready": 5}, {"max_pending_tokens": 0}, {"max_pending_tokens": 1.5}])
def test_an_option_of_a_wrong_kind_is_refused(option: dict[str, Any]) -> None:
    loop = make_loop()
    (name,) = option
    with pytest.raises(RequestError, match=f"{name}: expected None, or"):
        loop.submit(make_request("r"), **option)
    loop.check_integrity()
    assert not loop.step()


def test_a_device_with_a_queue_has_two_steps_while_tokens_are_delivered_and_no_thread_of_ours() -> None:
    class Queued(FakeExecutor):
        has_queue = True
        num_submitted = 0

        def submit(self, plan: StepPlan) -> FinishedStep:
            self.num_submitted += 1
            return super().submit(plan)

    before = set(threading.enumerate())
    executor, found = Queued(make_limits(), vocab_size=VOCAB_SIZE), list[int]()
    loop = EngineLoop(executor, overlaps=True)
    stream = loop.submit(make_request("r", max_new_tokens=40), on_ready=lambda: found.append(executor.num_submitted))
    for _ in range(3):
        loop.step()
        stream.take_steps()
    assert found == [3, 4, 5]  # the one that has ended included
    assert set(threading.enumerate()) == before
    loop.close()


def test_a_device_that_is_lost_while_a_step_runs_again_is_lost(overlaps: bool) -> None:
    class Dying(FakeExecutor):
        can_retry = True
        num_runs = 0

        def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
            self.num_runs += 1
            if self.num_runs > 2:
                self.can_retry = self.num_runs == 3
                raise RuntimeError("CUDA error")
            return super().run_rows(batch)

    loop = EngineLoop(Dying(make_limits(), vocab_size=VOCAB_SIZE), overlaps=overlaps)
    streams = [loop.submit(make_request(name, max_new_tokens=40)) for name in ("r", "s")]
    logging.disable(logging.CRITICAL)
    run(loop)
    logging.disable(logging.NOTSET)
    assert [stream.result().finish_reason for stream in streams] == ["error"] * 2
    assert loop.failure is not None and "CUDA error" in loop.failure
    loop.close()


def test_a_row_that_fails_after_its_request_has_left_fails_no_namesake(overlaps: bool) -> None:
    class Leaving(FakeExecutor):
        def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
            if any(row.request_id == "bad" and 9 in row.token_ids for row in batch.requests):
                if len(streams) == 2:
                    loop.cancel("bad")
                    streams.append(loop.submit(make_request("bad")))
                raise RuntimeError("no")
            return super().run_rows(batch)

    loop = make_loop(Leaving(make_limits(), vocab_size=VOCAB_SIZE), overlaps=overlaps)
    streams = [loop.submit(make_request("good")), loop.submit(make_request("bad", (9, 9)))]
    run(loop)
    assert [stream.result().finish_reason for stream in streams] == ["length", "cancelled", "length"]
    loop.close()
