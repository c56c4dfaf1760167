"""The loop that serves: one thread owns scheduler and executor, any thread may submit and cancel.

    schedule -> step -> commit -> mailboxes, for as long as there is work.

The lock is held to plan and to commit, never while the device runs. Readers make text of the tokens, in their threads.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from weakref import finalize

from dflash_trt.core.checked_values import checked, function, integer, optional
from dflash_trt.core.errors import RequestError
from dflash_trt.core.prefix_watcher import PrefixWatcher
from dflash_trt.core.process import OwnProcess
from dflash_trt.core.request import FinishReason, Request, TokenEvent
from dflash_trt.core.step_plan import ExecutorLimits, StepExecutor
from dflash_trt.scheduler.data_parallel import StepScheduler
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.detokenizer import Detokenizer
from dflash_trt.serving.output_processor import Mailbox, OutputProcessor
from dflash_trt.serving.prefix_transfers import PlaceBytes, PrefixStore, PrefixTransfers, TransfersOfRanks
from dflash_trt.serving.statistics import EngineStatistics, Recorder
from dflash_trt.serving.step_runner import DeviceLostError, StepReport, StepRunner
from dflash_trt.serving.stream import RequestStream

# How often an engine with nothing but paused requests looks for readers that have gone away.
_PARKED_POLL_S = 0.2
_LOOK_S = 1.0  # whether prefixes have come, at the latest

_MAX_PENDING_TOKENS = optional(integer("None, or an integer of 1 or more", 1))
_ON_READY = optional(function("None, or a function"))

_LOG = logging.getLogger(__name__)


class EngineLoop:
    """Implements Engine over an executor, in the thread that `start` starts.

    Without a thread, call `step` until it returns False. `overlaps` plans each step while the previous one runs.
    `clock` gives seconds and never goes back. `records_steps` keeps each request's events in its output. `reopen`
    returns a new executor with the same limits to replace a lost one; requests that ran on the lost one fail, waiting
    ones are served.
    """

    def __init__(
        self,
        executor: StepExecutor,
        scheduler: StepScheduler | None = None,
        *,
        overlaps: bool = False,
        clock: Callable[[], float] = time.monotonic,
        records_steps: bool = True,
        reopen: Callable[[], StepExecutor] | None = None,
    ) -> None:
        self._executor_limits = executor.limits
        self._own_process = OwnProcess()
        self._scheduler: StepScheduler = scheduler or Scheduler(executor.limits)
        self.limits: ExecutorLimits = self._scheduler.limits
        self._clock = clock
        self._records_steps = records_steps
        self._recorder = Recorder(clock())
        self._mailboxes: dict[str, Mailbox] = {}
        self._forgotten: deque[Callable[[FinishReason], None]] = deque()  # ends of streams that were garbage collected
        self._lock = threading.RLock()  # guards everything above
        self._changed = threading.Condition(self._lock)
        self._reopen = reopen
        self._transfers: PrefixTransfers | TransfersOfRanks | None = None
        self._make_runner = partial(
            StepRunner, self._scheduler, is_chained=overlaps, lock=self._lock, clock=clock, deliver=self._deliver
        )
        self._runner = self._make_runner(executor)
        self._failure: str | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(
        self,
        request: Request,
        detokenizer: Detokenizer | None = None,
        *,
        max_pending_tokens: int | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> RequestStream:
        """Submit a request from any thread; it starts in its turn. Without `detokenizer` there is no text.

        The engine never waits for a reader. A request whose reader has not read `max_pending_tokens` is paused until
        they are read, so that others can run; None means no limit. `on_ready` is called when there is something to read
        again, in the engine's thread, which holds a lock then: it must be quick and neither read nor call back.

        Raises:
            RequestError: it can never run, the queue is full, the engine is closed, or an option is of a wrong kind.
            ForkError: this is a forked child.
        """
        self._own_process.check()
        max_pending_tokens = checked("max_pending_tokens", max_pending_tokens, _MAX_PENDING_TOKENS)
        on_ready = checked("on_ready", on_ready, _ON_READY)
        with self._lock:
            self._check_open_for(request)
            now = self._clock()
            self._scheduler.add(request, now)
            if self._transfers is not None:
                self._transfers.begin(request)
            mailbox = Mailbox(arrived_s=now, max_pending_tokens=max_pending_tokens, on_ready=on_ready)
            self._mailboxes[request.request_id] = mailbox
            self._changed.notify_all()
        output_processor = OutputProcessor(request, detokenizer, arrived_s=now, records_steps=self._records_steps)
        end = partial(self._end, request.request_id, mailbox)
        resume = partial(self._resume, request.request_id, mailbox)
        stream = RequestStream(mailbox, output_processor, end=end, resume=resume)
        # A note only, as it may run in the middle of anything.
        note = finalize(stream, self._forgotten.append, end)
        note.atexit = False
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request now, from any thread; nothing happens when there is none of that name."""
        self._own_process.check()
        with self._lock:
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                self._end(request_id, mailbox, "cancelled")

    def step(self) -> bool:
        """One turn of the loop; False when there is nothing to do. For use without `start`."""
        with self._lock:
            while self._forgotten:
                self._forgotten.popleft()("cancelled")
            if self._transfers is not None:
                self._transfers.advance()
            self._scheduler.expire(self._clock())
        try:
            return self._runner.advance() or self._waits_for_prefixes()
        except DeviceLostError as error:
            self._reopen_after(error)
            return True

    def start(self) -> None:
        """Serve from a thread of its own, until `close`."""
        with self._lock:
            assert self._thread is None and not self._is_closed, "an engine loop starts once"
            self._thread = threading.Thread(target=self._serve, name="dflash-engine", daemon=True)
            self._thread.start()

    def close(self, *, drains: bool = False) -> None:
        """Refuse new requests and stop; `drains` lets the others finish first.

        The remaining requests get finish_reason "cancelled". Does nothing when called again, or in a forked child.
        """
        if not self._own_process.is_this:
            return
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
            if drains and self._thread is not None:
                self._changed.wait_for(lambda: not self._mailboxes)
        while drains and self._thread is None and self.step():
            pass
        with self._lock:
            for request_id, mailbox in list(self._mailboxes.items()):
                self._end(request_id, mailbox, "cancelled")
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if self._transfers is not None:
            self._transfers.close()
        self._runner.close()

    def statistics(self) -> EngineStatistics:
        """Everything measured so far; a copy."""
        self._own_process.check()
        with self._lock:
            return self._recorder.statistics(self._clock(), self._scheduler.statistics())

    @property
    def failure(self) -> str | None:
        """Reason why the engine serves no more; None while it does. Another process may."""
        return self._failure

    def keep_prefixes(
        self,
        schedulers: Sequence[Scheduler],
        store: PrefixStore,
        *,
        root: bytes,
        place_bytes: PlaceBytes,
        publishes_all: bool = False,
    ) -> None:
        """Save the prefixes that leave the device in a store, and take those of new requests from it.

        `schedulers` are those of each rank with requests of its own, or the only one.

        `root` is a hash of what the store's blocks depend on; `place_bytes` is the executor's. `publishes_all` also
        saves what stays on the device, once it is computed.
        """
        prefixes = [scheduler.stored_prefixes(root, publishes_all=publishes_all) for scheduler in schedulers]
        if len(schedulers) > 1:
            self._transfers = TransfersOfRanks(schedulers, prefixes, store, place_bytes=place_bytes, wake=self._wake)
            return
        [scheduler], [of_one] = schedulers, prefixes
        self._transfers = PrefixTransfers(scheduler, of_one, store, place_bytes=place_bytes, wake=self._wake)

    def prefix_keys(self, token_ids: Sequence[int], *, salt: str) -> list[bytes]:
        """Keys of the blocks of a prompt in the store, from the first on; none without a store. In any thread."""
        return [] if self._transfers is None else self._transfers.keys(token_ids, salt=salt)

    def has_kept(self, keys: Sequence[bytes]) -> bool:
        """True if the store has the pages of these blocks, or nothing is on its way there any more."""
        with self._lock:
            transfers = self._transfers
            return transfers is None or transfers.has_saved(keys) or transfers.is_idle

    def read_early(self, token_ids: Sequence[int], keys: Sequence[bytes], *, salt: str) -> bool:
        """Read what a store has of a prompt whose request is to come; True if the engine has all of it.

        `keys` are of `prefix_keys`. In any thread. Call it again for blocks that come to the store later.
        """
        transfers = self._transfers
        if transfers is None:
            return True
        with self._lock:
            key = transfers.missing(token_ids, keys, salt=salt)
        if key is not None and transfers.has_found(key):
            with self._lock:
                transfers.read_early(token_ids, keys, salt=salt)
                self._changed.notify_all()
        return key is None

    def watch_prefixes(self, watcher: PrefixWatcher | None) -> None:
        """Tell `watcher` of every page that the prefix cache stores or evicts, until it is None again."""
        with self._lock:
            self._scheduler.watch_prefixes(watcher)

    def check_integrity(self) -> None:
        """Assert the scheduler's invariants, and that each of its requests has a mailbox and vice versa."""
        self._own_process.check()
        with self._lock:
            self._scheduler.check_integrity()
            assert self._scheduler.request_ids() == set(self._mailboxes), "requests and mailboxes differ"

    # Inside

    def _wake(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _waits_for_prefixes(self) -> bool:
        """Nothing runs: wait for prefixes on their way, or whatever comes first; False if none are."""
        if self._transfers is None:
            return False
        with self._lock:
            if self._transfers.is_waited_for and not self._transfers.has_news:
                self._changed.wait(_LOOK_S)
            return self._transfers.is_waited_for or self._transfers.has_news

    def _check_open_for(self, request: Request) -> None:
        if self._failure is not None:
            hint = "Open the engine again, in a new process if it ran on a GPU."
            raise RequestError.about("engine", expected="one that runs", found=self._failure, hint=hint)
        if self._is_closed:
            raise RequestError.about("engine", expected="an open engine", found="a closed one", hint="Open a new one.")
        if request.request_id in self._mailboxes:  # the scheduler may have ended it without its reader knowing yet
            raise RequestError.about(
                "request id", expected="a new one", found=f"{request.request_id!r}, in use", hint="Choose another."
            )

    def _reopen_after(self, error: DeviceLostError) -> None:
        """Fail the running requests and go on with a new executor; without one, fail everybody and close."""
        _LOG.error("the device is lost: %s", error)
        with self._lock:
            self._deliver(StepReport(events=self._scheduler.lose_device(str(error)), has_failed=True))
        self._runner.close()
        try:
            if self._reopen is None:
                raise error
            executor = self._reopen()
            if executor.limits != self._executor_limits:
                raise DeviceLostError(f"{error}; opened again, its limits are {executor.limits}")
            self._runner = self._make_runner(executor)
        except Exception as failure:  # noqa: BLE001 - whatever a broken device raises
            _LOG.exception("the engine could not be opened again")
            reason = str(failure if isinstance(failure, DeviceLostError) else f"{error}; not opened again: {failure}")
            self._failure = f"the device is lost: {reason}"
            self._fail_everybody(reason)

    def _serve(self) -> None:
        try:
            while True:
                if self.step():
                    continue
                with self._lock:
                    if self._is_closed and not self._mailboxes:
                        return
                    if not self._scheduler.has_work:
                        self._scheduler.check_integrity()
                        self._changed.wait(_PARKED_POLL_S if self._scheduler.num_paused else None)
        except BaseException as error:  # noqa: BLE001 - a bug of ours: no caller may be left waiting
            _LOG.exception("the engine loop died")
            self._fail_everybody(f"the engine stopped: {type(error).__name__}: {error}")

    def _resume(self, request_id: str, mailbox: Mailbox) -> None:
        with self._lock:
            if self._mailboxes.get(request_id) is mailbox and self._scheduler.resume(request_id):
                self._changed.notify_all()

    def _end(self, request_id: str, mailbox: Mailbox, reason: FinishReason, error: str | None = None) -> None:
        """Implements EndRequest."""
        if not self._own_process.is_this:  # the request goes on there
            return
        with self._lock:
            if self._mailboxes.get(request_id) is not mailbox:
                return
            event = self._scheduler.end(request_id, reason, error)
            if event is not None:  # otherwise it has ended, and the next commit has its event
                self._deliver(StepReport(events=[event]))

    def _deliver(self, report: StepReport) -> None:
        """Hand each event to its reader; under the lock, so that a cancellation finds all tokens delivered.

        Stands between two steps: nothing here may depend on the number of tokens, and no text is made.
        """
        now = self._clock()
        self._recorder.add_step(report.elapsed_s, has_failed=report.has_failed)
        mailboxes = self._mailboxes
        ended: list[Mailbox] = []
        for event in report.events:
            mailbox = mailboxes[event.request_id]
            if mailbox.put(event, now):
                self._scheduler.pause(event.request_id)
            if event.finish_reason is not None:
                ended.append(mailboxes.pop(event.request_id))
        if ended:
            self._changed.notify_all()
        for mailbox in ended:
            self._recorder.add(mailbox)
        for mailbox in ended:  # last: a callback may submit and cancel
            mailbox.run_callbacks()

    def _fail_everybody(self, reason: str) -> None:
        with self._lock:
            self._is_closed = True
            for request_id in self._scheduler.request_ids():
                self._scheduler.end(request_id, "cancelled")
            ends = [
                TokenEvent(request_id=request_id, token_ids=(), finish_reason="error", error=reason)
                for request_id in self._mailboxes
            ]
            self._deliver(StepReport(events=ends))
