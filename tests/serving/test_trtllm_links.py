"""The words of trtllm-serve and of the worker's process, as answers of a request; no TensorRT-LLM, no stand-in."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.core.errors import EngineDirError
from dflash_trt.core.logprobs import PromptLogprob, TokenLogprob
from dflash_trt.serving.tensorrt_llm import server as server_module
from dflash_trt.serving.tensorrt_llm.link import Answer
from dflash_trt.serving.tensorrt_llm.process import _answer
from dflash_trt.serving.tensorrt_llm.server import Server
from dflash_trt.serving.tensorrt_llm.worker import Worker, _prompt_scores, _scores
from tests.serving.engines import until


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"kind": "tokens", "token_ids": [1, 2]}, {"token_ids": (1, 2)}),
        (
            {"kind": "tokens", "token_ids": [1], "logprobs": [-0.5], "top": [[[1, -0.5], [2, -1.0]]]},
            {"token_ids": (1,), "logprobs": (-0.5,), "top": ((TokenLogprob(1, -0.5), TokenLogprob(2, -1.0)),)},
        ),
        ({"kind": "end", "reason": "stop"}, {"finish_reason": "stop"}),
        ({"kind": "end", "reason": "length"}, {"finish_reason": "length"}),
        ({"kind": "end", "reason": "timeout"}, {"finish_reason": "timeout"}),
        ({"kind": "end", "reason": "cancelled"}, {"finish_reason": "cancelled"}),
        ({"kind": "end", "reason": "error", "error": "no"}, {"finish_reason": "error", "error": "no"}),
        ({"kind": "end", "reason": "odd"}, {"finish_reason": "error", "error": "TensorRT-LLM ended it with 'odd'"}),
    ],
)
def test_a_line_of_the_worker_is_an_answer(message: dict[str, Any], expected: dict[str, Any]) -> None:
    assert _answer({"id": "a"} | message) == Answer(request_id="a", **expected)


def test_log_probabilities_of_a_prompt_come_with_its_first_tokens() -> None:
    line = {"kind": "tokens", "id": "a", "token_ids": [1]}
    scores = {"logprobs": [-4.0, -1.0], "top": [[[9, -0.25]], [[8, -0.5]]]}
    prompt = _answer(line | {"prompt": scores}).prompt
    top = [(TokenLogprob(9, -0.25),), (TokenLogprob(8, -0.5),)]
    expected = (None, PromptLogprob(2, -4.0, top[0]), PromptLogprob(3, -1.0, top[1]))
    assert prompt is not None and prompt.entries((1, 2, 3)) == expected
    alone = _answer(line | {"prompt": {"logprobs": [], "top": []}}).prompt
    assert alone is not None and alone.entries((1,)) == (None,)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], {}),
        ([-0.5, -1.0], {"logprobs": [-0.5, -1.0]}),
        ([{3: -0.5}, {8: -0.25, 4: -1.0}], {"logprobs": [-0.5, -1.0], "top": [[(3, -0.5)], [(8, -0.25), (4, -1.0)]]}),
    ],
)
def test_log_probabilities_are_said_as_numbers(entries: list[Any], expected: dict[str, Any]) -> None:
    """TensorRT-LLM gives floats, or a Logprob by token id, the emitted token's in any place."""
    rows = [
        {token: SimpleNamespace(logprob=value) for token, value in entry.items()} if isinstance(entry, dict) else entry
        for entry in entries
    ]
    assert _scores([3, 4], rows) == expected


def test_an_entry_of_the_prompt_is_for_the_token_after_it() -> None:
    """The last one is the first new token's; of the others, N most likely tokens, whatever the token's own rank."""
    rows = [{9: -0.25, 2: -4.0}, {8: -0.5, 3: -1.0}, {7: -0.125}]
    entries = [{token: SimpleNamespace(logprob=value) for token, value in row.items()} for row in rows]
    found = _prompt_scores([1, 2, 3], 1, entries)
    assert found == {"prompt": {"logprobs": [-4.0, -1.0], "top": [[(9, -0.25)], [(8, -0.5)]]}}
    assert _prompt_scores([1], 1, entries[2:]) == {"prompt": {"logprobs": [], "top": []}}
    with pytest.raises(ValueError, match="2 entries of prompt_logprobs for 3 tokens"):
        _prompt_scores([1, 2, 3], 1, entries[1:])


class Running:
    """What TensorRT-LLM gives for a request: it runs until it is aborted."""

    def __init__(self) -> None:
        self.is_aborted = asyncio.Event()
        self.abort = self.is_aborted.set

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7], finish_reason=None, logprobs=[])])
        await self.is_aborted.wait()


def test_the_worker_ends_a_request_when_it_is_told_and_all_when_the_other_end_hangs_up() -> None:
    async def serve() -> tuple[list[bool], list[bool], list[dict[str, Any]]]:
        running, lines = list[Running](), list[bytes]()

        def generate_async(prompt: list[int], **options: Any) -> Running:
            assert (prompt, options) == ([1, 2], {"sampling_params": {"seed": 3}, "streaming": True})
            running.append(Running())
            return running[-1]

        reader, writer = asyncio.StreamReader(), SimpleNamespace(write=lines.append)
        llm: Any = SimpleNamespace(generate_async=generate_async)
        serving = asyncio.create_task(Worker(llm, dict, reader, writer).serve())  # type: ignore[arg-type]
        for name in "abc":
            request = {"kind": "request", "id": name, "prompt": [1, 2], "params": {"seed": 3}}
            reader.feed_data(json.dumps(request).encode() + b"\n")
        while len(lines) < 3:
            await asyncio.sleep(0.001)
        for name in ("unknown", "b"):
            reader.feed_data(json.dumps({"kind": "cancel", "id": name}).encode() + b"\n")
        while len(lines) < 4:
            await asyncio.sleep(0.001)
        told = [each.is_aborted.is_set() for each in running]
        reader.feed_eof()
        await serving
        return told, [each.is_aborted.is_set() for each in running], [json.loads(line) for line in lines]

    told, at_the_end, said = asyncio.run(asyncio.wait_for(serve(), 30))
    assert (told, at_the_end) == ([False, True, False], [True, True, True])
    assert said[:4] == [
        *({"kind": "tokens", "id": name, "token_ids": [7]} for name in "abc"),
        {"kind": "end", "id": "b", "reason": "cancelled"},
    ]


class Handler(BaseHTTPRequestHandler):
    """Below /base, as a proxy may have it; `lines` are its answer to every completion."""

    server: Any

    def do_GET(self) -> None:
        self._begin(200 if self.path == "/base/v1/models" else 404)
        self.wfile.write(json.dumps(self.server.models).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        self._begin(self.server.status)
        for line in self.server.lines:
            self.wfile.write(line.encode() + b"\n\n")
        self.wfile.flush()
        if self.server.hangs:
            self.server.hung_up.append(self.rfile.read(1) == b"")

    def _begin(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def http() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.models, server.asked, server.status, server.lines = {"data": [{"id": "m"}]}, [], 200, []
    server.hangs, server.hung_up = False, []
    server.url = f"http://127.0.0.1:{server.server_address[1]}/base/"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@contextmanager
def listening(http: Any) -> Iterator[tuple[Server, list[Answer], threading.Semaphore]]:
    link, answers, came = Server(http.url), list[Answer](), threading.Semaphore(0)

    def take(answer: Answer) -> None:
        answers.append(answer)
        came.release()

    link.start(take, lambda reason: None)
    yield link, answers, came
    link.close()


def event(**choice: Any) -> str:
    return "data: " + json.dumps({"choices": [{"finish_reason": None, "token_ids": None} | choice]})


TOKENS = event(token_ids=[1, 2])
HUNG_UP = "trtllm-serve hung up"


@pytest.mark.parametrize(
    ("lines", "ends"),
    [
        ([TOKENS, event(token_ids=[3], finish_reason="stop"), "data: [DONE]"], [((1, 2), None), ((3,), "stop")]),
        ([": a comment", TOKENS, event(finish_reason="length")], [((1, 2), None), ((), "length")]),
        ([TOKENS, 'data: {"choices": [], "usage": {}}', "data: [DONE]"], [((1, 2), None), ((), HUNG_UP)]),
        ([TOKENS], [((1, 2), None), ((), HUNG_UP)]),
        ([TOKENS, event(finish_reason="odd")], [((1, 2), None), ((), "it ended with 'odd'")]),
        (['data: {"error": "lost"}'], [((), "trtllm-serve: OSError: lost")]),
        ([event(text="x")], [((), "no token_ids in its answer: expected TensorRT-LLM 1.4 or newer")]),
        (["data: {"], [((), "trtllm-serve: JSONDecodeError")]),
        ([event(finish_reason="stop"), TOKENS], [((), "stop")]),
    ],
)
def test_events_of_a_completion_are_answers(http: Any, lines: list[str], ends: list[Any]) -> None:
    http.lines = lines
    with listening(http) as (link, answers, came):
        link.send("a", (5, 6), {"max_tokens": 3})
        for _ in ends:
            assert came.acquire(timeout=30)
        until(lambda: link._sockets == {})
    assert http.asked == [("/base/v1/completions", {"model": "m", "prompt": [5, 6], "stream": True, "max_tokens": 3})]
    assert len(answers) == len(ends) and {answer.request_id for answer in answers} == {"a"}
    for answer, (token_ids, end) in zip(answers, ends, strict=True):
        assert answer.token_ids == token_ids
        if answer.finish_reason == "error":
            assert end in str(answer.error)
        else:
            assert (answer.finish_reason, answer.error) == (end, None)


def test_a_status_is_told_with_what_the_server_says(http: Any) -> None:
    http.status, http.lines = 400, ["no such field"]
    with listening(http) as (link, answers, came):
        link.send("a", (5,), {})
        assert came.acquire(timeout=30)
    assert answers[0].finish_reason == "error" and "status 400: no such field" in str(answers[0].error)


@pytest.mark.parametrize("way", ["cancel", "close"])
def test_a_request_that_is_given_up_hangs_up(http: Any, way: str) -> None:
    http.lines, http.hangs = [TOKENS], True
    with listening(http) as (link, _, came):
        link.send("a", (5,), {})
        assert came.acquire(timeout=30)
        link.cancel("unknown")
        if way == "cancel":
            link.cancel("a")
        else:
            link.close()
        assert came.acquire(timeout=30)  # an end that the engine no longer waits for
        assert link._sockets == {}
    until(lambda: http.hung_up == [True])


def test_a_request_that_is_cancelled_before_it_is_sent_reads_no_answer(
    http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    http.lines = [TOKENS, event(finish_reason="stop")]
    connects, may_connect = threading.Event(), threading.Event()
    request = server_module.HTTPConnection.request

    def late(self: Any, method: str, *words: Any, **options: Any) -> None:
        if method == "POST":
            connects.set()
            assert may_connect.wait(30)
        request(self, method, *words, **options)

    monkeypatch.setattr(server_module.HTTPConnection, "request", late)
    with listening(http) as (link, answers, _):
        link.send("a", (5,), {})
        assert connects.wait(30)
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "dflash-trtllm-a")
        link.cancel("a")
        may_connect.set()
        thread.join(30)
    assert answers == []


@pytest.mark.parametrize("models", [{"data": []}, {"data": [{}]}, [], {"data": None}])
def test_a_server_that_lists_no_model_is_refused(http: Any, models: Any) -> None:
    http.models = models
    with pytest.raises(EngineDirError, match="expected a running trtllm-serve"):
        Server(http.url)


def test_a_url_is_one_of_http(http: Any) -> None:
    assert Server(http.url).model == "m"
    for url in ("localhost:8000", "ftp://localhost", "http://", "file:///x"):
        with pytest.raises(EngineDirError, match="expected an http or https URL"):
            Server(url)
    with pytest.raises(EngineDirError, match="expected a running trtllm-serve, found"):
        Server(http.url.replace("/base/", "/other/"))
    with pytest.raises(EngineDirError, match="found SSLError"):
        Server(http.url.replace("http:", "https:"))
