"""The gateway before a scripted front end: events that the network cuts, losses in the middle, and errors."""

import asyncio
import io
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs the extra 'serve'")

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from dflash_trt.servers.dynamo import gateway
from dflash_trt.servers.dynamo.api_fields import read_api_request
from dflash_trt.servers.dynamo.connections import BACKLOG, max_connections
from dflash_trt.servers.dynamo.event_streams import events
from dflash_trt.servers.dynamo.gateway import Gateway, make_app, open_gateway
from dflash_trt.servers.dynamo.settings import GatewaySettings, PromptLimits
from tests.servers.dynamo.serving import free_ports

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def chunk(text: str, **more: Any) -> bytes:
    return b"data: " + json.dumps({"id": text, "choices": [{"index": 0, "text": text}]} | more).encode() + b"\n\n"


def settings(url: str, *, port: int = 0) -> GatewaySettings:
    return GatewaySettings(
        host="127.0.0.1",
        port=port,
        frontend_url=url,
        prompts=PromptLimits(max_tokens=50, max_text_bytes=1000, vocab_size=99),
        has_tool_call_parser=False,
    )


def through_gateway(
    handler: Handler,
    body: Any,
    *,
    path: str = "/v1/completions",
    method: str = "POST",
    headers: Any = None,
    models: Sequence[str] = ("demo",),
) -> tuple[int, bytes]:
    """Status and body of a request; `handler` is the front end, which lists `models`."""

    async def listed(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": model} for model in models]})

    async def run() -> tuple[int, bytes]:
        front = web.Application()
        front.router.add_get("/v1/models", listed)
        front.router.add_route("*", "/{path:.*}", handler)
        async with TestServer(front) as server:
            app = make_app(Gateway(settings(str(server.make_url("")).rstrip("/")), limit=20))
            async with TestServer(app) as door, ClientSession() as session:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                answer = await session.request(method, door.make_url(path), data=io.BytesIO(content), headers=headers)
                return answer.status, await answer.read()

    return asyncio.run(run())


async def unreachable(request: web.Request) -> web.StreamResponse:
    raise AssertionError("the front end was asked")


def refusal(body: Any, status: int = 400, **options: Any) -> str:
    """The message of a request that the front end does not see."""
    found, answer = through_gateway(unreachable, body, **options)
    error = json.loads(answer)["error"]
    assert (found, error["code"]) == (status, status), answer
    message: str = error["message"]
    return message


def streams(*pieces: bytes, dies: bool = False) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.01)
        if dies:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handler


def test_events_are_whole_however_the_network_cuts_them() -> None:
    wire = chunk("a") + chunk("b") + b"data: [DONE]\n\n"

    async def cut(wire: bytes, size: int) -> list[bytes]:
        async def pieces() -> Any:
            for first in range(0, len(wire), size):
                yield wire[first : first + size]

        return [event async for event in events(pieces())]

    whole = wire.rstrip().split(b"\n\n")
    for ending in (b"", b"\n", b"\n\n", b"\n\n\n"):
        found = [asyncio.run(cut(wire.rstrip() + ending, size)) for size in (1, 2, 7, 1000)]
        assert [[event.rstrip() for event in each] for each in found] == [whole] * 4


def test_a_stream_passes_with_what_speculation_did_at_its_root() -> None:
    told = {"metrics": {"speculative_decoding": {"num_spec_steps": 3}}}
    last = chunk("b", nvext={"engine_data": told})
    sent = [chunk("a"), last[:40], last[40:] + b"data: [DONE]\n\n"]
    status, body = through_gateway(streams(*sent), {"prompt": "x", "stream": True})
    first, second, done = body.rstrip().split(b"\n\n")
    assert (status, first + b"\n\n", done) == (200, chunk("a"), b"data: [DONE]")
    assert json.loads(second[6:]) == json.loads(chunk("b")[6:]) | told


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("dies", [True, False])
def test_a_stream_that_is_cut_ends_with_an_error(num_samples: int, dies: bool) -> None:
    asked = {"prompt": "x", "stream": True, "n": num_samples}
    status, body = through_gateway(streams(chunk("a"), dies=dies), asked)
    *_, error, done, rest = body.split(b"\n\n")
    assert (status, done, rest) == (200, b"data: [DONE]", b"")
    assert json.loads(error[6:])["error"]["code"] == 503
    assert b'"text"' in body


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error": {"message": "lost", "type": "Service Unavailable", "code": 503}}',
        b'data: {"error": "lost", "code": 503}',
        b'event: error\ndata: {"message": "lost", "code": 503}',
        b"event: error\ndata: lost",
    ],
)
def test_an_error_in_one_sample_ends_the_stream_with_it(num_samples: int, event: bytes) -> None:
    asked = {"prompt": "x", "stream": True, "n": num_samples}
    _, body = through_gateway(streams(chunk("a"), event + b"\n\n", b"data: [DONE]\n\n"), asked)
    *_, error, done, _ = body.split(b"\n\n")
    assert (json.loads(error[6:])["error"]["message"], done) == ("lost", b"data: [DONE]")
    assert body.count(b"lost") == 1


def test_a_text_about_an_error_is_no_error() -> None:
    said = chunk('{"error": "no"}')
    assert through_gateway(streams(said, b"data: [DONE]\n\n"), {"prompt": "x", "stream": True})[1].startswith(said)


def test_a_response_that_is_cut_ends_with_the_event_of_its_api() -> None:
    _, body = through_gateway(streams(dies=True), {"input": "x", "stream": True}, path="/v1/responses")
    name, data = body.split(b"\n\n")[-3].split(b"\n")
    assert (name, json.loads(data[6:])["type"]) == (b"event: error", "error")


def test_a_refusal_of_the_front_end_is_passed_on() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"message": "no", "type": "Too Many Requests", "code": 429}, status=429)

    for body in ({"prompt": "x"}, {"prompt": "x", "n": 3}, {"prompt": "x", "n": 2, "stream": True}):
        status, answer = through_gateway(refuse, body)
        error = {"message": "no", "type": "Too Many Requests", "param": None, "code": 429}
        assert (status, json.loads(answer)) == (429, {"error": error})


async def unknown(request: web.Request) -> web.StreamResponse:
    return web.Response(status=404)


def test_a_model_is_unknown_only_while_there_are_others() -> None:
    status, answer = through_gateway(unknown, {"model": "other", "prompt": "x"})
    assert status == 404 and "expected demo, found 'other'" in json.loads(answer)["error"]["message"]
    assert through_gateway(unknown, {"model": "demo", "prompt": "x"}, models=())[0] == 503


@pytest.mark.parametrize(("status", "answer"), [(404, {"message": "no"}), (500, "no"), (503, {"error": "no"})])
def test_what_the_front_end_does_not_have_is_passed_on_as_an_error(status: int, answer: Any) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response(answer, status=status)

    found, body = through_gateway(refuse, b"", path="/v1/models/other", method="GET")
    error = json.loads(body)["error"]
    assert (found, error["code"], error["message"]) == (status, status, "no")


def test_health_is_that_of_the_models() -> None:
    healthy = through_gateway(unreachable, b"", path="/health", method="GET")
    assert (healthy[0], json.loads(healthy[1])) == (200, {"status": "healthy", "models": ["demo"]})
    status, answer = through_gateway(unreachable, b"", path="/health", method="GET", models=())
    said = "no replica serves the model at the moment; one is starting"  # for the first time, or again
    assert (status, json.loads(answer)["error"]["message"]) == (503, said)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/busy_threshold"),
        ("GET", "/busy_threshold"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/live"),
        ("GET", "/v1/models/../../docs"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/completions"),
        ("POST", "/v1/models"),
    ],
)
def test_paths_that_are_not_documented_are_refused(method: str, path: str) -> None:
    refusal({}, 405 if path in ("/v1/completions", "/v1/models") else 404, method=method, path=path)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'{"prompt": "\xff", "n": 100000}',
        b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"prompt": "x", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
    ],
)
def test_what_is_no_object_of_json_is_refused(body: bytes) -> None:
    assert "expected an object of JSON" in refusal(body)


def test_a_body_that_is_not_compressed_as_it_says_is_refused() -> None:
    for encoding in ("gzip", "deflate"):
        message = refusal(b'{"prompt": "x"}', headers={"Content-Encoding": encoding})
        assert "expected an object of JSON" in message


TOOLS = [{"type": "function", "function": {"name": "f"}}]
AUDIO = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio", "input_audio": {}}]}]
CHAT_PATH = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/v1/completions", {"nvext": []}, "nvext: expected an object"),
        ("/v1/completions", {"nvext": "x"}, "nvext: expected an object"),
        ("/v1/completions", {"nvext": {"extra_fields": 5}}, "nvext.extra_fields: expected a list of strings"),
        ("/v1/completions", {"nvext": {"annotations": [5]}}, "nvext.annotations: expected a list of strings"),
        ("/v1/completions", {"echo": True, "stream": True}, "echo: expected an answer that is not streamed"),
        ("/v1/completions", {"echo": True, "prompt": ["x", "y"]}, "echo: expected one prompt, found a list of 2"),
        ("/v1/completions", {"echo": "yes"}, "echo: expected true or false, found 'yes'"),
        ("/v1/completions", {"echo": 0}, "echo: expected true or false, found 0"),
        (CHAT_PATH, {"echo": True}, "echo: expected nothing, for this server does not implement it"),
        ("/v1/completions", {"n": 2, "seed": "x"}, "seed"),
        ("/v1/completions", {"prompt": "x" * 1001}, "at most 1000 bytes"),
        ("/v1/completions", {"prompt": ["x", "é" * 501]}, "at most 1000 bytes"),
        ("/v1/completions", {"prompt": [1] * 51}, "at most 50 tokens"),
        ("/v1/completions", {"prompt": [[1], [1] * 51]}, "at most 50 tokens"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "x" * 2**20}]}, "at most 1048576 bytes"),
        (CHAT_PATH, {"tools": TOOLS}, "--tool-call-parser"),
        (CHAT_PATH, {"messages": AUDIO}, "messages[0].content: expected text"),
        ("/v1/responses", {"input": "x" * 2**20}, "at most 1048576 bytes"),
        ("/v1/responses", {"tools": TOOLS}, "--tool-call-parser"),
        ("/v1/responses", {"input": AUDIO}, "input[0].content: expected text"),
        ("/v1/completions", {"structured_outputs": "a+"}, "structured_outputs: expected an object"),
        ("/v1/completions", {"structured_outputs": {}}, "exactly one of json, regex, choice, grammar, json_object"),
        ("/v1/completions", {"structured_outputs": {"regex": "a", "json": {}}}, "found regex and json"),
        ("/v1/completions", {"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "regex and guided_regex"),
        ("/v1/completions", {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (CHAT_PATH, {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern"),
    ],
)
def test_what_the_front_end_would_drop_or_fail_at_is_refused_by_name(path: str, fields: Any, words: str) -> None:
    assert words in refusal({"prompt": "x"} | fields if path == "/v1/completions" else fields, path=path)


def test_structured_outputs_go_past_the_front_end() -> None:
    async def told(request: web.Request) -> web.Response:
        body = await request.json()
        assert "structured_outputs" not in body
        return web.json_response({"told": body["nvext"]["annotations"]})

    members = {"json": {"a": 1}, "regex": "a", "choice": ["a"], "grammar": "g", "json_object": True}
    for name, value in members.items():
        asked = {"prompt": "x", "structured_outputs": {name: value, "structural_tag": None, "disable_fallback": False}}
        _, answer = through_gateway(told, asked)
        ((annotation,),) = json.loads(answer).values()
        parameter = {"json": "json_schema", "json_object": "json_schema"}.get(name, name)
        expected = {"type": "object"} if name == "json_object" else value
        assert json.loads(annotation.removeprefix("dflash-trt:")) == {parameter: expected}


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions?a=b"), ("GET", "/metrics?a=b")])
def test_headers_and_queries_pass_in_both_directions(method: str, path: str) -> None:
    """But for those of a connection, and of an encoding that the gateway has to read."""
    seen: dict[str, str] = {}

    async def echo(request: web.Request) -> web.Response:
        seen.update({name.lower(): value for name, value in request.headers.items()}, path=request.path_qs)
        return web.json_response({}, headers={"X-Answer": "yes"})

    async def run() -> dict[str, str]:
        front = web.Application()
        front.router.add_route("*", "/{path:.*}", echo)
        async with TestServer(front) as server:
            app = make_app(Gateway(settings(str(server.make_url("")).rstrip("/")), limit=4))
            async with TestServer(app) as door, ClientSession() as session:
                sent = {"Authorization": "Bearer x", "X-Request-Id": "7", "TE": "trailers", "Accept-Encoding": "br"}
                content = b'{"prompt": "x"}' if method == "POST" else None
                async with session.request(method, door.make_url(path), headers=sent, data=content) as answer:
                    return dict(answer.headers)

    answered = asyncio.run(run())
    assert (seen["authorization"], seen["x-request-id"], seen["path"]) == ("Bearer x", "7", path)
    assert (seen.get("te"), seen["accept-encoding"]) == (None, "identity")
    assert method == "POST" or answered["X-Answer"] == "yes"


def test_a_body_that_never_comes_is_answered_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_BODY_S", 0.1)

    async def run() -> bytes:
        async with TestServer(make_app(Gateway(settings("http://127.0.0.1:1"), limit=4))) as door:
            reader, writer = await asyncio.open_connection(door.host, door.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n{")
            head = await asyncio.wait_for(reader.readline(), 20)
            writer.close()
            return head

    assert b" 408 " in asyncio.run(run())


def test_a_body_that_is_too_long_is_refused_before_it_is_read() -> None:
    assert "POST /v1/completions" in refusal(b"x" * (2**20 + 2 * 2**20 + 1), 413)
    assert "expected an object of JSON" in refusal(b"x" * (2**20 + 2 * 2**20))


def test_half_open_connections_give_way_to_clients() -> None:
    """Many that never send a whole request, one that streams, and others behind them."""

    async def run() -> tuple[list[int], bytes, int]:
        front = web.Application()
        go_on = asyncio.Event()

        async def waits(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(chunk("a"))
            await go_on.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        async def says(request: web.Request) -> web.StreamResponse:
            is_stream = (await request.json()).get("stream")
            return await waits(request) if is_stream else web.json_response({})

        front.router.add_post("/v1/completions", says)
        port = free_ports(1)
        url = f"http://127.0.0.1:{port}/v1/completions"
        async with TestServer(front) as server, ClientSession() as session:
            before = settings(str(server.make_url("")).rstrip("/"), port=port)
            async with open_gateway(before, limit=4):
                stream = await session.post(url, json={"prompt": "x", "stream": True})
                heads = (b"POST /v1/completions HTTP/1.1\r\nHost", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                         b"Content-Length: 90\r\n\r\n{")  # fmt: skip
                half = []
                for index in range(40):
                    half.append(await asyncio.open_connection("127.0.0.1", port))
                    half[-1][1].write(heads[index % 2])
                statuses = []
                for _ in range(8):
                    async with session.post(url, json={"prompt": "x"}, headers={"Connection": "close"}) as answer:
                        statuses.append(answer.status)
                go_on.set()
                text = await stream.read()
                await asyncio.sleep(0.1)
                closed = sum(reader.at_eof() or reader.exception() is not None for reader, _ in half)
                for _, writer in half:
                    writer.close()
                return statuses, text, closed

    statuses, text, num_closed = asyncio.run(run())
    assert statuses == [200] * 8
    assert text == chunk("a") + b"data: [DONE]\n\n"
    assert num_closed >= 36


def test_the_limit_of_connections_is_exact() -> None:
    """Of idle ones the oldest gives way; where all are busy the next one is refused, until one of them ends."""

    async def run() -> tuple[list[bool], list[int]]:
        front, go_on, waiting = web.Application(), asyncio.Event(), asyncio.Semaphore(0)

        async def waits(request: web.Request) -> web.StreamResponse:
            waiting.release()
            await go_on.wait()
            return web.json_response({})

        front.router.add_post("/v1/completions", waits)
        port = free_ports(1)

        async def asked() -> int:
            url, data = f"http://127.0.0.1:{port}/v1/completions", '{"prompt": "x"}'
            async with ClientSession() as session, session.post(url, data=data) as answer:
                return answer.status

        async with (
            TestServer(front) as server,
            open_gateway(settings(str(server.make_url("")).rstrip("/"), port=port), limit=3),
        ):
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            await asyncio.wait_for(idle[0][0].read(), 30)
            ended = [reader.at_eof() for reader, _ in idle]
            for _, writer in idle:
                writer.close()
            busy = [asyncio.create_task(asked()) for _ in range(3)]
            for _ in busy:
                await asyncio.wait_for(waiting.acquire(), 30)
            refused = await asked()
            go_on.set()
            return ended, [*[await task for task in busy], refused, await asked()]

    assert asyncio.run(run()) == ([True, False, False, False], [200, 200, 200, 503, 200])


@pytest.mark.parametrize("num_files", [300, 1024, 4096, 2**20])
def test_every_client_may_have_a_connection_to_the_front_end(num_files: int) -> None:
    limit = max_connections(num_files)
    assert 1 <= limit <= 4096 and 2 * limit + 2 * BACKLOG <= num_files
    assert max_connections(2 * BACKLOG) == 1


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n" + chunk("a")], ids=["no answer yet", "a stream"])
def test_a_client_that_leaves_ends_its_request_at_the_front_end(answer: bytes) -> None:
    async def run() -> None:
        begun, gone = asyncio.Event(), asyncio.Event()

        async def front(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"}")
            writer.write(answer)
            begun.set()
            while await reader.read(100):
                pass
            gone.set()
            writer.close()

        behind, port = free_ports(1), free_ports(1)
        url, body = f"http://127.0.0.1:{behind}", b'{"prompt": "x", "stream": true}'
        async with (
            await asyncio.start_server(front, "127.0.0.1", behind),
            open_gateway(settings(url, port=port), limit=3),
        ):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await asyncio.wait_for(begun.wait(), 30)
            assert not gone.is_set()
            writer.close()
            await asyncio.wait_for(gone.wait(), 10)

    asyncio.run(run())


def test_a_gateway_that_stops_waits_for_no_stream() -> None:
    async def run() -> tuple[bytes, float]:
        front, ended = web.Application(), asyncio.Event()

        async def waits(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(chunk("a"))
            await ended.wait()
            return response

        front.router.add_post("/v1/completions", waits)
        port = free_ports(1)
        async with TestServer(front) as server, ClientSession() as session:
            async with open_gateway(settings(str(server.make_url("")).rstrip("/"), port=port), limit=3):
                url, body = f"http://127.0.0.1:{port}/v1/completions", {"prompt": "x", "stream": True}
                stream = await session.post(url, json=body)
                first, stopped_s = await stream.content.readany(), time.monotonic()
            took_s = time.monotonic() - stopped_s
            ended.set()
            stream.close()
            return first, took_s

    first, took_s = asyncio.run(run())
    assert first == chunk("a") and took_s < 20


def test_more_requests_than_connections_are_answered_with_503() -> None:
    assert "too many requests" in refusal({"prompt": "x", "n": 21}, 503)


def test_without_a_front_end_the_status_is_503() -> None:
    async def run() -> list[int]:
        app = make_app(Gateway(settings("http://127.0.0.1:1"), limit=4))
        async with TestServer(app) as door, ClientSession() as session:
            paths = (
                ("GET", "/health", None),
                ("POST", "/v1/completions", "{}"),
                ("POST", "/v1/completions", '{"n": 2}'),
            )
            statuses = []
            for method, path, data in paths:
                async with session.request(method, door.make_url(path), data=data) as answer:
                    statuses.append(answer.status)
            return statuses

    assert asyncio.run(run()) == [503, 503, 503]


@pytest.mark.parametrize("num_samples", [1, 3, 4])
def test_places_of_all_samples_are_free_again_however_a_request_ends(num_samples: int) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=500)

    async def run() -> list[int]:
        front = web.Application()
        front.router.add_route("*", "/{path:.*}", broken)
        async with TestServer(front) as server:
            app = make_app(Gateway(settings(str(server.make_url("")).rstrip("/")), limit=4))
            async with TestServer(app) as door, ClientSession() as session:
                statuses = []
                for n in (num_samples,) * 4 + (5, 4):
                    body = {"model": "demo", "prompt": "x", "n": n}
                    async with session.post(door.make_url("/v1/completions"), json=body) as answer:
                        statuses.append(answer.status)
                return statuses

    assert asyncio.run(run()) == [500] * 4 + [503, 500]


@pytest.mark.parametrize(
    ("fields", "asked", "is_wanted"),
    [({}, 0, False), ({"logprobs": 3}, 3, False), ({"logprobs": 3, "prompt_logprobs": 1}, 1, True)],
)
def test_an_echo_asks_for_as_many_likely_tokens_of_the_prompt_as_of_the_answer(
    fields: dict[str, Any], asked: int, is_wanted: bool
) -> None:
    read = read_api_request("completions", {"prompt": "x", "echo": True} | fields, has_tool_call_parser=False)
    assert [body["prompt_logprobs"] for body in read.bodies] == [asked] and "echo" not in read.bodies[0]
    assert (read.is_echo, read.wants_prompt_logprobs) == (True, is_wanted)
