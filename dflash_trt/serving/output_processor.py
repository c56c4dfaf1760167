"""One request's events, from the engine's thread through a mailbox to text, chunks and finally its output.

The mailbox keeps them in order and unmerged. The engine never waits: `put` costs it about a microsecond, whatever the
reader does. The output processor runs in the reader's thread.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from dflash_trt.core.logprobs import PromptLogprob, TokenLogprob
from dflash_trt.core.request import FinishReason, GenerationOutput, Request, RequestStatistics, TokenEvent
from dflash_trt.serving.detokenizer import Detokenizer
from dflash_trt.serving.stop_strings import StopStrings

_LOG = logging.getLogger(__name__)


Arrival = tuple[TokenEvent, float]  # an event, and when it came by the engine's clock


class Mailbox:
    """`put` and `run_callbacks` are the engine's, the other methods the reader's.

    With `max_pending_tokens` waiting, the engine pauses the request; the reader has it resumed when it has taken them.
    `on_ready` is called in the engine's thread when something comes into the empty mailbox.
    """

    def __init__(
        self, *, arrived_s: float, max_pending_tokens: int | None = None, on_ready: Callable[[], None] | None = None
    ) -> None:
        self.arrived_s = arrived_s
        self.first_token_s: float | None = None
        self.num_tokens = 0  # delivered, up to a cut
        self._max_pending_tokens = max_pending_tokens
        self._on_ready = on_ready
        self._lock = threading.Lock()  # guards the state below; held briefly
        self._arrivals: list[Arrival] = []
        self._num_pending_tokens = 0
        self._last: Arrival | None = None
        self._is_paused = False
        self._is_cut = False
        self._waiters: list[Callable[[], None]] = []
        self._callbacks: list[Callable[[], None]] = []

    @property
    def last(self) -> Arrival | None:
        """The event that ended the request."""
        return self._last

    def put(self, event: TokenEvent, now: float) -> bool:
        """Hand an event over; True if the reader lags too far and the request must be paused.

        The reader calls for it to be resumed when it has taken the events.
        """
        arrival, num_tokens = (event, now), len(event.token_ids)
        with self._lock:
            assert self._last is None, "nothing comes after the end"
            was_empty = not self._arrivals
            self._arrivals.append(arrival)
            if num_tokens and not self._is_cut:
                self.num_tokens += num_tokens
                if self.first_token_s is None:
                    self.first_token_s = now
            if event.finish_reason is not None:
                self._last = arrival
            if self._max_pending_tokens is not None:
                self._num_pending_tokens += num_tokens
                self._is_paused = self._last is None and self._num_pending_tokens >= self._max_pending_tokens
            if self._waiters:
                waiters, self._waiters = self._waiters, []
            else:
                waiters = []
            is_paused = self._is_paused
        for wake in waiters:
            wake()
        if was_empty and self._on_ready is not None:
            _call(self._on_ready, event.request_id)
        return is_paused

    def run_callbacks(self) -> None:
        """Run the end callbacks; called after the last `put`, when the engine is ready to be called back."""
        assert self._last is not None
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _call(callback, self._last[0].request_id)

    def take(self) -> tuple[list[Arrival], bool]:
        """All that has come since, and True if the engine is to resume the request."""
        with self._lock:
            arrivals, self._arrivals, self._num_pending_tokens = self._arrivals, [], 0
            was_paused, self._is_paused = self._is_paused, False
        return arrivals, was_paused

    def cut(self, num_tokens: int) -> None:
        """Count only the first tokens: a stop string ends the text there."""
        with self._lock:
            self._is_cut = True
            self.num_tokens = num_tokens

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until something can be taken, or the request has ended; False after the time."""
        gate = threading.Lock()  # a condition costs the engine more
        gate.acquire()
        if not self.add_waiter(gate.release):
            return True
        try:
            return gate.acquire(timeout=-1 if timeout_s is None else timeout_s)
        finally:
            self.remove_waiter(gate.release)

    def add_waiter(self, wake: Callable[[], None]) -> bool:
        """Have `wake` called once, when something comes; False if something is there, or nothing will come."""
        with self._lock:
            if self._arrivals or self._last is not None:
                return False
            self._waiters.append(wake)
            return True

    def remove_waiter(self, wake: Callable[[], None]) -> None:
        with self._lock:
            if wake in self._waiters:
                self._waiters.remove(wake)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Have `callback` run in the engine's thread at the end, or now if the request has ended."""
        with self._lock:
            if self._last is None:
                self._callbacks.append(callback)
                return
        callback()


def _call(callback: Callable[[], None], request_id: str) -> None:
    try:
        callback()
    except Exception:  # noqa: BLE001 - of the caller's making: the engine's thread must go on
        _LOG.exception("a callback of request %s failed", request_id)


_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamChunk:
    """Tokens and text since the last chunk.

    `text` is None without a tokenizer; the last chunk has `output`. Text may lag the tokens while it could be part of a
    character or of a stop string. `num_draft_tokens` drafts were verified for these tokens, and `num_accepted_tokens`
    of the drafts accepted. `top_logprobs` has an entry per token, if they were requested. `steps` made these tokens.
    """

    text: str | None
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finish_reason: FinishReason | None = None
    output: GenerationOutput | None = None
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    sample_index: int = 0
    steps: tuple[TokenEvent, ...] = ()


def merged(chunks: Sequence[StreamChunk]) -> StreamChunk:
    """Several chunks of one request, at least one, as one."""
    if len(chunks) == 1:
        return chunks[0]
    return StreamChunk(
        text=None if chunks[0].text is None else "".join(chunk.text or "" for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        num_draft_tokens=sum(chunk.num_draft_tokens for chunk in chunks),
        num_accepted_tokens=sum(chunk.num_accepted_tokens for chunk in chunks),
        finish_reason=chunks[-1].finish_reason,
        output=chunks[-1].output,
        top_logprobs=tuple(top for chunk in chunks for top in chunk.top_logprobs),
        sample_index=chunks[0].sample_index,
        steps=tuple(step for chunk in chunks for step in chunk.steps),
    )


class OutputProcessor:
    """Makes chunks; without `detokenizer`, of token ids only.

    Stop strings cut the tokens, too: the last token completes the string. Later events are ignored except for their
    end, so the output depends on the tokens alone: not on how steps grouped them, and not on when the engine learned of
    the stop string.
    """

    def __init__(
        self, request: Request, detokenizer: Detokenizer | None, *, arrived_s: float, records_steps: bool = True
    ) -> None:
        self.request = request
        self.early_end: tuple[Literal["stop", "error"], str | None] | None = None  # with the error's text
        self.output: GenerationOutput | None = None
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(request.sampling.stop) if request.sampling.stop and detokenizer else None
        self._arrived_s = arrived_s
        self._records_steps = records_steps
        self._held: list[StreamChunk] = []  # the chunk of a stop string comes with the end
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[tuple[TokenLogprob, ...]] = []
        self._prompt_logprobs: tuple[PromptLogprob | None, ...] | None = None
        self._steps: list[TokenEvent] = []
        self._first_token_s: float | None = None
        self._ended_early_s = 0.0
        self._num_verify_steps = self._num_draft_tokens = self._num_accepted = 0

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def read(self, arrivals: Sequence[Arrival]) -> StreamChunk | None:
        """Take in the next events, at least one, as one chunk; None from an early end until the engine's end."""
        event, now = arrivals[-1]
        events = [event for event, _ in arrivals if event.token_ids]
        if events and self.early_end is None:
            chunk = self._read_tokens(events, arrivals)
            if event.finish_reason is None and self.early_end is None:
                return chunk
            self._held.append(chunk)
        if event.finish_reason is None:
            return None
        self._held.append(self._last_chunk(event, now))
        return merged(self._held)

    def _read_tokens(self, events: list[TokenEvent], arrivals: Sequence[Arrival]) -> StreamChunk:
        """`events` are the events in `arrivals` that have tokens."""
        try:
            events, text = self._decode(events)
        except Exception as error:  # noqa: BLE001 - text that cannot be made of these tokens fails this request only
            self._fail(error, arrivals[-1][1])
            return StreamChunk(text="", token_ids=(), sample_index=self.request.sample_index)
        if self._first_token_s is None:
            self._first_token_s = arrivals[0][1]
        if self._stop_strings is not None and self._stop_strings.is_found:
            self.early_end, self._ended_early_s = ("stop", None), arrivals[len(events) - 1][1]
        return self._chunk_of(events, text)

    def _decode(self, events: list[TokenEvent]) -> tuple[list[TokenEvent], str | None]:
        """Those that count, cut at a stop string, and their text as far as it is decided."""
        if self._detokenizer is None:
            return events, None
        if self._stop_strings is None:
            return events, self._detokenizer.push(_joined([event.token_ids for event in events]))
        texts: list[str] = []
        for index, event in enumerate(events):
            num_kept = _find_stop(self._detokenizer, self._stop_strings, event.token_ids, texts)
            if self._stop_strings.is_found:
                return [*events[:index], _cut(event, num_kept)], "".join(texts)
        return events, "".join(texts)

    def _chunk_of(self, events: Sequence[TokenEvent], text: str | None) -> StreamChunk:
        num_draft_tokens = num_accepted = 0
        num_top = len(self._top_logprobs)
        for event in events:
            if event.top is not None:
                self._top_logprobs += event.top.tuples()
            if event.prompt is not None:
                self._prompt_logprobs = event.prompt.entries(self.request.prompt_token_ids)
            self._token_ids += event.token_ids
            self._logprobs += event.logprobs
            if event.num_candidates:
                self._num_verify_steps += 1
                num_draft_tokens += event.num_candidates
                num_accepted += event.num_accepted
        self._num_draft_tokens += num_draft_tokens
        self._num_accepted += num_accepted
        if self._records_steps:
            self._steps += events
        if text:
            self._texts.append(text)
        return StreamChunk(
            text=text,
            token_ids=_joined([event.token_ids for event in events]),
            logprobs=_joined([event.logprobs for event in events]),
            top_logprobs=tuple(self._top_logprobs[num_top:]),
            sample_index=self.request.sample_index,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted,
            steps=tuple(events),
        )

    def _last_chunk(self, event: TokenEvent, now: float) -> StreamChunk:
        """The text that was held back, and the whole output; `event` ends the request."""
        assert event.finish_reason is not None
        text = self._flush(now)
        reason: FinishReason = event.finish_reason
        error = event.error
        if self.early_end is not None:
            (reason, error), now = self.early_end, self._ended_early_s
        elif reason == "length" and self._stop_strings is not None and self._stop_strings.is_found:
            reason = "stop"  # a stop string that only the end of the text decided
        self.output = GenerationOutput(
            request_id=self.request.request_id,
            text=None if self._detokenizer is None else "".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=reason,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_verify_steps=self._num_verify_steps,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted,
            num_emitted_by_verify=self._num_accepted + self._num_verify_steps,
            time_to_first_token_s=0.0 if self._first_token_s is None else self._first_token_s - self._arrived_s,
            total_s=now - self._arrived_s,
            error=error,
            statistics=event.statistics or RequestStatistics(),
            steps=tuple(self._steps),
            top_logprobs=tuple(self._top_logprobs),
            prompt_logprobs=self._prompt_logprobs,
            sample_index=self.request.sample_index,
        )
        index = self.request.sample_index
        return StreamChunk(text=text, token_ids=(), finish_reason=reason, output=self.output, sample_index=index)

    def _flush(self, now: float) -> str | None:
        if self._detokenizer is None:
            return None
        text = ""
        if self.early_end is None:
            try:
                text = self._detokenizer.flush()
                if self._stop_strings is not None:
                    text = self._stop_strings.push(text) + self._stop_strings.flush()
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(error, now)
        self._texts.append(text)
        return text

    def _fail(self, error: Exception, now: float) -> None:
        _LOG.exception("request %s: its tokens could not be turned into text", self.request.request_id)
        self.early_end, self._ended_early_s = ("error", f"{type(error).__name__}: {error}"), now


def _joined(parts: Sequence[tuple[_T, ...]]) -> tuple[_T, ...]:
    return parts[0] if len(parts) == 1 else tuple(itertools.chain.from_iterable(parts))


def _cut(event: TokenEvent, num_kept: int) -> TokenEvent:
    return event._replace(
        token_ids=event.token_ids[:num_kept],
        logprobs=event.logprobs[:num_kept],
        top=None if event.top is None else event.top[:num_kept],
    )


def _find_stop(detokenizer: Detokenizer, stop_strings: StopStrings, token_ids: Sequence[int], texts: list[str]) -> int:
    """How many of the tokens to keep; adds their text to `texts`."""
    for index in range(len(token_ids)):
        texts.append(stop_strings.push(detokenizer.push(token_ids[index : index + 1])))
        # Characters that later tokens may change end the text all the same, as long as they stand there.
        if not stop_strings.is_found and (held := detokenizer.held()) and stop_strings.would_end(held):
            texts.append(stop_strings.push(held))
        if stop_strings.is_found:
            return index + 1
    return len(token_ids)
