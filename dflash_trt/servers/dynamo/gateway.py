"""The HTTP server of `dflash-trt serve`: it reads requests for generation, and hands all else to Dynamo's front end.

The front end answers 200 to fields that it does not read, and closes a request of several samples with the first that
ends. The gateway refuses the one by name and sends the other as a request for each sample.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from http import HTTPStatus
from typing import Final

from aiohttp import ClientConnectionError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

from dflash_trt.core.errors import RequestError
from dflash_trt.servers.dynamo.answers import joined
from dflash_trt.servers.dynamo.api_fields import CHAT, COMPLETIONS, RESPONSES, ApiRequest, read_api_request
from dflash_trt.servers.dynamo.event_streams import joined_events, sample_events
from dflash_trt.servers.dynamo.settings import GatewaySettings

MAX_BODY_BYTES: Final = 45 * 2**20  # Dynamo's own
_STOP_S: Final = 1.0
_PLAIN: Final = {"Accept-Encoding": "identity"}
_HOP_BY_HOP: Final = (  # RFC 9110, section 7.6.1, and what follows from a body that may change
    "connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    "host content-length accept-encoding content-encoding"
)


def run_gateway(settings: GatewaySettings) -> int:
    """Serve until a signal; returns the exit code."""
    web.run_app(
        make_app(settings.frontend_url),
        host=settings.host,
        port=settings.port,
        handler_cancellation=True,  # a client that leaves ends its request at the front end
        shutdown_timeout=_STOP_S,
        access_log=None,
        print=None,
    )
    return 0


def make_app(frontend_url: str) -> web.Application:
    gateway = Gateway(frontend_url)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.cleanup_ctx.append(gateway.session)
    for path in (CHAT, COMPLETIONS, RESPONSES):
        app.router.add_post(f"/v1/{path}", partial(gateway.generate, path))
    app.router.add_route("*", "/{path:.*}", gateway.forward)
    return app


class Gateway:
    """Handlers of one server; `session` opens and closes its connections."""

    def __init__(self, frontend_url: str) -> None:
        self._url = frontend_url
        self._session: ClientSession

    async def session(self, app: web.Application) -> AsyncIterator[None]:
        # A connection for each request: one that is kept may be closed while it is used again.
        connector = TCPConnector(limit=0, force_close=True)
        async with ClientSession(
            connector=connector, timeout=ClientTimeout(total=None), headers=_PLAIN
        ) as self._session:
            yield

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """As it is."""
        body, headers = await request.read(), _passed(request.headers.items())
        try:
            async with self._session.request(
                request.method, self._url + request.path_qs, data=body, headers=headers
            ) as answer:
                return await _copied(request, answer)
        except ClientConnectionError:
            return _unavailable()

    async def generate(self, path: str, request: web.Request) -> web.StreamResponse:
        """One of the three paths that generate text."""
        try:
            body = json.loads(await request.read())
        except ValueError:
            return await self.forward(request)  # which says what is wrong
        if not isinstance(body, dict):
            return await self.forward(request)
        try:
            read = read_api_request(path, body)
        except RequestError as error:
            return _refusal(HTTPStatus.BAD_REQUEST, str(error))
        try:
            return await self._generate(request, read)
        except* ClientConnectionError:
            pass
        return _unavailable()

    async def _generate(self, request: web.Request, read: ApiRequest) -> web.StreamResponse:
        async with AsyncExitStack() as stack:
            answers = await self._open(stack, request, read)
            failed = next((answer for answer in answers if answer.status != HTTPStatus.OK), None)
            if failed is not None:
                return await _copied(request, failed)
            if read.is_stream:
                return await _streamed(request, answers, keeps_engine_data=read.wants_engine_data)
            texts = [await answer.json() for answer in answers]
            return web.json_response(joined(texts, keeps_engine_data=read.wants_engine_data))

    async def _open(self, stack: AsyncExitStack, request: web.Request, read: ApiRequest) -> list[ClientResponse]:
        """Send every sample; returns when each has its status.

        Raises:
            ExceptionGroup: of ClientConnectionError.
        """
        url, headers = self._url + request.path_qs, _passed(request.headers.items())
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(stack.enter_async_context(self._session.post(url, json=body, headers=headers)))
                for body in read.bodies
            ]
        return [task.result() for task in tasks]


async def _streamed(
    request: web.Request, answers: Sequence[ClientResponse], *, keeps_engine_data: bool
) -> web.StreamResponse:
    response = web.StreamResponse(headers=_passed(answers[0].headers.items()))
    await response.prepare(request)
    parts = [answer.content.iter_any() for answer in answers]
    if len(parts) == 1:
        events = sample_events(parts[0], keeps_engine_data=keeps_engine_data)
    else:
        events = joined_events(parts, keeps_engine_data=keeps_engine_data)
    async with aclosing(events):
        async for event in events:
            await response.write(event)
    await response.write_eof()
    return response


async def _copied(request: web.Request, answer: ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=_passed(answer.headers.items()))
    await response.prepare(request)
    async for chunk in answer.content.iter_any():
        await response.write(chunk)
    await response.write_eof()
    return response


def _passed(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    left_out = set(_HOP_BY_HOP.split())
    return [(name, value) for name, value in headers if name.lower() not in left_out]


def _refusal(status: HTTPStatus, message: str) -> web.Response:
    """In the front end's form."""
    return web.json_response({"message": message, "type": status.phrase, "code": status}, status=status)


def _unavailable() -> web.Response:
    return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the front end is being started again")
