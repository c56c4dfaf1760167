"""The HTTP server of `dflash-trt serve`: it reads requests for generation, and passes on few others.

Dynamo's front end answers 200 to fields that it does not read, tokenizes prompts of any length, closes a request of
several samples with the first that ends, and serves its administration to everybody. So the gateway refuses fields by
name and prompts by size, sends each sample as a request, and knows no other paths than the documented ones.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web
from aiohttp.http_exceptions import HttpProcessingError

from dflash_trt.core.errors import RequestError
from dflash_trt.core.sampling import MAX_GRAMMAR_LEN
from dflash_trt.engine_dir.template_renderer import max_conversation_bytes
from dflash_trt.servers.dynamo.answers import as_error_object, error_object, joined
from dflash_trt.servers.dynamo.api_fields import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    ApiRequest,
    check_prompt,
    read_api_request,
)
from dflash_trt.servers.dynamo.connections import BACKLOG, Connections, max_connections, raise_file_limit
from dflash_trt.servers.dynamo.echo import with_prompt
from dflash_trt.servers.dynamo.event_streams import closed_events, cut_stream, joined_events, sample_events
from dflash_trt.servers.dynamo.page import Page, read_page
from dflash_trt.servers.dynamo.settings import GatewaySettings

_FRONTEND_MAX_BODY_BYTES: Final = 45 * 2**20  # Dynamo's own
_MAX_FIELD_BYTES: Final = 2 * MAX_GRAMMAR_LEN  # besides the prompt: a grammar with escapes, biases, stop strings
_HEADER_S: Final = 20.0  # for a whole head of a request, from the connection or from the last answer on
_BODY_S: Final = 60.0
_STOP_S: Final = 1.0
_PLAIN: Final = {"Accept-Encoding": "identity"}
_HOP_BY_HOP: Final = (  # RFC 9110, section 7.6.1, and what follows from a body that may change
    "connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    "host content-length accept-encoding content-encoding"
)
_NO_REPLICA: Final = "no replica serves the model at the moment; one is starting"
_NO_FRONTEND: Final = "the front end is being started again"
_TOO_MANY: Final = "too many requests at once; try again later"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def run_gateway(settings: GatewaySettings) -> int:
    """Serve until a signal; returns the exit code."""
    asyncio.run(_serve_until_signal(settings))
    return 0


async def _serve_until_signal(settings: GatewaySettings) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with open_gateway(settings, limit=max_connections(raise_file_limit())):
        await stopped.wait()


@asynccontextmanager
async def open_gateway(settings: GatewaySettings, *, limit: int) -> AsyncIterator[None]:
    """A listening gateway with at most `limit` client connections, and as many requests at the front end."""
    gateway = Gateway(settings, limit=limit)
    runner = web.AppRunner(
        make_app(gateway),
        handler_cancellation=True,  # a client that leaves ends its request at the front end
        keepalive_timeout=_HEADER_S,
        shutdown_timeout=_STOP_S,
        access_log=None,
        logger=_logger(),
    )
    await runner.setup()
    loop = asyncio.get_running_loop()
    accept = gateway.connections.accepting(runner.server)
    try:
        async with await loop.create_server(accept, settings.host, settings.port, backlog=BACKLOG) as listener:
            yield
            listener.close()
            await runner.cleanup()  # before the listener waits for its connections
    finally:
        await runner.cleanup()


def _logger() -> logging.Logger:
    """It leaves out requests that are no HTTP: anyone can send any number of them."""
    logger = logging.getLogger(__name__)
    logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
    return logger


def make_app(gateway: Gateway) -> web.Application:
    app = web.Application(client_max_size=gateway.max_body_bytes, middlewares=[web.middleware(_in_openai_form)])
    app.cleanup_ctx.append(gateway.session)
    for path in (CHAT, COMPLETIONS, RESPONSES):
        app.router.add_post(f"/v1/{path}", partial(gateway.generate, path))
    for path in ("/v1/models", "/v1/models/{model:.+}", "/metrics"):
        app.router.add_get(path, gateway.forward)
    app.router.add_get("/health", gateway.health)
    if gateway.page is not None:
        app.router.add_get("/", partial(_shown, gateway.page))
    return app


async def _shown(page: Page, request: web.Request) -> web.Response:
    return web.Response(body=page.body, headers=page.headers)


async def _in_openai_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors of every kind."""
    try:
        return await handler(request)
    except RequestError as error:
        return _failure(HTTPStatus.BAD_REQUEST, str(error))
    except web.HTTPException as error:
        return _failure(HTTPStatus(error.status), f"{request.method} {request.path}: {error.text or error.reason}")
    except ClientError:
        return _failure(HTTPStatus.SERVICE_UNAVAILABLE, _NO_FRONTEND)


class Gateway:
    """Handlers of one server; `session` opens and closes its connections to the front end."""

    def __init__(self, settings: GatewaySettings, *, limit: int) -> None:
        conversation = max_conversation_bytes(settings.prompts.max_text_bytes) or _FRONTEND_MAX_BODY_BYTES
        self.max_body_bytes = min(_FRONTEND_MAX_BODY_BYTES, conversation + _MAX_FIELD_BYTES)
        self.connections = Connections(limit)
        self.page = None if settings.page is None else read_page(settings.page)
        self._settings = settings
        self._num_free = limit
        self._session: ClientSession

    async def session(self, app: web.Application) -> AsyncIterator[None]:
        # A connection for each request: one that is kept may be closed while it is used again.
        connector = TCPConnector(limit=0, force_close=True)
        async with ClientSession(
            self._settings.frontend_url, connector=connector, timeout=ClientTimeout(total=None), headers=_PLAIN
        ) as self._session:
            yield

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """GET, as it is."""
        headers = _passed(request.headers.items())
        with self._sending(request, 1):
            async with self._session.get(request.path_qs, headers=headers) as answer:
                if not answer.ok:
                    return await _failed(answer)
                return web.Response(body=await answer.read(), headers=_passed(answer.headers.items()))

    async def health(self, request: web.Request) -> web.Response:
        """200 if a model can answer."""
        with self._sending(request, 1):
            names = await self._model_names()
        if not names:
            return _failure(HTTPStatus.SERVICE_UNAVAILABLE, _NO_REPLICA)
        return web.json_response({"status": "healthy", "models": names})

    async def generate(self, path: str, request: web.Request) -> web.StreamResponse:
        """One of the three paths that generate text."""
        body = await _json_object(request)
        try:
            check_prompt(path, body, self._settings.prompts)
            read = read_api_request(path, body, has_tool_call_parser=self._settings.has_tool_call_parser)
            bodies = [json.dumps(sample).encode() for sample in read.bodies]
        except RecursionError:
            raise _not_json("objects or lists nested too deep") from None
        with self._sending(request, len(bodies)):
            async with AsyncExitStack() as stack:
                answers = await self._open(stack, request, bodies)
                failed = next((answer for answer in answers if answer.status != HTTPStatus.OK), None)
                if failed is None:
                    return await _answered(request, answers, read, is_response=path == RESPONSES)
                if failed.status == HTTPStatus.NOT_FOUND:
                    return self._unknown_model(body.get("model"), await self._model_names())
                return await _failed(failed)

    async def _open(self, stack: AsyncExitStack, request: web.Request, bodies: Sequence[bytes]) -> list[ClientResponse]:
        """Send every sample; returns when each has its status.

        Raises:
            ClientError: the front end is not there.
        """
        headers = _passed(request.headers.items())
        sent = [self._session.post(request.path_qs, data=io.BytesIO(body), headers=headers) for body in bodies]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(stack.enter_async_context(sample)) for sample in sent]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [task.result() for task in tasks]

    async def _model_names(self) -> list[str]:
        async with self._session.get("/v1/models") as answer:
            return [model["id"] for model in (await answer.json())["data"]]

    def _unknown_model(self, name: Any, known: Sequence[str]) -> web.Response:
        if not known:
            return _failure(HTTPStatus.SERVICE_UNAVAILABLE, _NO_REPLICA)
        error = RequestError.about("model", expected=", ".join(known), found=f"{name!r:.80}")
        return _failure(HTTPStatus.NOT_FOUND, str(error))

    @contextmanager
    def _sending(self, request: web.Request, num_samples: int) -> Iterator[None]:
        """The request runs, with connections to the front end that are free."""
        if num_samples > self._num_free:
            raise web.HTTPServiceUnavailable(text=_TOO_MANY)
        self._num_free -= num_samples
        try:
            with self.connections.busy(request.protocol):
                yield
        finally:
            self._num_free += num_samples


async def _json_object(request: web.Request) -> dict[str, Any]:
    """The body. Raises RequestError and web.HTTPException."""
    try:
        async with asyncio.timeout(_BODY_S):
            content = await request.read()
        body = json.loads(content)
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body has not come within {_BODY_S:.0f} s") from None
    except (ValueError, RecursionError, web.RequestPayloadError) as error:
        raise _not_json(f"{type(error).__name__}: {error}") from error
    if not isinstance(body, dict):
        raise _not_json(type(body).__name__)
    return body


def _not_json(found: str) -> RequestError:
    return RequestError.about("request body", expected="an object of JSON in UTF-8", found=found)


async def _answered(
    request: web.Request, answers: Sequence[ClientResponse], read: ApiRequest, *, is_response: bool
) -> web.StreamResponse:
    if read.is_stream:
        return await _streamed(request, answers, keeps_engine_data=read.wants_engine_data, is_response=is_response)
    texts = [await answer.json() for answer in answers]
    answer = joined(texts, keeps_engine_data=read.wants_engine_data)
    if read.is_echo:
        answer = with_prompt(answer, keeps_prompt_logprobs=read.wants_prompt_logprobs)
    return web.json_response(answer)


async def _streamed(
    request: web.Request, answers: Sequence[ClientResponse], *, keeps_engine_data: bool, is_response: bool
) -> web.StreamResponse:
    response = web.StreamResponse(headers=_passed(answers[0].headers.items()))
    await response.prepare(request)
    parts = [_pieces(answer) for answer in answers]
    if len(parts) == 1:
        events = sample_events(parts[0], keeps_engine_data=keeps_engine_data)
    else:
        events = joined_events(parts, keeps_engine_data=keeps_engine_data)
    async with aclosing(closed_events(events, is_response=is_response)) as closed:
        async for event in closed:
            await response.write(event)
    await response.write_eof()
    return response


async def _pieces(answer: ClientResponse) -> AsyncIterator[bytes]:
    """Raises StreamError: the front end has died."""
    try:
        async for piece in answer.content.iter_any():
            yield piece
    except ClientError as error:
        raise cut_stream() from error


async def _failed(answer: ClientResponse) -> web.Response:
    """An error of the front end, in OpenAI's form."""
    text = await answer.text()
    try:
        found = json.loads(text)
    except ValueError:
        found = text or HTTPStatus(answer.status).phrase
    return web.json_response(as_error_object(found, answer.status), status=answer.status)


def _passed(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    left_out = set(_HOP_BY_HOP.split())
    return [(name, value) for name, value in headers if name.lower() not in left_out]


def _failure(status: HTTPStatus, message: str) -> web.Response:
    return web.json_response(error_object(status, message), status=status)
