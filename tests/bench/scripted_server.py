"""An OpenAI server in a thread that answers by a script: known delays, known tokens, known acceptance."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class ScriptedServer:
    """`delays_s` are those before each event of an answer, the n-th answer taking the n-th list, again and again.

    An event has `tokens_per_event` tokens. `sent_s` are times of answers: the request's, then those of its events.
    """

    delays_s: list[list[float]]
    tokens_per_event: int = 1
    speculation: dict[str, Any] | None = None
    status: int = 200
    cuts_stream: bool = False
    error: str | None = None  # of an event before the end
    text_key: str | None = None  # of a choice, or of its delta; None: both
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    sent_s: list[list[float]] = field(default_factory=list)
    max_open: int = 0
    _num_open: int = 0
    url: str = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        times = [time.perf_counter()]
        delays = self.delays_s[len(self.bodies) % len(self.delays_s)]
        self.bodies.append(await request.json())
        self.paths.append(request.path)
        if self.status != 200:
            return web.json_response({"message": "scripted refusal"}, status=self.status)
        self._num_open += 1
        self.max_open = max(self.max_open, self._num_open)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._send(response, {"choices": [{"delta": {"role": "assistant", "content": ""}, "text": ""}]})
        for index, delay_s in enumerate(delays):
            await asyncio.sleep(delay_s)
            times.append(time.perf_counter())
            end = "length" if index == len(delays) - 1 and not self.cuts_stream else None
            text = f"{index} "
            choice: dict[str, Any] = {"delta": {"content": text}, "text": text}
            if self.text_key is not None:
                choice = {"text": text} if self.text_key == "text" else {"delta": {self.text_key: text}}
            await self._send(response, {"choices": [choice | {"finish_reason": end}]})
        if self.error is not None:
            await self._send(response, {"error": self.error})
        if not self.cuts_stream:
            usage = {"prompt_tokens": 5, "completion_tokens": self.tokens_per_event * len(delays)}
            metrics = {"metrics": {"speculative_decoding": self.speculation}} if self.speculation else {}
            await self._send(response, {"choices": [], "usage": usage, **metrics})
            await self._send(response, {"choices": [], "usage": None, "metrics": None})
            await response.write(b"data: [DONE]\n\n")
        self.sent_s.append(times)
        self._num_open -= 1
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@contextmanager
def running(server: ScriptedServer) -> Iterator[ScriptedServer]:
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_post("/v1/completions", server.answer)
        app.router.add_post("/v1/chat/completions", server.answer)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = "http://{}:{}".format(*runner.addresses[0])
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
