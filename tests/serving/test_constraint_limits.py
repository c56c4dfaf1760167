"""Constraints that crash, stop or deceive a compiler: each is an error of its own request, and nobody waits for it."""

import asyncio
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from llguidance import LLParserLimits

from dflash_trt.cli.main import cli
from dflash_trt.core.errors import RequestError
from dflash_trt.core.request import SamplingParams
from dflash_trt.servers.dynamo.service import EngineService
from dflash_trt.servers.triton.metrics import MetricBook
from dflash_trt.servers.triton.service import EngineService as TritonService
from dflash_trt.servers.triton.settings import ModelSettings
from dflash_trt.serving import grammar_trial, mask_threads
from dflash_trt.serving.grammar import GrammarCompiler, GrammarMatcher
from dflash_trt.serving.llm import LLM
from tests.factories import make_target, make_zlab_drafter
from tests.serving.engines import until
from tests.serving.test_structured_output import build
from tests.triton_server.fake_series import FakeSeries
from tests.triton_server.test_service import ask


def chain(num_rules: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(num_rules)) + f'\nr{num_rules}: "a"'


def ambiguous(num_rules: int) -> str:
    """Rules that all begin and end at every place: the time for a token grows with the square of their number."""
    rules = "\n".join(f"r{i}: /[a-z ]{{1,{i + 1}}}/ start?" for i in range(num_rules))
    return f"start: {' | '.join(f'r{i}' for i in range(num_rules))}\n{rules}"


BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "overflows the stack": ({"grammar": chain(5000)}, "without a crash, found a process ended by SIGSEGV"),
    "overflows a small stack": ({"grammar": chain(2000)}, "without a crash, found a process ended by SIGSEGV"),
    "repeats": ({"regex": "a{1000000}"}, "too many expressions constructed"),
    "repeats repetitions": ({"regex": "(x{1000}){1000}"}, "too many expressions constructed|more than 0.25 s"),
    "is long": ({"regex": "a" * 10**6}, "too many expressions constructed|more than 0.25 s|takes longer"),
    "is optional": ({"regex": "a?" * 3000 + "a" * 3000}, "too many expressions constructed|lexer"),
    "is one long choice": ({"choice": ["a" * 2**20]}, "too many expressions constructed|more than 0.25 s|takes longer"),
    "is many choices": ({"choice": [f"c{i:05}" for i in range(10_000)]}, "Current row has 10001 items"),
    "refers to itself": ({"grammar": 'start: %json {"$ref":"#"}'}, "no text matches"),
    "matches nothing": ({"regex": r"[^\s\S]"}, "no text matches"),
    "is ambiguous": ({"grammar": ambiguous(1000)}, "more than 0.25 s|takes longer|Too many items"),
    "is nested": ({"json_schema": '{"anyOf":[' * 100 + "{}" + "]}" * 100}, "recursion limit exceeded"),
}
# Those that take long are refused in the same place: here they come through LLM alone.
QUICK = [BOMBS[name] for name in BOMBS if name not in ("repeats repetitions", "is long", "is one long choice")]
HARMLESS = SamplingParams(regex="ab{2}c", max_new_tokens=9)


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("limits")
    target = make_target(path / "target")
    return build(target, make_zlab_drafter(path / "drafter", target_dir=target, block_size=8), path / "engine")


@pytest.fixture(scope="module")
def llm(engine_dir: Path) -> Iterator[LLM]:
    with LLM(engine_dir) as llm:
        yield llm


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_an_error_of_its_own_request(llm: LLM, name: str) -> None:
    fields, said = BOMBS[name]
    (field,) = fields
    with pytest.raises(RequestError, match=f"sampling {field}: .*({said})"):
        llm.generate("x", SamplingParams(**fields))
    assert llm.generate("x", HARMLESS).text == "abbc"
    llm.check_integrity()


def test_every_row_of_run_with_a_bomb_is_an_error_and_the_others_are_written(engine_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "x", "regex": "ab{2}c"}, *({"prompt": "x", **fields} for fields, _ in QUICK)]
    source, results = tmp_path / "rows.jsonl", tmp_path / "results.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    CliRunner().invoke(cli, ["run", str(engine_dir), "--input-file", str(source), "--output-file", str(results)])
    good, *bad = map(json.loads, results.read_text().splitlines())
    assert good["text"] == "abbc"
    for row, (fields, said) in zip(bad, QUICK, strict=True):
        (field,) = fields
        assert row["finish_reason"] == "error" and re.search(f"sampling {field}: .*({said})", row["error"])


def test_every_bomb_is_an_error_of_its_own_request_in_triton(llm: LLM) -> None:
    """Through the service that reads Triton's tensors; without its server."""
    book = MetricBook(FakeSeries(), max_draft_len=llm.limits.max_draft_len)  # type: ignore[arg-type]
    service = TritonService(llm, ModelSettings(engine_dir=""), vocab_size=272, book=book)
    for i, (fields, said) in enumerate(QUICK):
        (field,) = fields
        client = ask(service, **({"input_ids": [5, 6]} if i % 2 else {"text_input": "x"}), **fields)
        assert client.ended.wait(60) and client.error is not None
        assert re.search(f"sampling {field}: .*({said})", client.error[0]), client.error
    client = ask(service, text_input="x", regex="ab{2}c")
    assert client.ended.wait(60) and client.error is None
    service.close()


def guided(field: str, value: Any) -> dict[str, Any]:
    name = {"json_schema": "json"}.get(field, field)
    return {"token_ids": [5, 6], "sampling_options": {"guided_decoding": {name: value}}, "stop_conditions": {}}


async def first_item(service: EngineService, request: dict[str, Any]) -> Any:
    items = service.generate(request, "id", lambda: False)
    try:
        return await anext(items)
    finally:
        await items.aclose()


def test_every_bomb_is_an_error_of_its_own_request_in_serve_and_its_event_loop_goes_on(llm: LLM) -> None:
    """Through the service that Dynamo's worker calls."""
    service = EngineService(llm, sampling_defaults={})

    async def pauses() -> list[float]:
        found = []
        while True:
            started = time.monotonic()
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                return found
            found.append(time.monotonic() - started)

    async def attack() -> float:
        clock = asyncio.create_task(pauses())
        await asyncio.sleep(0)
        for fields, said in QUICK:
            ((field, value),) = fields.items()
            with pytest.raises(RequestError, match=f"sampling {field}: .*({said})"):
                await first_item(service, guided(field, value))
        clock.cancel()
        assert await first_item(service, guided("regex", "ab{2}c"))
        return max(await clock, default=math.inf)

    assert asyncio.run(attack()) < 0.5  # measured: see the tests of streams


def test_a_request_that_left_while_its_constraint_compiled_is_cancelled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, compiles = EngineService(llm, sampling_defaults={}), threading.Event()
    right = GrammarCompiler.compile

    def compile_late(self: GrammarCompiler, sampling: SamplingParams) -> Any:
        compiles.wait(30)
        return right(self, sampling)

    async def leave() -> None:
        request = guided("regex", "a*b") | {"stop_conditions": {"max_tokens": 500, "ignore_eos": True}}
        asking = asyncio.create_task(first_item(service, request))
        await asyncio.sleep(0.1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        compiles.set()

    monkeypatch.setattr(GrammarCompiler, "compile", compile_late)
    asyncio.run(leave())
    until(lambda: llm.statistics.scheduler.num_running_now == 0)  # type: ignore[union-attr]
    llm.check_integrity()


def test_a_stream_flows_while_a_bomb_is_tried(llm: LLM) -> None:
    llm.generate("x", HARMLESS)
    times, bomb = [], []

    def explode() -> None:
        bomb.append(time.monotonic())
        with pytest.raises(RequestError):
            llm.generate("x", SamplingParams(grammar=ambiguous(1400)))
        bomb.append(time.monotonic())

    bomber = threading.Thread(target=explode)
    bomber.start()
    while bomber.is_alive():
        stream = llm.stream("y", SamplingParams(max_new_tokens=100, ignore_eos=True))
        times += [time.monotonic() for _ in stream]
    during = [bomb[0], *(at for at in times if bomb[0] < at < bomb[1])]
    assert bomb[1] - bomb[0] > 1 and len(during) > 20
    assert max(after - before for before, after in pairwise(during)) < 1.0  # of 3 to 4 s that the bomb is tried


@pytest.mark.parametrize("num_draft_tokens", [0, 7])
def test_a_constraint_that_fails_in_the_middle_of_a_text_is_an_error(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, num_draft_tokens: int
) -> None:
    """Not the end of the text, though the matcher counts as stopped. Its mates go on."""
    monkeypatch.setattr(grammar_trial, "_LIMITS", LLParserLimits(max_items_in_row=20, verbose_errors=False))
    growing = SamplingParams(grammar='start: e\ne: "a" | "a" e "b" | e e', max_new_tokens=100, ignore_eos=True)
    with LLM(engine_dir, draft_length=num_draft_tokens) as llm:
        monkeypatch.setattr("dflash_trt.serving.grammar.Vocabulary.try_out", lambda *_: None)  # its limits are others
        bad, good = llm.generate(["x", "y"], [growing, HARMLESS])
        llm.check_integrity()
    assert bad.finish_reason == "error" and len(bad.token_ids) > 0
    assert (
        bad.error and "grammar: expected tokens that it allows, found" in bad.error and "items; max is 20" in bad.error
    )
    assert (good.text, good.finish_reason) == ("abbc", "stop")


@pytest.mark.parametrize("method", ["_fill", "_advance", "_num_allowed"])
def test_a_late_token_fails_its_request_and_the_others_go_on(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(mask_threads, "TIME_LIMIT_S", 0.2)
    release, right = threading.Event(), getattr(GrammarMatcher, method)
    late: list[GrammarMatcher] = []

    def delayed(matcher: GrammarMatcher, *arguments: Any) -> Any:
        late.extend([] if late else [matcher])
        if late[0] is matcher:
            release.wait(30)
        return right(matcher, *arguments)

    monkeypatch.setattr(GrammarMatcher, method, delayed)
    samplings = [SamplingParams(regex=f"[a-z]{{{20 + i}}}", max_new_tokens=30) for i in range(4)]
    with LLM(engine_dir) as llm:
        outputs = llm.generate(["x"] * 4, samplings)
        release.set()
        llm.check_integrity()
    failed = [output for output in outputs if output.finish_reason == "error"]
    assert len(failed) == 1 and "takes more than" in str(failed[0].error)
    assert sorted(len(o.text or "") for o in outputs if o.finish_reason == "stop") == [
        20 + i for i in range(4) if outputs[i].finish_reason == "stop"
    ]


def test_a_constraint_that_passed_is_tried_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    again = SamplingParams(json_schema=json.dumps({"const": 1}), max_new_tokens=9)
    first = llm.generate("x", again)
    monkeypatch.setattr("dflash_trt.serving.grammar.Vocabulary.try_out", lambda *_: pytest.fail("tried again"))
    assert llm.generate("x", again).text == first.text == "1"


def test_the_constraint_that_was_used_longest_ago_is_forgotten(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.codec is not None
    compiler, tried = GrammarCompiler(llm.codec.backend, vocab_size=272), list[str]()
    compiler.compile(SamplingParams(regex="z"))
    monkeypatch.setattr("dflash_trt.serving.grammar._MAX_COMPILED", 2)
    monkeypatch.setattr("dflash_trt.serving.grammar.Vocabulary.try_out", lambda _, field, text: tried.append(text))
    found = [compiler.compile(SamplingParams(regex=text)) for text in "zazbazb"]
    assert "".join(tried) == "abazb"
    assert found[0] is found[2]
