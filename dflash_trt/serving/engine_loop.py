"""The loop that serves: one thread owns scheduler and executor, any thread may submit and cancel.

    schedule -> step -> commit -> streams, for as long as there is work.

The lock is held to plan and to commit, never while the device runs.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import finalize

from dflash_trt.core.checked_values import checked, function, integer, optional
from dflash_trt.core.errors import RequestError
from dflash_trt.core.own_process import OwnProcess
from dflash_trt.core.request import FinishReason, Request, RequestStatistics, TokenEvent
from dflash_trt.core.step_plan import ExecutorLimits, StepExecutor
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.detokenizer import Detokenizer
from dflash_trt.serving.output_processor import OutputProcessor
from dflash_trt.serving.statistics import EngineStatistics, Recorder
from dflash_trt.serving.step_runner import StepReport, StepRunner
from dflash_trt.serving.stream import Mailbox, RequestStream, StreamChunk, merged

# How often an engine with nothing but paused requests looks for readers that have gone away.
_PARKED_POLL_S = 0.2

_MAX_PENDING_TOKENS = optional(integer("None, or an integer of 1 or more", 1))
_ON_CHUNK = optional(function("None, or a function"))

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Client:
    """The caller of a request."""

    output_processor: OutputProcessor
    mailbox: Mailbox

    @property
    def request_id(self) -> str:
        return self.output_processor.request.request_id


class EngineLoop:
    """Implements Engine over an executor. `start` gives it its thread; without one, call `step` until it returns False.

    `overlaps` plans each step while the one before it runs. `clock` gives seconds and never goes back.
    `records_steps` keeps each request's events in its output.
    """

    def __init__(
        self,
        executor: StepExecutor,
        scheduler: Scheduler | None = None,
        *,
        overlaps: bool = False,
        clock: Callable[[], float] = time.monotonic,
        records_steps: bool = True,
    ) -> None:
        self.limits: ExecutorLimits = executor.limits
        self._own_process = OwnProcess()
        self._scheduler = scheduler or Scheduler(executor.limits)
        self._clock = clock
        self._records_steps = records_steps
        self._recorder = Recorder(clock())
        self._clients: dict[str, _Client] = {}
        self._forgotten: deque[_Client] = deque()  # their streams were garbage collected
        self._lock = threading.RLock()  # of everything above
        self._changed = threading.Condition(self._lock)
        self._runner = StepRunner(
            self._scheduler, executor, is_chained=overlaps, lock=self._lock, clock=clock, deliver=self._deliver
        )
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(
        self,
        request: Request,
        detokenizer: Detokenizer | None = None,
        *,
        max_pending_tokens: int | None = None,
        on_chunk: Callable[[StreamChunk], None] | None = None,
    ) -> RequestStream:
        """Take a request from any thread; it starts when it is its turn. No `detokenizer`: no text.

        The engine never waits for a reader. A request whose reader has not taken `max_pending_tokens` (None: any
        number) gives its place to others until they are taken. `on_chunk` gets the chunk of each step in the engine's
        thread, which holds a lock then: it must be quick and not call back. The stream has no chunks then.

        Raises:
            RequestError: it can never run, the queue is full, the engine is closed, or an option is of a wrong kind.
            ForkError: this is a forked child.
        """
        self._own_process.check()
        max_pending_tokens = checked("max_pending_tokens", max_pending_tokens, _MAX_PENDING_TOKENS)
        on_chunk = checked("on_chunk", on_chunk, _ON_CHUNK)
        with self._lock:
            self._check_open_for(request)
            now = self._clock()
            self._scheduler.add(request, now)
            output_processor = OutputProcessor(request, detokenizer, arrived_s=now, records_steps=self._records_steps)
            mailbox = Mailbox(
                max_pending_tokens=max_pending_tokens, resume=lambda: self._resume(client), on_chunk=on_chunk
            )
            client = self._clients[request.request_id] = _Client(output_processor, mailbox)
            self._changed.notify_all()
        stream = RequestStream(request.request_id, client.mailbox, lambda: self._cancel(client))
        note = finalize(stream, self._forgotten.append, client)  # may run in the middle of anything: a note only
        note.atexit = False
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request now, from any thread; nothing happens when there is none of that name."""
        self._own_process.check()
        with self._lock:
            client = self._clients.get(request_id)
            if client is not None:
                self._cancel(client)

    def step(self) -> bool:
        """One turn of the loop; False when there is nothing to do. For use without `start`."""
        with self._lock:
            while self._forgotten:
                self._cancel(self._forgotten.popleft())
            self._scheduler.expire(self._clock())
        return self._runner.advance()

    def start(self) -> None:
        """Serve from a thread of its own, until `close`."""
        with self._lock:
            assert self._thread is None and not self._is_closed, "an engine loop starts once"
            self._thread = threading.Thread(target=self._serve, name="dflash-engine", daemon=True)
            self._thread.start()

    def close(self, *, drains: bool = False, timeout_s: float | None = None) -> None:
        """Refuse new requests and stop; `drains` lets the others finish first, for at most `timeout_s`.

        The remaining requests get finish_reason "cancelled". Does nothing when called again, or in a forked child.
        """
        if not self._own_process.is_this:
            return
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
            if drains and self._thread is not None:
                self._changed.wait_for(lambda: not self._clients, timeout_s)
        while drains and self._thread is None and self.step():
            pass
        with self._lock:
            for client in list(self._clients.values()):
                self._cancel(client)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._runner.close()

    def statistics(self) -> EngineStatistics:
        """Everything measured so far; a copy."""
        self._own_process.check()
        with self._lock:
            return self._recorder.statistics(self._clock(), self._scheduler.statistics())

    def check_integrity(self) -> None:
        """Assert the scheduler's invariants, and that each of its requests has somebody waiting for it."""
        self._own_process.check()
        with self._lock:
            self._scheduler.check_integrity()
            assert self._scheduler.request_ids() == set(self._clients), "a request nobody waits for, or the reverse"

    # Inside

    def _check_open_for(self, request: Request) -> None:
        if self._is_closed:
            raise RequestError.about("engine", expected="an open engine", found="a closed one", hint="Open a new one.")
        if request.request_id in self._clients:  # the scheduler may have ended it without its client knowing yet
            raise RequestError.about(
                "request id", expected="a new one", found=f"{request.request_id!r}, in use", hint="Choose another."
            )

    def _serve(self) -> None:
        try:
            while True:
                if self.step():
                    continue
                with self._lock:
                    if self._is_closed and not self._clients:
                        return
                    if not self._scheduler.has_work:
                        self._scheduler.check_integrity()
                        self._changed.wait(_PARKED_POLL_S if self._scheduler.num_paused else None)
        except BaseException as error:  # noqa: BLE001 - a bug of ours: nobody may be left waiting
            _LOG.exception("the engine loop died")
            self._fail_everybody(f"the engine stopped: {type(error).__name__}: {error}")

    def _resume(self, client: _Client) -> None:
        with self._lock:
            if self._clients.get(client.request_id) is client and self._scheduler.resume(client.request_id):
                self._changed.notify_all()

    def _cancel(self, client: _Client) -> None:
        if not self._own_process.is_this:  # the request goes on there
            return
        with self._lock:
            if self._clients.get(client.request_id) is client:
                event = self._scheduler.cancel(client.request_id)
                if event is not None:  # otherwise it has ended, and the next commit has its event
                    self._deliver(StepReport(events=[event]))

    def _deliver(self, report: StepReport) -> None:
        """Hand each event to its client; under the lock, so that a cancellation finds all tokens delivered."""
        now = self._clock()
        self._recorder.add_step(report.elapsed_s, has_failed=report.has_failed)
        ended: list[_Client] = []
        for event in report.events:
            client = self._clients[event.request_id]
            try:
                chunk = self._chunk_of(client, event, now)
            except Exception as error:  # noqa: BLE001 - text that cannot be made of these tokens fails this request only
                _LOG.exception("request %s: its tokens could not be turned into text", event.request_id)
                chunk = self._failed_chunk(client, f"{type(error).__name__}: {error}", now)
            client.mailbox.put(chunk)
            if chunk.output is not None:
                self._recorder.add(chunk.output)
                ended.append(self._clients.pop(event.request_id))
            elif client.mailbox.pause_if_full():
                self._scheduler.pause(event.request_id)
        self._changed.notify_all()
        for client in ended:  # last: a callback may submit and cancel
            client.mailbox.run_callbacks()

    def _chunk_of(self, client: _Client, event: TokenEvent, now: float) -> StreamChunk:
        output_processor = client.output_processor
        chunk = output_processor.add(event, now) if event.token_ids else None
        reason: FinishReason | None = event.finish_reason
        statistics: RequestStatistics | None = event.statistics
        if output_processor.is_stopped:
            stopped = self._scheduler.stop(event.request_id)
            reason, statistics = "stop", stopped.statistics if stopped is not None else statistics
        if reason is None:
            assert chunk is not None, "an event has tokens, or ends its request"
            return chunk
        last = output_processor.finish(reason, now, statistics=statistics, error=event.error)
        return last if chunk is None else merged((chunk, last))

    def _failed_chunk(self, client: _Client, reason: str, now: float) -> StreamChunk:
        event = self._scheduler.fail(client.request_id, reason)
        statistics = event.statistics if event is not None else None
        return client.output_processor.failed(reason, now, statistics=statistics)

    def _fail_everybody(self, reason: str) -> None:
        with self._lock:
            self._is_closed = True
            now = self._clock()
            for client in self._clients.values():
                client.mailbox.put(client.output_processor.failed(reason, now, statistics=None))
                client.mailbox.run_callbacks()
            self._clients.clear()
            self._changed.notify_all()
