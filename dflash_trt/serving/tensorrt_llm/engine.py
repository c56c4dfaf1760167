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
from typing import TYPE_CHECKING
from weakref import finalize

from dflash_trt.core.errors import ConfigError, EngineDirError, QueueFullError, RequestError
from dflash_trt.core.process import OwnProcess
from dflash_trt.core.request import FinishReason, Request, TokenEvent
from dflash_trt.engine_dir.provenance import CONTAINER
from dflash_trt.serving.output_processor import Mailbox, OutputProcessor
from dflash_trt.serving.statistics import EngineStatistics, Recorder
from dflash_trt.serving.stream import RequestStream
from dflash_trt.serving.tensorrt_llm.link import Answer, Link
from dflash_trt.serving.tensorrt_llm.process import TensorRTLLMMissingError, WorkerProcess
from dflash_trt.serving.tensorrt_llm.sampling import trtllm_params
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
    num_answers: int = 0


class TensorRTLLMEngine:
    """Implements Engine; owns its link. `config` is resolved.

    An answer is an iteration of TensorRT-LLM, with the tokens that it accepted and its own: acceptance is counted from
    them, against K drafts each. A request whose reader is slow is not paused: its tokens wait for the reader.
    """

    page_plan = None  # pages are TensorRT-LLM's

    def __init__(self, link: Link, limits: EngineLimits, config: RuntimeConfig) -> None:
        self.limits = limits
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
        params = trtllm_params(request, max_seq_len=self.limits.max_seq_len, has_drafter=self._num_drafts > 0)
        now = time.monotonic()
        mailbox = Mailbox(arrived_s=now, max_pending_tokens=max_pending_tokens, on_ready=on_ready)
        running = _Running(request, mailbox)
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
            for event in self._events(running, answer):
                running.mailbox.put(event, time.monotonic())
        if answer.finish_reason is not None:
            self._finish(running, answer.finish_reason, answer.error)

    def _events(self, running: _Running, answer: Answer) -> Iterator[TokenEvent]:
        """One for each iteration: the first is the prompt's, and of K drafts each accepts at most K."""
        request_id, left = answer.request_id, answer.token_ids
        while left:
            is_first = running.num_answers == 0
            num_drafts = 0 if is_first else self._num_drafts
            tokens, left = left[: num_drafts + 1], left[num_drafts + 1 :]
            running.num_answers += 1
            yield TokenEvent(
                request_id=request_id, token_ids=tokens, num_candidates=num_drafts, num_accepted=len(tokens) - 1
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
    return TensorRTLLMEngine(link, engine.manifest.build_config, config)


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
