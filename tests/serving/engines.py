"""Engine loops over a FakeExecutor."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_trt.core.batch import RequestResult, StepBatch
from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.output_processor import StreamChunk
from dflash_trt.serving.request_reader import RequestReader
from dflash_trt.serving.stream import RequestStream
from dflash_trt.serving.text import TextCodec
from tests.fake_executor import FakeExecutor, right_with_probability
from tests.scheduler.driver import make_limits
from tests.serving.tokenizers import CHAT_TEMPLATE, write_byte_level

VOCAB_SIZE = 420
WAIT_S = 60.0  # for another thread: a test that waits this long has failed


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class GatedExecutor(FakeExecutor):
    """Each step waits until the test lets it run; `entered` says that one is waiting."""

    def __init__(self, limits: ExecutorLimits, **options: Any) -> None:
        super().__init__(limits, **options)
        self.entered = threading.Event()
        self.gate = threading.Semaphore(0)

    def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
        self.entered.set()
        assert self.gate.acquire(timeout=30), "the test forgot to let a step run"
        return super().run_rows(batch)

    def open(self) -> None:
        """Let every step run from now on."""
        self.gate.release(10_000)


def make_executor(
    limits: ExecutorLimits | None = None, *, fails_on: Callable[[StepBatch], bool] | None = None, right: float = 0.7
) -> FakeExecutor:
    return FakeExecutor(
        limits or make_limits(), vocab_size=VOCAB_SIZE, draft_rule=right_with_probability(right), fails_on=fails_on
    )


def make_loop(
    executor: FakeExecutor | None = None,
    *,
    overlaps: bool = False,
    clock: Callable[[], float] | None = None,
    **config: Any,
) -> EngineLoop:
    executor = executor or make_executor()
    return EngineLoop(
        executor, Scheduler(executor.limits, SchedulerConfig(**config)), overlaps=overlaps, clock=clock or Clock()
    )


def make_generator(
    executor: FakeExecutor | None = None, *, codec: TextCodec | None = None, seed: int | None = None, **options: Any
) -> Generator:
    eos_token_ids = options.pop("eos_token_ids", ())
    loop = make_loop(executor, **options)
    return Generator(loop, make_reader(loop, codec), eos_token_ids=eos_token_ids, seed=seed)


def make_reader(loop: EngineLoop, codec: TextCodec | None = None) -> RequestReader:
    return RequestReader(codec, vocab_size=VOCAB_SIZE, max_tokens=loop.limits.max_seq_len - 1)


def make_codec(path: Path) -> TextCodec:
    return TextCodec.open(write_byte_level(path, chat_template=CHAT_TEMPLATE))


def run(loop: EngineLoop, *, reads: Sequence[RequestStream] = (), max_steps: int = 2000) -> list[StreamChunk]:
    """Step, without a thread, until nothing is left; invariants checked after every step.

    Gives the chunks of `reads`, which are read after every step.
    """
    chunks: list[StreamChunk] = []
    for _ in range(max_steps):
        has_work = loop.step()
        loop.check_integrity()
        chunks += [chunk for stream in reads for chunk in stream.take_steps()]
        if not has_work:
            return chunks
    raise AssertionError("the requests do not come to an end")


def until(is_true: Any) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)
