"""The gateway before a scripted front end: events that the network cuts, losses in the middle, and errors."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs the extra 'serve'")

from aiohttp import ClientError, ClientSession, web
from aiohttp.test_utils import TestServer

from dflash_trt.servers.dynamo.event_streams import events
from dflash_trt.servers.dynamo.gateway import make_app

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def chunk(text: str, **more: Any) -> bytes:
    return b"data: " + json.dumps({"id": text, "choices": [{"index": 0, "text": text}]} | more).encode() + b"\n\n"


def through_gateway(handler: Handler, body: Any, *, path: str = "/v1/completions") -> tuple[int, bytes]:
    """Status and body of a POST; `handler` is the front end."""

    async def run() -> tuple[int, bytes]:
        front = web.Application()
        front.router.add_post(path, handler)
        async with TestServer(front) as server:
            gateway = make_app(str(server.make_url("")).rstrip("/"))
            async with TestServer(gateway) as door, ClientSession() as session:
                answer = await session.post(door.make_url(path), data=json.dumps(body))
                return answer.status, await answer.read()

    return asyncio.run(run())


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

    async def cut(size: int) -> list[bytes]:
        async def pieces() -> Any:
            for first in range(0, len(wire), size):
                yield wire[first : first + size]

        return [event async for event in events(pieces())]

    whole = wire.rstrip().split(b"\n\n")
    assert [asyncio.run(cut(size)) for size in (1, 2, 7, 1000)] == [whole] * 4


def test_a_stream_passes_with_what_speculation_did_at_its_root() -> None:
    told = {"metrics": {"speculative_decoding": {"num_spec_steps": 3}}}
    last = chunk("b", nvext={"engine_data": told})
    sent = [chunk("a"), last[:40], last[40:] + b"data: [DONE]\n\n"]
    status, body = through_gateway(streams(*sent), {"prompt": "x", "stream": True})
    first, second, done = body.rstrip().split(b"\n\n")
    assert (status, first + b"\n\n", done) == (200, chunk("a"), b"data: [DONE]")
    assert json.loads(second[6:]) == json.loads(chunk("b")[6:]) | told


def test_a_front_end_that_dies_in_the_middle_of_a_stream_does_not_end_it_in_order() -> None:
    for num_samples in (1, 2):
        with pytest.raises(ClientError):
            through_gateway(streams(chunk("a"), dies=True), {"prompt": "x", "stream": True, "n": num_samples})


def test_an_error_in_one_sample_ends_the_stream_with_it() -> None:
    error = b'event: error\ndata: {"message": "lost"}\n\n'
    _, body = through_gateway(streams(chunk("a"), error), {"prompt": "x", "stream": True, "n": 2})
    assert body.endswith(error)
    assert b"[DONE]" not in body


def test_a_refusal_of_the_front_end_is_passed_on() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"message": "no"}, status=429)

    for body in ({"prompt": "x"}, {"prompt": "x", "n": 3}, {"prompt": "x", "n": 2, "stream": True}):
        assert through_gateway(refuse, body) == (429, b'{"message": "no"}')


def test_what_is_not_a_request_is_the_front_ends_to_refuse() -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(status=422, body=await request.read())

    assert through_gateway(echo, ["not an object"]) == (422, b'["not an object"]')


def test_without_a_front_end_the_status_is_503() -> None:
    async def run() -> list[int]:
        async with TestServer(make_app("http://127.0.0.1:1")) as door, ClientSession() as session:
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
