"""What the loop hands on: times to the policy, held text to the reader, ends to whoever waits, threads back."""

import threading
import time

import pytest

from dflash_trt.core.batch import StepBatch, StepResult
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.executor.fake import FakeExecutor
from dflash_trt.scheduler.draft_length import StepObservation
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving import engine_loop
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.stream import StreamChunk
from dflash_trt.serving.text import TextCodec
from tests.scheduler.driver import make_limits, make_request
from tests.serving.engines import VOCAB_SIZE, WAIT_S, make_executor, make_loop, run
from tests.serving.test_engine_failures import BrokenExecutor

STEP_S = 0.004


class Listener:
    """A draft length policy that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepObservation] = []

    def choose(self, num_decoding: int) -> int:
        return 3

    def observe(self, step: StepObservation) -> None:
        self.steps.append(step)


class SlowExecutor(FakeExecutor):
    """Each step takes `STEP_S`; the one that has request "bad" fails."""

    def step(self, batch: StepBatch) -> StepResult:
        time.sleep(STEP_S)
        if any(row.request_id == "bad" for row in batch.requests):
            raise RuntimeError("no")
        return super().step(batch)


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
    loop.shutdown()


def test_a_step_that_failed_is_not_a_measurement(overlaps: bool) -> None:
    policy, executor = Listener(), SlowExecutor(make_limits(), vocab_size=VOCAB_SIZE)
    loop = EngineLoop(executor, Scheduler(executor.limits, policy=policy), overlaps=overlaps)
    streams = [loop.submit(make_request(name, max_new_tokens=1)) for name in ("good", "bad")]
    run(loop)
    assert [stream.result().finish_reason for stream in streams] == ["length", "error"]
    assert [step.elapsed_s for step in policy.steps if step.num_prefill_tokens] == [None]
    assert loop.statistics().step_time_s.count == 0
    assert loop.statistics().num_failed_steps == 1
    loop.shutdown()


def test_text_held_for_a_stop_string_comes_when_the_length_ends_the_request(codec: TextCodec, overlaps: bool) -> None:
    def answer(stop: tuple[str, ...]) -> tuple[GenerationOutput, str]:
        loop = make_loop(overlaps=overlaps)
        stream = loop.submit(make_request("r", max_new_tokens=9, stop=stop), codec.detokenizer())
        run(loop)
        texts = [chunk.text or "" for chunk in stream]
        loop.shutdown()
        return stream.result(), "".join(texts)

    whole, _ = answer(())
    assert whole.text
    held = whole.text[-2:]
    output, streamed = answer((held + "\N{SNOWMAN}",))  # it begins as the text ends, and is never completed
    assert output.finish_reason == "length"
    assert output.text == streamed == whole.text


def test_generate_returns_when_the_engine_dies(overlaps: bool) -> None:
    loop = EngineLoop(BrokenExecutor(make_limits()), overlaps=overlaps)
    generator = Generator(loop, vocab_size=VOCAB_SIZE)
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
        def step(self, batch: StepBatch) -> StepResult:
            if bad := [row.request_id for row in batch.requests if row.request_id.startswith("bad")]:
                raise ValueError(f"cannot compute {', '.join(bad)}")
            return super().step(batch)

    loop = make_loop(Particular(make_limits(), vocab_size=VOCAB_SIZE), overlaps=overlaps)
    streams = {name: loop.submit(make_request(name)) for name in ("bad 1", "good", "bad 2", "bad 3")}
    run(loop)
    for name, stream in streams.items():
        assert stream.result().error == (None if name == "good" else f"ValueError: cannot compute {name}")
    loop.shutdown()


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
    loop.shutdown()
    assert set(threading.enumerate()) <= before


def test_a_callback_gets_each_chunk_of_its_request(codec: TextCodec) -> None:
    loop = make_loop()
    chunks: list[StreamChunk] = []
    stream = loop.submit(make_request("r", logprobs=True), codec.detokenizer(), on_chunk=chunks.append)
    run(loop)
    output = stream.result()
    assert sum((chunk.token_ids for chunk in chunks), ()) == output.token_ids
    assert sum((chunk.logprobs for chunk in chunks), ()) == output.logprobs
    assert "".join(chunk.text or "" for chunk in chunks) == output.text
    assert sum(chunk.num_draft_tokens for chunk in chunks) == output.num_draft_tokens > 0
    assert sum(chunk.num_accepted_tokens for chunk in chunks) == output.num_accepted_tokens > 0
    assert [chunk.finish_reason for chunk in chunks if chunk.output is not None] == ["length"]
