"""`bench serve` against servers that answer by a script."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs the extra 'serve'")

from dflash_trt.bench import request_load
from dflash_trt.bench.conversation import Conversation, RequestRecord
from dflash_trt.bench.load_report import Limits, LoadReport, report_of
from dflash_trt.bench.openai_client import connected
from dflash_trt.bench.request_load import Load, LoadRun, run_load
from dflash_trt.bench.server_sweep import LoadError, Side, sweep_servers
from dflash_trt.core.errors import ConfigError
from tests.bench.scripted_server import ScriptedServer, running
from tests.serving.engines import Clock

PROMPT = Conversation(prompt="x", category="prose", fields={"max_tokens": 12})
FAST = [[0.0, 0.0]]
SLACK_S = 0.15  # of a busy machine


def run(server: ScriptedServer, load: Load, *conversations: Conversation, **fields: object) -> LoadRun:
    async def sent() -> LoadRun:
        async with connected(server.url, fields, model=None) as client:
            return await run_load(client, conversations or [PROMPT], load, seed=1)

    with running(server):
        return asyncio.run(sent())


def test_latencies_are_those_that_the_server_took() -> None:
    """TTFT is that of the first text, not of the empty event before it."""
    server = ScriptedServer([[0.3, 0.05, 0.1], [0.5, 0.05, 0.2]], tokens_per_event=2)
    done = run(server, Load(num_conversations=6, concurrency=1))
    for record, (asked, *sent) in zip(done.records, server.sent_s, strict=True):
        assert record.error is None
        assert 0 <= record.time_to_first_token_s - (sent[0] - asked) < SLACK_S
        assert 0 <= record.end_to_end_s - (sent[-1] - asked) < SLACK_S
        assert record.gaps_s == pytest.approx([sent[1] - sent[0], sent[2] - sent[1]], abs=SLACK_S)
        assert record.num_output_tokens == 6
        assert record.time_per_output_token_s == pytest.approx((sent[-1] - sent[0]) / 5, abs=SLACK_S / 5)
    report = report_of("s", Load(num_conversations=6, concurrency=1), [done], num_gpus=2, limits=Limits())
    assert report.time_to_first_token_s.p50 == pytest.approx(0.4, abs=SLACK_S)
    assert report.time_to_first_token_s.p99 == pytest.approx(0.5, abs=SLACK_S)
    assert report.duration_s == pytest.approx(sum(r.end_to_end_s for r in done.records), abs=SLACK_S * 3)
    assert report.output_tok_per_s == pytest.approx(36 / report.duration_s)
    assert report.output_tok_per_s_per_gpu == pytest.approx(report.output_tok_per_s / 2)
    assert done.max_client_lag_s < SLACK_S * 3
    assert {record.num_prompt_tokens for record in done.records} == {5}


def test_a_closed_load_has_as_many_requests_open_as_clients() -> None:
    server = ScriptedServer([[0.05]])
    done = run(server, Load(num_conversations=9, concurrency=3))
    assert len(done.records) == 9 and server.max_open == 3


@pytest.mark.parametrize(
    "load", [Load(num_conversations=2, concurrency=2), Load(num_conversations=2, request_rate_per_s=1e3)]
)
def test_a_load_lasts_until_its_last_token_whoever_gets_it(load: Load) -> None:
    done = run(ScriptedServer([[0.3], [0.0]]), load)
    ends = [record.ended_s for record in done.records]
    assert done.duration_s == max(ends) - min(record.started_s for record in done.records) >= 0.3
    assert abs(ends[0] - ends[1]) > 0.1


def test_a_load_begins_with_its_first_request_whichever_client_sent_it() -> None:
    times = iter([(5.0, 9.0), (3.0, 8.0), (6.0, 7.0), (7.0, 7.5)])

    async def ask(conversation: Conversation) -> list[RequestRecord]:
        started_s, ended_s = next(times)
        return [RequestRecord(category=None, started_s=started_s, content_s=(ended_s,))]

    client: Any = SimpleNamespace(ask=ask)
    done = asyncio.run(run_load(client, [PROMPT], Load(num_conversations=4, concurrency=2), seed=1))
    assert done.duration_s == 9.0 - 3.0 and len(done.records) == 4


def test_arrivals_at_a_rate_do_not_wait_for_answers() -> None:
    """Nine requests that take 0.4 s each, one after the other, would take 3.6 s."""
    server = ScriptedServer([[0.4]])
    done = run(server, Load(num_conversations=9, request_rate_per_s=50.0))
    assert server.max_open > 4
    assert 0.4 < done.duration_s < 2.0


def test_a_late_client_sends_the_next_request_when_it_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request keeps the client busy for half a second, which no later one is sent after where it had time."""
    clock, sleep, started = Clock(), asyncio.sleep, list[float]()

    async def asleep(seconds: float) -> None:
        until_s = clock.now + seconds
        await sleep(0)
        clock.now = max(clock.now, until_s)

    async def ask(conversation: Conversation) -> list[Any]:
        started.append(clock.now)
        clock.now += 0.5
        return []

    monkeypatch.setattr(request_load, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(asyncio, "sleep", asleep)
    client: Any = SimpleNamespace(ask=ask)
    asyncio.run(request_load._arrivals(client, iter([PROMPT] * 30), 1.0, random.Random(1)))
    dice, due_s, free_s = random.Random(1), started[0], 0.0
    for start_s in started:
        assert start_s == pytest.approx(max(due_s, free_s))
        due_s, free_s = due_s + dice.expovariate(1.0), start_s + 0.5


def test_the_lag_of_a_client_is_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lag, late_s = Clock(), request_load._ClientLag(), [0.1, 0.3, 0.2]

    async def asleep(seconds: float) -> None:
        if not late_s:
            raise asyncio.CancelledError
        clock.now += seconds + late_s.pop()

    monkeypatch.setattr(request_load, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(asyncio, "sleep", asleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(lag.watch())
    assert lag.max_s == pytest.approx(0.3)


def test_a_conversation_goes_on_with_its_answers() -> None:
    turns = tuple(({"role": "user", "content": text},) for text in ("one", "two"))
    server = ScriptedServer([[0.0, 0.0]])
    talk = Conversation(turns=turns, fields={"chat_template_kwargs": {"a": 1}})
    done = run(server, Load(num_conversations=1, concurrency=1), talk, temperature=0)
    assert server.paths == ["/v1/chat/completions"] * 2 and talk.num_requests == len(done.records) == 2
    first, second = server.bodies
    assert second["messages"] == [*first["messages"], {"role": "assistant", "content": "0 1 "}, *turns[1]]
    assert first["stream_options"] == {"include_usage": True} and first["temperature"] == 0
    assert first["model"] == "scripted" and first["chat_template_kwargs"] == {"a": 1}


@pytest.mark.parametrize(
    ("server", "word"),
    [
        (ScriptedServer(FAST, status=503), "status 503.*scripted refusal"),
        (ScriptedServer(FAST, cuts_stream=True), "without a finish_reason"),
        (ScriptedServer([[]]), "without a finish_reason"),
        (ScriptedServer(FAST, tokens_per_event=0), "no usage"),
    ],
)
def test_what_failed_is_an_error_and_no_measurement(server: ScriptedServer, word: str) -> None:
    with running(server):
        side = Side(name="s", open=lambda: nullcontext(server.url))
        with pytest.raises(LoadError, match=word):
            sweep([side])


def test_a_load_with_an_answer_is_measured_and_its_failures_are_counted() -> None:
    with running(ScriptedServer([[], [0.0], [0.0]])) as server, running(ScriptedServer(FAST)) as sound:
        side = Side(name="s", open=lambda: nullcontext(server.url), num_gpus=2)
        lines: list[tuple[int, int, str]] = []
        reports = sweep([side], limits=Limits(end_to_end_s=60.0), progress=lines)
        sweep([Side(name="s", open=lambda: nullcontext(sound.url))], progress=lines)
    assert ["1 errors" in text for _, _, text in lines] == [True, True, False, False]
    assert [(report.num_errors, report.num_requests) for report in reports] == [(1, 2), (1, 1)]
    for report in reports:
        assert report.output_tok_per_s_per_gpu == report.output_tok_per_s / 2
        assert report.good_fraction == report.num_requests / (report.num_requests + 1)


def test_fields_of_a_conversation_win_over_those_of_all_and_a_failed_turn_ends_it() -> None:
    turns = tuple(({"role": "user", "content": text},) for text in ("one", "two"))
    server = ScriptedServer(FAST, speculation={"num_spec_steps": 0}, status=503)
    done = run(server, Load(num_conversations=1, concurrency=1), Conversation(turns=turns, fields={"seed": 3}), seed=1)
    assert [body["seed"] for body in server.bodies] == [3]
    assert len(done.records) == 1 and done.records[0].error


def test_what_a_server_says_of_its_steps_is_kept_and_an_error_event_is_an_error() -> None:
    told = {"num_spec_steps": 2, "acceptance_histogram": [1, 1]}
    one = Load(num_conversations=1, concurrency=1)
    [record] = run(ScriptedServer(FAST, speculation=told), one).records
    assert record.speculation == told and record.error is None
    [record] = run(ScriptedServer(FAST, error="out of pages"), one).records
    assert record.error == "out of pages"


@pytest.mark.parametrize("key", ["text", "content", "reasoning_content"])
def test_a_text_is_that_of_completions_of_an_answer_or_of_its_reasoning(key: str) -> None:
    [record] = run(ScriptedServer(FAST, text_key=key), Load(num_conversations=1, concurrency=1)).records
    assert (record.text, len(record.content_s), record.error) == ("0 1 ", 2, None)


def test_arrivals_are_those_of_their_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    async def recorded(client: Any, conversations: Any, load: Load, *, seed: int) -> LoadRun:
        seeds.append(seed)
        return await run_load(client, conversations, load, seed=seed)

    monkeypatch.setattr("dflash_trt.bench.server_sweep.run_load", recorded)
    with running(ScriptedServer(FAST)) as server:
        sweep([Side(name="s", open=lambda: nullcontext(server.url))], num_rounds=2)
    assert seeds == [1, 1, 2, 2]


def test_a_url_without_a_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="an OpenAI server"):
        sweep([Side(name="s", open=lambda: nullcontext("http://127.0.0.1:9"))])


def test_servers_alternate_and_get_the_same_requests() -> None:
    opened: list[str] = []
    servers = {name: ScriptedServer([[0.001, 0.001]]) for name in "ab"}

    @contextmanager
    def open_side(name: str) -> Iterator[str]:
        opened.append(name)
        yield servers[name].url

    lines: list[tuple[int, int, str]] = []
    with running(servers["a"]), running(servers["b"]):
        sides = [Side(name=name, open=lambda name=name: open_side(name)) for name in "ab"]
        reports = sweep(sides, num_rounds=2, progress=lines)
    assert opened == ["a", "b", "a", "b"]
    assert [(report.server, report.concurrency) for report in reports] == [("a", 2), ("a", None), ("b", 2), ("b", None)]
    assert [len(report.output_tok_per_s_by_round) for report in reports] == [2] * 4
    assert [report.num_requests for report in reports] == [6, 4] * 2, "warm-up does not count"
    assert [body["max_tokens"] for body in servers["a"].bodies[:3]] == [8, 8, 12], (
        "what warms up is short, whatever a conversation asks for"
    )
    assert servers["a"].bodies == servers["b"].bodies
    assert [(number, of) for number, of, _ in lines] == [(number, 8) for number in range(1, 9)]
    assert lines[0][2].startswith("round 1, a, 2 clients: ")


def test_a_server_is_warmed_up_by_as_many_clients_as_its_largest_load_has() -> None:
    loads = [Load(num_conversations=count, concurrency=count) for count in (1, 3, 2)]
    loads.append(Load(num_conversations=1, request_rate_per_s=200.0))
    conversations = [PROMPT, Conversation(prompt="y")]
    with running(ScriptedServer(FAST)) as server:
        side = Side(name="s", open=lambda: nullcontext(server.url))
        sweep_servers([side], conversations, loads, fields={}, limits=Limits(), num_rounds=1, progress=lambda *_: None)
    warm = [body["prompt"] for body in server.bodies if body.get("max_tokens") == 8]
    assert sorted(warm) == ["x", "x", "y"] and len(server.bodies) == 3 + 1 + 3 + 2 + 1


def sweep(
    sides: list[Side],
    *,
    num_rounds: int = 1,
    progress: list[tuple[int, int, str]] | None = None,
    limits: Limits | None = None,
) -> list[LoadReport]:
    loads = [Load(num_conversations=3, concurrency=2), Load(num_conversations=2, request_rate_per_s=200.0)]
    told = [] if progress is None else progress
    return sweep_servers(
        sides,
        [PROMPT],
        loads,
        fields={"max_tokens": 16},
        limits=limits or Limits(),
        num_rounds=num_rounds,
        progress=lambda *line: told.append(line),
    )


@pytest.mark.slow
def test_a_served_engine_reports_what_it_says_itself(tmp_path: Path) -> None:
    """The demo behind Dynamo, started by the command; one request at a time accepts as `LLM` does."""
    pytest.importorskip("dynamo.common.backend", reason="needs the extra 'serve'")
    from dflash_trt.compile.build import build_engine
    from dflash_trt.core.acceptance import acceptance_length
    from dflash_trt.core.config import BuildConfig
    from dflash_trt.core.request import SamplingParams
    from dflash_trt.serving.llm import LLM
    from tests.docs.pages import ROOT

    demo = ROOT / "dflash_trt" / "demo"
    config = BuildConfig(target=str(demo / "target"), drafter=str(demo / "drafter"), dtype="float32")
    engine = tmp_path / "demo"
    build_engine(config, engine, base_dir=demo, overwrite=False, command=["test"], progress=lambda _: None)
    texts = ["def fibonacci(n):\n", "import os\n"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text, "category": "code"}) + "\n" for text in texts))
    words = ["bench", "serve", str(engine), "--autoregressive", "--input-file", str(rows), "--concurrency", "1"]
    words += ["--requests-per-client", "2", "--rounds", "1", "--max-new-tokens", "32", "--ignore-eos"]
    words += ["--num-threads", "1", "--figure", str(tmp_path / "f.svg"), "--json"]
    command = [sys.executable, "-m", "dflash_trt.cli.main", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert ran.returncode == 0, ran.stderr
    plain, drafted = json.loads(ran.stdout)["reports"]
    with LLM(engine, num_threads=1) as llm:
        outputs = llm.generate(texts, SamplingParams(max_new_tokens=32, ignore_eos=True))
    assert plain["acceptance"] is None and plain["num_output_tokens"] == drafted["num_output_tokens"] == 64
    assert drafted["acceptance"]["length"] == pytest.approx(acceptance_length(outputs))
    assert drafted["acceptance_by_category"]["code"] == drafted["acceptance"]
    assert "demo, autoregressive" in (tmp_path / "f.svg").read_text()


def test_each_round_of_a_side_has_its_model_and_its_arrivals(monkeypatch) -> None:
    """The same arrivals for every side, others for every round."""
    asked: list[tuple[str, str | None, int]] = []

    async def turn(url: str, conversations: object, loads: list[Load], **options: Any) -> list[LoadRun]:
        assert (conversations, options["fields"]) == ([PROMPT], {"top_k": 1})
        asked.append((url, options["model"], options["seed"]))
        return [LoadRun(records=(), duration_s=1.0, max_client_lag_s=0.0) for _ in loads]

    monkeypatch.setattr("dflash_trt.bench.server_sweep._turn", turn)
    monkeypatch.setattr("dflash_trt.bench.server_sweep._check", lambda *_: None)
    sides = [
        Side(name=name, open=lambda name=name: nullcontext(name), model=model)
        for name, model in (("a", "m"), ("b", None))
    ]
    sweep_servers(
        sides, [PROMPT], [Load(num_conversations=1, concurrency=1)],
        fields={"top_k": 1}, limits=Limits(), num_rounds=2, progress=lambda *_: None,
    )  # fmt: skip
    assert asked == [("a", "m", 1), ("b", None, 1), ("a", "m", 2), ("b", None, 2)]
