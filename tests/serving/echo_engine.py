"""A request-level engine without steps, pages or scheduler: its answer is the prompt, token by token.

It shows what the protocol Engine asks for, and that LLM's methods and the servers need nothing else. It says nothing
about any real runtime.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from dflash_trt.core.errors import RequestError
from dflash_trt.core.request import FinishReason, Request, TokenEvent
from dflash_trt.serving.detokenizer import Detokenizer
from dflash_trt.serving.engine import EngineLimits
from dflash_trt.serving.output_processor import Mailbox, OutputProcessor
from dflash_trt.serving.statistics import EngineStatistics, Recorder
from dflash_trt.serving.stream import RequestStream


@dataclass(frozen=True)
class EchoLimits:
    max_batch_size: int = 1
    max_seq_len: int = 64
    max_draft_len: int = 0


@dataclass(eq=False)
class _Running:
    request: Request
    mailbox: Mailbox
    end: tuple[FinishReason, str | None] | None = None  # as the reader asked for

    def end_soon(self, reason: FinishReason, error: str | None = None) -> None:
        self.end = reason, error


class EchoEngine:
    """Implements Engine. Requests are answered one after the other, each token once `may_go_on` is set."""

    limits: EngineLimits = EchoLimits()

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._requests: dict[str, _Running] = {}
        self._queue: SimpleQueue[_Running | None] = SimpleQueue()
        self._recorder = Recorder(time.monotonic())
        self._lock = threading.Lock()  # whoever has read the end of a request finds it in the statistics
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._is_closed = False

    def start(self) -> None:
        self._thread.start()

    def submit(
        self,
        request: Request,
        detokenizer: Detokenizer | None = None,
        *,
        max_pending_tokens: int | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> RequestStream:
        if self._is_closed:
            raise RequestError("the engine is closed")
        now = time.monotonic()
        mailbox = Mailbox(arrived_s=now, max_pending_tokens=max_pending_tokens, on_ready=on_ready)
        running = self._requests[request.request_id] = _Running(request, mailbox)
        self._queue.put(running)
        return RequestStream(mailbox, OutputProcessor(request, detokenizer, arrived_s=now), end=running.end_soon)

    def cancel(self, request_id: str) -> None:
        if request_id in self._requests:
            self._requests[request_id].end_soon("cancelled")

    def statistics(self) -> EngineStatistics:
        with self._lock:
            return self._recorder.statistics(time.monotonic(), num_waiting_now=len(self._requests))

    @property
    def failure(self) -> str | None:
        return None

    def check_integrity(self) -> None:
        assert self._thread.is_alive() or not self._requests

    def close(self, *, drains: bool = False) -> None:
        self._is_closed = True
        for request_id in list(self._requests):
            if not drains:
                self.cancel(request_id)
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (running := self._queue.get()) is not None:
            reason, error = self._echo(running)
            request_id = running.request.request_id
            with self._lock:
                del self._requests[request_id]
                event = TokenEvent(request_id=request_id, token_ids=(), finish_reason=reason, error=error)
                running.mailbox.put(event, time.monotonic())
                self._recorder.add(running.mailbox)
            running.mailbox.run_callbacks()

    def _echo(self, running: _Running) -> tuple[FinishReason, str | None]:
        request = running.request
        for token_id in request.prompt_token_ids[: request.sampling.max_new_tokens]:
            while not self.may_go_on.wait(0.01) and running.end is None:
                pass
            if running.end is not None:
                return running.end
            event = TokenEvent(request_id=request.request_id, token_ids=(token_id,), logprobs=(0.0,))
            running.mailbox.put(event, time.monotonic())
        return "length", None
