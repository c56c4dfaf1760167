"""Requests of a server, given to one engine and answered as it steps: one response per verify step.

    take (the server's thread) -> prompt lanes -> engine's thread -> queue -> delivery thread -> channel

The delivery thread makes the text; the engine never waits for the server. Cancellations are looked for whenever a
response goes out, and now and then for requests that have none. Knows no Triton API: a request's way back is a Channel.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol

from dflash_trt.core.array import Array
from dflash_trt.core.errors import QueueFullError, RequestError, problem
from dflash_trt.core.request import FinishReason
from dflash_trt.engine_dir.template_renderer import max_conversation_bytes, text_too_long
from dflash_trt.servers.triton.metrics import MetricBook
from dflash_trt.servers.triton.open_request import Channel, ErrorCode, OpenRequest
from dflash_trt.servers.triton.prompt_lanes import PromptLanes
from dflash_trt.servers.triton.request_reader import CancelOrder, Order, read_request
from dflash_trt.servers.triton.responses import ResponseMaker, as_arrays
from dflash_trt.servers.triton.settings import ModelSettings
from dflash_trt.serving.generation_batch import output_without_tokens
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.output_processor import StreamChunk
from dflash_trt.serving.prompts import PromptReader
from dflash_trt.serving.stream import SampleStreams

_SWEEP_S = 0.05  # how often requests without responses are asked whether they are cancelled, at most
_MAX_SWEEP_FRACTION = 0.05  # share of wall time
_PUBLISH_S = 0.5
_WATCH_S = 0.5
_CLOSE_S = 10.0
_CODES: dict[FinishReason, ErrorCode] = {"error": "INTERNAL", "timeout": "UNAVAILABLE"}

_TEXT_INPUTS = ("text_input", "messages", "chat_template_kwargs")

_LOG = logging.getLogger(__name__)


class Watch(Protocol):
    """Knows how the server is."""

    def requests_come(self) -> None: ...

    def is_stopping(self) -> bool: ...

    def is_gone(self) -> bool: ...


class EngineService:
    """Owns its threads, not the engine.

    Calls `on_server_gone` when `watch` reports that no server is left, and `on_engine_failed`, with the reason, when
    the engine cannot be reopened.
    """

    def __init__(
        self,
        generator: Generator,
        settings: ModelSettings,
        *,
        vocab_size: int,
        book: MetricBook | None = None,
        watch: Watch | None = None,
        on_server_gone: Callable[[], None] | None = None,
        on_engine_failed: Callable[[str], None] | None = None,
    ) -> None:
        self._generator = generator
        self._settings = settings
        max_tokens = generator.limits.max_seq_len - 1
        self._reader = PromptReader(generator.codec, vocab_size=vocab_size, max_tokens=max_tokens)
        self._lanes = PromptLanes()
        if generator.codec is not None:
            generator.codec.start_renderer()
        self._book = book
        self._watch = watch
        self._on_server_gone = on_server_gone
        self._on_engine_failed = on_engine_failed
        self._has_requests = False
        self._lock = threading.Lock()  # guards the two below; acquired before the engine's own lock
        self._open: set[OpenRequest] = set()
        self._is_draining = False
        self._ready: SimpleQueue[OpenRequest | None] = SimpleQueue()
        self._is_closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._deliver, name="dflash-responses", daemon=True),
            threading.Thread(target=self._keep_house, name="dflash-housekeeping", daemon=True),
            threading.Thread(target=self._watch_server, name="dflash-server-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._open)

    def take(self, arrays: Mapping[str, Array], parameters: str, client_id: str, channel: Channel) -> None:
        """Start a request, or answer at once why not. Never raises for what a client sent."""
        if not self._has_requests:
            self._has_requests = True
            if self._watch is not None:
                self._watch.requests_come()
        try:
            num_bytes = self._checked_size(arrays) + len(parameters)
            order = read_request(arrays, parameters, self._settings)
            if isinstance(order, CancelOrder):
                self._cancel_by_id(client_id, channel)
            else:
                self._start(OpenRequest(client_id=client_id, channel=channel, order=order), num_bytes)
        except RequestError as error:
            self._refuse(channel, str(error), _code_of(error))

    def refuse(self, channel: Channel, error: RequestError) -> None:
        """Answer a request that could not be read so far as to be taken."""
        self._refuse(channel, str(error), "INVALID_ARG")

    def drain(self) -> None:
        """Refuse new requests; those that run get `drain_timeout_s`, then they end as cancelled."""
        with self._lock:
            if self._is_draining:
                return
            self._is_draining = True
            num_open = len(self._open)
        _LOG.warning(
            "the server is stopping: %d requests may run for %g s more", num_open, self._settings.drain_timeout_s
        )
        threading.Thread(target=self._end_drain, name="dflash-drain", daemon=True).start()

    def close(self) -> None:
        """End everything that is still open, and the threads. The engine may be closed afterwards."""
        with self._lock:
            self._is_draining = True
        self._cancel_all()
        deadline = time.monotonic() + _CLOSE_S
        while self.num_open and time.monotonic() < deadline:  # a step that runs tells with its end
            time.sleep(_SWEEP_S)
        self._lanes.close()
        self._ready.put(None)
        self._is_closed.set()
        for thread in self._threads:
            thread.join()
        self._publish()

    # Arrivals

    def _checked_size(self, arrays: Mapping[str, Array]) -> int:
        """Bytes of the prompt as text or JSON. Raises RequestError for more than can fit."""
        num_bytes = {name: sum(map(len, arrays[name].reshape(-1))) for name in _TEXT_INPUTS if name in arrays}
        max_text = self._reader.max_text_bytes
        max_conversation = max_conversation_bytes(max_text)
        for name, found in num_bytes.items():
            is_text = name == "text_input" and not self._settings.wraps_in_chat
            limit = max_text if is_text else max_conversation
            if limit is not None and found > limit:
                raise text_too_long(found, limit)
        return sum(num_bytes.values())

    def _start(self, request: OpenRequest, num_bytes: int) -> None:
        """Raises QueueFullError."""
        with self._lock:
            if self._is_draining:
                self._refuse(request.channel, _stopping(), "UNAVAILABLE")
                return
            self._open.add(request)
        if "prompt_token_ids" in request.order.prompt and not request.order.is_slow:
            self._begin(request)
            return
        try:
            request.reading = self._lanes.put(lambda: self._begin(request), num_bytes, is_slow=request.order.is_slow)
        except QueueFullError:
            self._forget(request)
            raise

    def _begin(self, request: OpenRequest) -> None:
        """Read the prompt and hand it to the engine; what is wrong with it is the answer."""
        try:
            token_ids = self._reader.read(request.order.parsed_prompt())
            request.num_running = request.order.sampling.n
            request.makers = [self._maker(request.order, token_ids) for _ in range(request.num_running)]
            with self._lock:
                if not request.is_cancelled:
                    request.streams = self._submit(request, token_ids)
                    return
            self._end_unread(request)
        except RequestError as error:
            self._drop(request, str(error), _code_of(error))
        except Exception as error:  # noqa: BLE001 - a bug of ours is answered like any failure, affects no other
            _LOG.exception("a prompt could not be read")
            self._drop(request, f"{type(error).__name__}: {error}", "INTERNAL")

    def _submit(self, request: OpenRequest, token_ids: tuple[int, ...]) -> SampleStreams:
        order = request.order
        return self._generator.submit_samples(
            {"prompt_token_ids": token_ids},
            order.sampling,
            priority=order.priority,
            queue_timeout_s=order.queue_timeout_s,
            cache_salt=order.cache_salt,
            on_ready=lambda: self._ready.put(request),
        )

    def _maker(self, order: Order, token_ids: tuple[int, ...]) -> ResponseMaker:
        codec = self._generator.codec
        text = ""
        if order.echoes_prompt and codec is not None:
            text = codec.decode(token_ids) if order.text is None else order.text
        decode = codec.decode if codec is not None else None
        return ResponseMaker(order=order, prompt_token_ids=token_ids, prompt_text=text, decode=decode)

    def _end_unread(self, request: OpenRequest) -> None:
        """Cancelled before the engine knew of it. What may be long in the order is dropped."""
        text = None if self._generator.codec is None else ""
        output = output_without_tokens(request.client_id, "cancelled", text=text)
        request.order = replace(request.order, prompt={}, text=None, messages=None, chat_template_kwargs=None)
        request.makers, request.num_running = [self._maker(request.order, ())], 1
        request.unread = StreamChunk(text=text, token_ids=(), finish_reason="cancelled", output=output)
        self._ready.put(request)

    def _drop(self, request: OpenRequest, message: str, code: ErrorCode) -> None:
        with self._lock:
            self._open.discard(request)
        self._refuse(request.channel, message, code)

    def _refuse(self, channel: Channel, message: str, code: ErrorCode) -> None:
        if self._book is not None:
            self._book.add_refusal()
            self._book.add_response()
        channel.fail(message, code)

    def _cancel_by_id(self, client_id: str, channel: Channel) -> None:
        with self._lock:
            found = [request for request in self._open if client_id and request.client_id == client_id]
        if not found:
            hint = "Send `stop` with the id of a request that is running, on its own request."
            message = problem(
                f"request id {client_id!r}", expected="the id of a running request", found="none", hint=hint
            )
            self._refuse(channel, message, "NOT_FOUND")
            return
        for request in found:
            self._cancel(request)
        if self._book is not None:
            self._book.add_response()
        channel.send(as_arrays({"text_output": [""], "finish_reason": ["cancelled"]}), is_last=True)

    # Delivery

    def _deliver(self) -> None:
        while (request := self._ready.get()) is not None:
            try:
                for chunk in self._take(request):
                    self._send(request, chunk)
            except Exception:  # noqa: BLE001 - a server that takes no response: the others go on
                _LOG.exception("a response could not be sent")
                self._forget(request)

    def _take(self, request: OpenRequest) -> list[StreamChunk]:
        if request.unread is not None:
            return [request.unread]
        with self._lock:  # until `_begin` has put the stream in its place
            streams = request.streams
        assert streams is not None, "the engine has something for a request that it knows"
        return streams.take_steps()

    def _send(self, request: OpenRequest, chunk: StreamChunk) -> None:
        if self._book is not None:
            self._book.add_chunk(chunk)
        output = chunk.output
        if not request.num_running:  # another sample has failed
            return
        if output is not None and output.finish_reason in _CODES:
            request.num_running = 0
            self._forget(request)
            self._count_response()
            request.channel.fail(output.error or output.finish_reason, _CODES[output.finish_reason])
            return
        request.num_running -= output is not None
        if not request.num_running:
            with self._lock:
                self._open.discard(request)
        arrays = request.makers[chunk.sample_index].response(chunk)
        if arrays is not None:
            self._count_response()
            request.channel.send(arrays, is_last=not request.num_running)
        if request.num_running and request.channel.is_cancelled():
            self._cancel(request)

    def _count_response(self) -> None:
        if self._book is not None:
            self._book.add_response()

    def _forget(self, request: OpenRequest) -> None:
        with self._lock:
            self._open.discard(request)
        self._cancel(request)

    def _cancel(self, request: OpenRequest) -> None:
        with self._lock:  # until `_begin` has put the stream in its place
            is_first, request.is_cancelled = not request.is_cancelled, True
        if request.streams is not None:
            request.streams.cancel()
        elif is_first and request.reading is not None and request.reading.cancel():
            self._end_unread(request)

    # Housekeeping

    def _keep_house(self) -> None:
        next_sweep = next_publish = 0.0
        while not self._is_closed.wait(_SWEEP_S):
            now = time.monotonic()
            try:
                if now >= next_sweep:
                    self._sweep()
                    took_s = time.monotonic() - now
                    next_sweep = now + max(_SWEEP_S, took_s / _MAX_SWEEP_FRACTION)
                if now >= next_publish:
                    self._publish()
                    self._look_after_engine()
                    next_publish = now + _PUBLISH_S
            except Exception:  # noqa: BLE001 - metrics or a sweep that fails once must not end the service
                _LOG.exception("housekeeping failed")

    def _sweep(self) -> None:
        for request in self._copy_of_open():
            if request.channel.is_cancelled():
                self._cancel(request)

    def _watch_server(self) -> None:
        """In a thread of its own: a call into a server that has died never returns."""
        while self._watch is not None and not self._is_closed.wait(_WATCH_S):
            if self._on_server_gone is not None and self._watch.is_gone():
                self._on_server_gone()
            elif self.num_open and not self._is_draining and self._watch.is_stopping():
                self.drain()

    def _look_after_engine(self) -> None:
        """Report an engine that serves no more, when its requests have their answers."""
        failure = self._generator.failure
        if failure is not None and not self.num_open and self._on_engine_failed is not None:
            self._on_engine_failed(failure)

    def _publish(self) -> None:
        if self._book is not None:
            self._book.publish(self._generator.statistics)

    def _end_drain(self) -> None:
        deadline = time.monotonic() + self._settings.drain_timeout_s
        while self.num_open and time.monotonic() < deadline:
            time.sleep(_SWEEP_S)
        self._cancel_all()

    def _cancel_all(self) -> None:
        for request in self._copy_of_open():
            self._cancel(request)

    def _copy_of_open(self) -> list[OpenRequest]:
        with self._lock:
            return list(self._open)


def _code_of(error: RequestError) -> ErrorCode:
    return "UNAVAILABLE" if isinstance(error, QueueFullError) else "INVALID_ARG"


def _stopping() -> str:
    return problem("server", expected="one that takes requests", found="one that is stopping", hint="Try another one.")
