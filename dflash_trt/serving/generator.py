"""Prompts in, texts out, over any engine: what LLM is made of, without an engine directory.

Knows prompts, seeds and end-of-sequence ids; the engine knows the rest.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self
from weakref import finalize

from dflash_trt.core.checked_values import checked, instance, tuple_of
from dflash_trt.core.errors import QueueFullError, RequestError
from dflash_trt.core.own_process import OwnProcess
from dflash_trt.core.request import MAX_SEED, FinishReason, GenerationOutput, Request, SamplingParams
from dflash_trt.serving.prompts import Prompt, PromptReader
from dflash_trt.serving.statistics import EngineStatistics
from dflash_trt.serving.stream import RequestStream
from dflash_trt.serving.stream_chunk import StreamChunk
from dflash_trt.serving.stream_group import StreamGroup

if TYPE_CHECKING:  # tokenizers is loaded only for an engine with one
    from dflash_trt.serving.engine import Engine, EngineLimits
    from dflash_trt.serving.text import TextCodec

# A call with very many prompts hands the engine this many per place in the batch, the others as these end.
_RUNNING_PER_PLACE = 4
_QUEUE_POLL_S = 0.01

_LOG = logging.getLogger(__name__)

_SAMPLING = instance("SamplingParams", SamplingParams)
_SAMPLINGS = tuple_of("SamplingParams, or a list of one for each prompt", _SAMPLING)
Sampling = SamplingParams | Sequence[SamplingParams] | None


class Generator:
    """Owns an engine. Any thread may call any method.

    `seed` makes the seeds of requests without one reproducible: the n-th prompt given to this object always gets the
    same. None draws them at random. `SamplingParams` says when equal seeds give equal texts.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        vocab_size: int,
        codec: TextCodec | None = None,
        eos_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> None:
        self.codec = codec
        self._engine = engine
        self._own_process = OwnProcess()
        self._reader = PromptReader(codec, vocab_size=vocab_size, max_tokens=engine.limits.max_seq_len - 1)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seeds = random.Random(seed)
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of the two above
        engine.start()
        self._close = finalize(self, engine.close)  # also when it is forgotten, and at exit

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def failure(self) -> str | None:
        """See `Engine.failure`."""
        return self._engine.failure

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling = None,
        *,
        on_output: Callable[[int, GenerationOutput], None] | None = None,
    ) -> list[GenerationOutput]:
        """One output per prompt, in order; all of them run together.

        A prompt that is refused gets finish_reason "error" and its reason in `error`, the others are unharmed.
        `on_output` is called here, in this thread, with each prompt's index and output as it is finished.

        Raises:
            RequestError: `prompts` and `sampling` are lists of different lengths, or `sampling` is neither
                SamplingParams nor a list of them.
            ForkError: this is a child that was forked from the engine's process.
        """
        samplings = _one_each(prompts, sampling)
        batch = _Batch(on_output)
        try:
            for index, (prompt, params) in enumerate(zip(prompts, samplings, strict=True)):
                self._submit_when_possible(batch, index, prompt, params)
            while batch.num_running:
                batch.wait_for_one()
        finally:  # an interrupt, or a callback that raised
            batch.cancel()
        return batch.outputs()

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """The answer as it is made; the last chunk has the output. Leaving the iterator ends the request.

        Raises:
            RequestError: the prompt is refused.
        """
        return _chunks(self.submit(prompt, sampling))

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        queue_timeout_s: float | None = None,
        cache_salt: str = "",
        max_pending_tokens: int | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> RequestStream:
        """Start a request and return its stream, for `for`, `async for`, `result` and `cancel`.

        A reader that leaves `max_pending_tokens` untaken has its request set aside until it takes them. `on_ready` is
        called in the engine's thread when there is something to take again; it must be quick and neither read nor call
        back.

        Raises:
            RequestError: the prompt is refused, or the queue is full.
        """
        number, seed = self._draw()
        request = self._request(
            prompt,
            SamplingParams() if sampling is None else sampling,
            request_id=_request_id(number) if request_id is None else request_id,
            seed=seed,
        )
        request = replace(request, priority=priority, queue_timeout_s=queue_timeout_s, cache_salt=cache_salt)
        return self._start(request, max_pending_tokens=max_pending_tokens, on_ready=on_ready)

    @property
    def statistics(self) -> EngineStatistics:
        """Everything measured since the start; a copy."""
        return self._engine.statistics()

    def check_integrity(self) -> None:
        """Assert that no page, place or request is lost; see Engine."""
        self._engine.check_integrity()

    def close(self, *, drains: bool = False) -> None:
        """End: requests that still run get finish_reason "cancelled", or finish first with `drains`."""
        self._engine.close(drains=drains)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Inside

    def _draw(self) -> tuple[int, int]:
        """A number for the next prompt and a seed, should it need one."""
        self._own_process.check()
        with self._lock:
            return next(self._numbers), self._seeds.randrange(MAX_SEED + 1)

    def _request(self, prompt: Prompt, sampling: SamplingParams, *, request_id: str, seed: int) -> Request:
        """Raises RequestError when the prompt or a stop condition cannot be used with this engine."""
        sampling = checked("sampling parameters", sampling, _SAMPLING)
        if sampling.stop and self.codec is None:
            raise RequestError.about(
                "stop strings",
                expected="none, for this engine has no tokenizer",
                found=repr(sampling.stop),
                hint="Use stop_token_ids, or build the engine from a target directory with a tokenizer.",
            )
        eos_token_ids = frozenset() if sampling.ignore_eos else self._eos_token_ids
        return Request(
            request_id=request_id,
            prompt_token_ids=self._reader.read(prompt),
            sampling=sampling,
            stop_token_ids=eos_token_ids | frozenset(sampling.stop_token_ids),
            seed=seed if sampling.seed is None else sampling.seed,
        )

    def _start(
        self, request: Request, *, max_pending_tokens: int | None = None, on_ready: Callable[[], None] | None = None
    ) -> RequestStream:
        detokenizer = self.codec.detokenizer() if self.codec else None
        return self._engine.submit(request, detokenizer, max_pending_tokens=max_pending_tokens, on_ready=on_ready)

    def _submit_when_possible(self, batch: _Batch, index: int, prompt: Prompt, sampling: SamplingParams) -> None:
        """Start one of many; waits while there are enough of them, or while the queue is full."""
        number, seed = self._draw()
        batch.read_ready()
        while True:
            while batch.num_running >= self.limits.max_batch_size * _RUNNING_PER_PLACE:
                batch.wait_for_one()
            try:
                request = self._request(prompt, sampling, request_id=_request_id(number), seed=seed)
                batch.start(index, partial(self._start, request), reads_as_it_comes=bool(sampling.stop))
                return
            except QueueFullError:
                if batch.num_running:
                    batch.wait_for_one()
                else:
                    time.sleep(_QUEUE_POLL_S)  # others fill the queue
            except RequestError as error:
                batch.ended(index, self._refusal(_request_id(number), str(error)))
                return
            except Exception as error:  # noqa: BLE001 - a bug of ours, or a prompt of a type nobody foresaw: its own only
                _LOG.exception("prompt %d could not be read", index)
                batch.ended(index, self._refusal(_request_id(number), f"{type(error).__name__}: {error}"))
                return

    def _refusal(self, request_id: str, error: str) -> GenerationOutput:
        return output_without_tokens(request_id, "error", text="" if self.codec else None, error=error)


def output_without_tokens(
    request_id: str, finish_reason: FinishReason, *, text: str | None, error: str | None = None
) -> GenerationOutput:
    """Of a request that never reached the engine. `text` is None without a tokenizer."""
    return GenerationOutput(
        request_id=request_id,
        text=text,
        token_ids=(),
        logprobs=(),
        finish_reason=finish_reason,
        num_prompt_tokens=0,
        num_verify_steps=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_emitted_by_verify=0,
        time_to_first_token_s=0.0,
        total_s=0.0,
        error=error,
    )


class _Batch:
    """The requests of one `generate` call, whose thread reads them."""

    def __init__(self, on_output: Callable[[int, GenerationOutput], None] | None) -> None:
        self._on_output = on_output
        self._outputs: dict[int, GenerationOutput] = {}
        self._group = StreamGroup()

    @property
    def num_running(self) -> int:
        return len(self._group)

    def start(self, index: int, submit: Callable[..., RequestStream], *, reads_as_it_comes: bool) -> None:
        self._group.start(index, submit, reads_as_it_comes=reads_as_it_comes)

    def ended(self, index: int, output: GenerationOutput) -> None:
        self._outputs[index] = output
        if self._on_output is not None:
            self._on_output(index, output)

    def read_ready(self) -> None:
        """Read what is there, so that stop strings end their requests while prompts are still tokenized."""
        for index, output in self._group.read_ready():
            self.ended(index, output)

    def wait_for_one(self) -> None:
        """Read until one request has ended."""
        self.ended(*self._group.next_output())

    def cancel(self) -> None:
        self._group.cancel()

    def outputs(self) -> list[GenerationOutput]:
        return [self._outputs[index] for index in sorted(self._outputs)]


def _chunks(stream: RequestStream) -> Iterator[StreamChunk]:
    with stream:
        yield from stream


def _one_each(prompts: Sequence[Prompt], sampling: Sampling) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * len(prompts)
    sampling = checked("sampling parameters", sampling, _SAMPLINGS)
    if len(sampling) != len(prompts):
        raise RequestError.about(
            "sampling parameters",
            expected=f"one for each of {len(prompts)} prompts",
            found=str(len(sampling)),
            hint="Pass one SamplingParams for all prompts, or a list of the same length.",
        )
    return sampling


def _request_id(number: int) -> str:
    return f"request-{number}"
