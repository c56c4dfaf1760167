"""LLM's methods and the Triton model's service over an engine that is not ours: they need no more than Engine."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from dflash_trt.core.request import SamplingParams
from dflash_trt.servers.triton.metrics import MetricBook
from dflash_trt.servers.triton.service import EngineService
from dflash_trt.servers.triton.settings import ModelSettings
from dflash_trt.serving.engine import Engine
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.request_reader import RequestReader
from tests.serving.echo_engine import EchoEngine
from tests.serving.engines import make_codec
from tests.triton_server.fake_series import FakeSeries
from tests.triton_server.test_service import ask

VOCAB_SIZE = 272
LONG = SamplingParams(max_new_tokens=40)


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture
def generator(engine: Engine, tmp_path) -> Iterator[Generator]:
    with Generator(engine, RequestReader(make_codec(tmp_path), vocab_size=VOCAB_SIZE)) as generator:
        yield generator


def test_another_engine_generates_streams_and_stops(generator) -> None:
    tokens, text = generator.generate([[40, 41, 42], "hello"], LONG)
    assert (tokens.token_ids, tokens.finish_reason) == ((40, 41, 42), "length")
    assert text.text == "hello"
    (stopped,) = generator.generate(["hello"], SamplingParams(stop=["l"]))
    assert (stopped.text, stopped.finish_reason) == ("he", "stop")
    assert "".join(chunk.text for chunk in generator.stream("hello", LONG)) == "hello"
    (refused,) = generator.generate([[VOCAB_SIZE]])
    assert refused.finish_reason == "error"
    generator.check_integrity()


def test_requests_of_another_engine_are_cancelled_and_counted(engine, generator) -> None:
    engine.may_go_on.clear()
    stream = generator.submit([1, 2, 3], LONG)
    assert (generator.statistics.num_waiting_now, generator.statistics.scheduler) == (1, None)
    stream.cancel()
    assert stream.result(10).finish_reason == "cancelled"
    assert generator.statistics.num_requests_by_finish_reason == {"cancelled": 1}
    assert generator.statistics.as_dict()["scheduler"] is None


def test_the_service_answers_for_another_engine(engine, generator) -> None:
    series = FakeSeries()
    book = MetricBook(series, max_draft_len=generator.limits.max_draft_len)
    service = EngineService(generator, ModelSettings(engine_dir=""), vocab_size=VOCAB_SIZE, book=book)
    told = ask(service, input_ids=[40, 41, 42], max_tokens=2)
    assert told.ended.wait(10)
    assert told.token_ids == [40, 41]
    engine.may_go_on.clear()
    gone = ask(service, text_input="hello")
    gone.leaves.set()
    assert gone.ended.wait(10)
    service.close()
    assert series.values["requests_total", "length"] == series.values["requests_total", "cancelled"] == 1
    assert (series.values["output_tokens_total", ""], series.values["requests_waiting", ""]) == (2, 0)


def test_the_servers_know_no_scheduler_loop_or_executor() -> None:
    program = (
        "import sys, dflash_trt.servers.triton.service, dflash_trt.servers.triton.repository\n"
        "known = ('scheduler', 'executor', 'backends', 'serving.engine_loop', 'serving.local_engine')\n"
        "names = tuple(f'dflash_trt.{name}' for name in known)\n"
        "print([name for name in sys.modules if name.startswith(names)])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
