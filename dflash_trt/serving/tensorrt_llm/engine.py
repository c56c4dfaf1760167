"""The Engine interface over TensorRT-LLM: its scheduler, cache and steps.

Our requests, streams and text.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import finalize

from dflash_trt.core.constraint import ConstraintError, TokenMatcher
from dflash_trt.core.errors import ConfigError, EngineDirError, QueueFullError, RequestError, problem
from dflash_trt.core.logprobs import TopTokens
from dflash_trt.core.process import OwnProcess
from dflash_trt.core.request import FinishReason, Request, TokenEvent
from dflash_trt.engine_dir.provenance import CONTAINER
from dflash_trt.serving.output_processor import Mailbox, OutputProcessor
from dflash_trt.serving.statistics import EngineStatistics, Recorder
from dflash_trt.serving.stream import RequestStream
from dflash_trt.serving.tensorrt_llm.link import Answer, Link
from dflash_trt.serving.tensorrt_llm.process import TensorRTLLMMissingError, WorkerProcess
from dflash_trt.serving.tensorrt_llm.sampling import Abilities, trtllm_params
from dflash_trt.serving.tensorrt_llm.server import Server
from dflash_trt.serving.tensorrt_llm.settings import llm_args, resolved_settings

if TYPE_CHECKING:
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.engine_dir import EngineDir, EngineLimits
    from dflash_trt.serving.detokenizer import Detokenizer

PYTHON, URL = "DFLASH_TRT_TRTLLM_PYTHON", "DFLASH_TRT_TRTLLM_URL"


@dataclass(eq=False)
class _Running:
    request: Request
    mailbox: Mailbox
    matcher: TokenMatcher | None
    num_answers: int = 0


class _Ending(NamedTuple):
    """How many tokens of an answer count, and why the request ends with them; None if it goes on."""

    num_tokens: int
    reason: FinishReason | None
    error: str | None


class TensorRTLLMEngine:
    """Implements Engine; owns its link. `config` is resolved.

    An answer is an iteration of TensorRT-LLM, with the tokens that it accepted and its own: acceptance is counted from
    them, against K drafts each. A request whose reader is slow is not paused: its tokens wait for the reader. The
    tokens of a request with a constraint are checked here: it ends where nothing may follow, before the end of sequence
    that TensorRT-LLM would add, and with an error at a token that the constraint refuses.
    """

    page_plan = None  # pages are TensorRT-LLM's

    def __init__(self, link: Link, limits: EngineLimits, config: RuntimeConfig, abilities: Abilities) -> None:
        self.limits = limits
        self._abilities = abilities
        self.config = config
        self._link = link
        self._own_process = OwnProcess()
        self._num_drafts = config.max_draft_tokens
        self._max_running = None if config.max_queue_len is None else limits.max_batch_size + config.max_queue_len
        self._lock = threading.RLock()  # guards the state below
        self._recorder = Recorder(time.monotonic())
        self._running: dict[str, _Running] = {}
        self._forgotten: deque[_Running] = deque()  # whose streams were garbage collected
        self._failure: str | None = None
        self._is_closed = False
        self._changed = threading.Condition(self._lock)

    def start(self) -> None:
        self._link.start(self._take, self._lose)

    def submit(
        self,
        request: Request,
        detokenizer: Detokenizer | None = None,
        *,
        max_pending_tokens: int | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> RequestStream:
        """See Engine. `max_pending_tokens` pauses nothing: a request holds no more than its own tokens."""
        self._own_process.check()
        params = trtllm_params(request, self._abilities, max_seq_len=self.limits.max_seq_len)
        now = time.monotonic()
        mailbox = Mailbox(arrived_s=now, max_pending_tokens=max_pending_tokens, on_ready=on_ready)
        constraint = request.constraint
        running = _Running(request, mailbox, constraint.start(request.stop_token_ids) if constraint else None)
        with self._lock:
            self._end_forgotten()
            self._check_open_for(request)
            self._running[request.request_id] = running
            try:
                self._link.send(request.request_id, request.prompt_token_ids, params)
            except OSError as error:
                del self._running[request.request_id]
                raise RequestError(f"the engine has failed: {error}") from error
        stream = RequestStream(
            mailbox, OutputProcessor(request, detokenizer, arrived_s=now), end=partial(self._end, running)
        )
        # A note only, as it may run in the middle of anything.
        note = finalize(stream, self._forgotten.append, running)
        note.atexit = False
        return stream

    def cancel(self, request_id: str) -> None:
        self._own_process.check()
        with self._lock:
            running = self._running.get(request_id)
        if running is not None:
            self._end(running, "cancelled")

    def statistics(self) -> EngineStatistics:
        self._own_process.check()
        with self._lock:
            return self._recorder.statistics(time.monotonic(), num_running_now=len(self._running))

    @property
    def failure(self) -> str | None:
        with self._lock:
            return None if self._is_closed else self._failure

    def check_integrity(self) -> None:
        with self._lock:
            ended = [name for name, running in self._running.items() if running.mailbox.last is not None]
        assert not ended, f"requests that have ended are still listed: {ended}"

    def close(self, *, drains: bool = False) -> None:
        if not self._own_process.is_this:
            return
        with self._lock:
            self._is_closed = True
            if drains:
                self._changed.wait_for(lambda: not self._running or self._failure is not None)
            left = list(self._running.values())
        for running in left:
            self._end(running, "cancelled")
        self._link.close()

    def _check_open_for(self, request: Request) -> None:
        if self._is_closed:
            raise RequestError("the engine is closed")
        if self._failure is not None:
            raise RequestError(f"the engine has failed: {self._failure}")
        if request.request_id in self._running:
            raise RequestError(f"a request {request.request_id!r} runs already")
        if self._max_running is not None and len(self._running) >= self._max_running:
            raise QueueFullError(f"{len(self._running)} requests run or wait already")

    def _take(self, answer: Answer) -> None:
        """Called in the link's thread."""
        with self._lock:
            self._end_forgotten()
            running = self._running.get(answer.request_id)
            if running is None:
                return  # ended here, and soon there
            end = _Ending(len(answer.token_ids), answer.finish_reason, answer.error)
            if running.matcher is not None:
                end = _constrained_end(running.request, running.matcher, answer, end)
            for event in self._events(running, answer, end.num_tokens):
                running.mailbox.put(event, time.monotonic())
        if answer.finish_reason is not None:
            self._finish(running, end.reason or answer.finish_reason, end.error)
        elif end.reason is not None:
            self._end(running, end.reason, end.error)

    def _events(self, running: _Running, answer: Answer, num_tokens: int) -> Iterator[TokenEvent]:
        """One for each iteration: the first is the prompt's, and of K drafts each accepts at most K.

        The first `num_tokens` count.
        """
        num_top, first = running.request.sampling.top_logprobs, 0
        while first < num_tokens:
            num_drafts = self._num_drafts if running.num_answers else 0
            iteration = slice(first, first + num_drafts + 1)
            part = slice(first, min(iteration.stop, num_tokens))
            first, running.num_answers = iteration.stop, running.num_answers + 1
            top = answer.top[part]
            yield TokenEvent(
                request_id=answer.request_id,
                token_ids=answer.token_ids[part],
                logprobs=answer.logprobs[part],
                num_candidates=num_drafts,
                num_accepted=len(answer.token_ids[iteration]) - 1,
                top=TopTokens.of(row[:num_top] for row in top) if num_top and top else None,
                prompt=None if part.start else answer.prompt,
            )

    def _end(self, running: _Running, reason: FinishReason, error: str | None = None) -> None:
        """End a request now, here; TensorRT-LLM follows."""
        if self._finish(running, reason, error):
            with suppress(OSError):  # the link is lost, and the request with it
                self._link.cancel(running.request.request_id)

    def _finish(self, running: _Running, reason: FinishReason, error: str | None) -> bool:
        """The last event; False if it came before."""
        request_id = running.request.request_id
        with self._lock:
            if self._running.get(request_id) is not running:
                return False
            del self._running[request_id]
            event = TokenEvent(request_id=request_id, token_ids=(), finish_reason=reason, error=error)
            running.mailbox.put(event, time.monotonic())
            self._recorder.add(running.mailbox)
            self._changed.notify_all()
        running.mailbox.run_callbacks()
        return True

    def _end_forgotten(self) -> None:
        while self._forgotten:
            self._end(self._forgotten.popleft(), "cancelled")

    def _lose(self, reason: str) -> None:
        """No more answers come."""
        with self._lock:
            self._failure = reason
            left = list(self._running.values())
            self._changed.notify_all()
        for running in left:
            self._finish(running, "error", reason)


def _constrained_end(request: Request, matcher: TokenMatcher, answer: Answer, end: _Ending) -> _Ending:
    """The end of an answer by the request's constraint: where nothing may follow, or at a token that it refuses."""
    tokens = answer.token_ids
    is_stopped = bool(tokens) and tokens[-1] in request.stop_token_ids
    try:
        num_allowed = matcher.advance(tokens[: len(tokens) - is_stopped])
    except ConstraintError as failure:
        error = problem(
            f"request {request.request_id!r} {request.sampling.grammar_field}",
            expected="tokens that it allows",
            found=str(failure),
            hint="TensorRT-LLM does not follow it: please report it.",
        )
        return _Ending(0, "error", error)
    return _Ending(num_allowed, "stop", None) if matcher.is_finished else end


def engine_abilities(engine: EngineDir, config: RuntimeConfig, refused: Mapping[str, str]) -> Abilities:
    """What an engine can do for requests; `config` is resolved, `refused` is its link's."""
    manifest = engine.manifest
    assert manifest.tensorrt_llm is not None
    args = manifest.tensorrt_llm.llm_args
    drafting = args.get("speculative_config")
    return Abilities(
        vocab_size=manifest.target.vocab_size,
        has_drafter=config.max_draft_tokens > 0,
        has_guides=args.get("guided_decoding_backend") is not None,
        has_penalties=isinstance(drafting, Mapping) and drafting.get("enable_penalty") is True,
        refused=refused,
    )


def checked_trtllm_config(
    engine: EngineDir, config: RuntimeConfig, environment: Mapping[str, str] = os.environ
) -> RuntimeConfig:
    """`config` resolved for TensorRT-LLM; nothing is started.

    Raises:
        ConfigError: a setting that it does not have; or both DFLASH_TRT_TRTLLM_PYTHON and DFLASH_TRT_TRTLLM_URL.
    """
    if environment.get(PYTHON) and environment.get(URL):
        raise ConfigError.about(PYTHON, expected=f"one of it and {URL}", found="both", hint="Unset one.")
    return resolved_settings(engine, config, is_running=bool(environment.get(URL)))


def open_trtllm_engine(
    engine: EngineDir, config: RuntimeConfig, environment: Mapping[str, str] = os.environ
) -> TensorRTLLMEngine:
    """Open an engine in the interpreter or server that the environment names.

    By default in this interpreter.

    Raises:
        EngineDirError: TensorRT-LLM is missing, does not load the engine, or does not answer.
    """
    url = environment.get(URL)
    link: Link
    if url:
        link = Server(url)
    else:
        interpreter = environment.get(PYTHON) or sys.executable
        try:
            link = WorkerProcess(interpreter, llm_args(engine, config), directory=engine.path)
        except TensorRTLLMMissingError as error:
            raise EngineDirError(f"{error} {_how_to_start(engine.path)}") from error
    limits, abilities = engine.manifest.build_config, engine_abilities(engine, config, link.refused)
    return TensorRTLLMEngine(link, limits, config, abilities)


def _how_to_start(path: Path) -> str:
    """The command that starts NVIDIA's container with an engine."""
    directory = shlex.quote(str(path.absolute()))
    command = (
        f"docker run --rm --gpus all --ipc host -p 8000:8000 -v {directory}:{directory}:ro -w {directory} {CONTAINER} "
        "trtllm-serve serve target --config llm_args.yaml --host 0.0.0.0 --port 8000"
    )
    return (
        f"Set {PYTHON} to a Python that has it, or start NVIDIA's container and set {URL}=http://localhost:8000:\n"
        f"    {command}"
    )
