"""Prompts in, texts out, over any engine: what LLM is made of, without an engine directory.

Knows prompts, seeds and end-of-sequence ids; the engine knows the rest.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self, TypedDict, Unpack, cast, overload
from weakref import finalize

from dflash_trt.core.chat_template_options import ChatMessage
from dflash_trt.core.checked_values import checked, function, optional
from dflash_trt.core.errors import RequestError
from dflash_trt.core.process import OwnProcess
from dflash_trt.core.request import MAX_SEED, GenerationOutput, Request, SamplingParams
from dflash_trt.serving.generation_batch import (
    Batch,
    OnOutput,
    Sampling,
    gathered,
    list_of_prompts,
    one_each,
    output_without_tokens,
)
from dflash_trt.serving.output_processor import StreamChunk
from dflash_trt.serving.prompts import Prompt, TemplateOptions, conversation, conversations
from dflash_trt.serving.request_reader import RequestReader
from dflash_trt.serving.statistics import EngineStatistics
from dflash_trt.serving.stream import RequestStream, SampleStreams, samples_of

if TYPE_CHECKING:
    from dflash_trt.serving.engine import Engine, EngineLimits


class RequestOptions(TypedDict, total=False):
    """Fields of Request other than its prompt and sampling."""

    priority: int
    queue_timeout_s: float | None
    cache_salt: str
    reports_drafts: bool


# A call with very many prompts hands the engine this many per place in the batch, the others as these end.
_RUNNING_PER_PLACE = 4

_ON_OUTPUT = optional(function("None, or a function of an index and an output"))

_LOG = logging.getLogger(__name__)


class Generator:
    """Owns an engine. Any thread may call any method.

    `seed` makes the seeds of requests without one reproducible: the n-th prompt given to this object always gets the
    same. None draws them at random. `SamplingParams` says when equal seeds give equal texts.
    """

    def __init__(
        self, engine: Engine, reader: RequestReader, *, eos_token_ids: Sequence[int] = (), seed: int | None = None
    ) -> None:
        self.codec = reader.codec
        self._engine = engine
        self._own_process = OwnProcess()
        self._reader = reader
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seeds = random.Random(seed)
        self._has_seed = seed is not None
        self._has_said_limited = False
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards the two above
        engine.start()
        self._close = finalize(self, engine.close)  # also when it is forgotten, and at exit

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def failure(self) -> str | None:
        """See `Engine.failure`."""
        return self._engine.failure

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        on_output: OnOutput | None = None,
        reports_drafts: bool = False,
    ) -> GenerationOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sampling = None,
        *,
        on_output: OnOutput | None = None,
        reports_drafts: bool = False,
    ) -> list[GenerationOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling = None,
        *,
        on_output: OnOutput | None = None,
        reports_drafts: bool = False,
    ) -> GenerationOutput | list[GenerationOutput]:
        """One output for one prompt, a list for a list of prompts, which run together, in their order.

        Text, a list or an array of token ids, and an object are one prompt: {"prompt": text},
        {"prompt_token_ids": ids}, or {"messages": [...], "chat_template_kwargs": {...}}. Any other list is a list of
        prompts, with one SamplingParams for all or one for each: `[1, 2, 3]` is one prompt, `[[1, 2, 3]]` a list.

        Among several, a prompt that is refused gets finish_reason "error" and its reason in `error`; the others are
        unharmed. `on_output` is called in this thread with each prompt's index and output as it is finished. With
        `reports_drafts` the steps of an output have the drafts: see `marked_texts`.

        Raises:
            RequestError: the only prompt is refused; `prompts` are the messages of a conversation; or `sampling_params`
                are of another number than the prompts, or no SamplingParams.
            QueueFullError: too many requests wait already; a list waits for its turn.
            ForkError: this is a child that was forked from the engine's process.
        """
        return self._generate(prompts, sampling_params, on_output, reports_drafts=reports_drafts)

    @overload
    def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        *,
        on_output: OnOutput | None = None,
        **options: Unpack[TemplateOptions],
    ) -> GenerationOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[ChatMessage]],
        sampling_params: Sampling = None,
        *,
        on_output: OnOutput | None = None,
        **options: Unpack[TemplateOptions],
    ) -> list[GenerationOutput]: ...

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: Sampling = None,
        *,
        on_output: OnOutput | None = None,
        **options: Unpack[TemplateOptions],
    ) -> GenerationOutput | list[GenerationOutput]:
        """The next message of one conversation, or of each of a list of conversations, by the chat template.

        `tools` are JSON schemas, or Python functions with type hints and a docstring; `chat_template_kwargs` are other
        variables of the template. Otherwise as `generate`.
        """
        prompts = conversations(messages, **options)
        return self._generate(prompts, sampling_params, on_output)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, reports_drafts: bool = False
    ) -> Iterator[StreamChunk]:
        """The answer as it is made; the last chunk has the output. Leaving the iterator ends the request.

        With `reports_drafts` the steps of a chunk have the drafts: see `DraftMarker`.

        Raises:
            RequestError: the prompt is refused.
        """
        return self.submit_samples(prompt, sampling_params, reports_drafts=reports_drafts).chunks()

    def stream_chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[TemplateOptions],
    ) -> Iterator[StreamChunk]:
        """The next message of a conversation, as `stream` gives it; `options` as for `chat`."""
        return self.stream(conversation(messages, **options), sampling_params)

    @overload
    async def generate_async(  # type: ignore[overload-overlap]
        self, prompts: Prompt, sampling_params: SamplingParams | None = None
    ) -> GenerationOutput: ...

    @overload
    async def generate_async(
        self, prompts: Sequence[Prompt], sampling_params: Sampling = None
    ) -> list[GenerationOutput]: ...

    async def generate_async(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Sampling = None
    ) -> GenerationOutput | list[GenerationOutput]:
        """As `generate`, without blocking the event loop: prompts are read in threads.

        Cancelling the task ends its requests and frees their pages.
        """
        several = list_of_prompts(prompts)
        if several is None:
            one = cast(Prompt, prompts)
            (params,) = one_each([one], sampling_params)
            with await asyncio.to_thread(self.submit_samples, one, params) as streams:
                return await streams.result_async()
        places = asyncio.Semaphore(self.limits.max_batch_size * _RUNNING_PER_PLACE)
        samplings = one_each(several, sampling_params)
        return await gathered(
            self._output_async(self._draw(), prompt, params, places)
            for prompt, params in zip(several, samplings, strict=True)
        )

    async def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[StreamChunk]:
        """As `stream`, for `async for`. Cancelling the task, or closing the iterator, ends the request."""
        with await asyncio.to_thread(self.submit_samples, prompt, sampling_params) as streams:
            async for chunk in streams:
                yield chunk

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        queue_timeout_s: float | None = None,
        cache_salt: str = "",
        reports_drafts: bool = False,
        max_pending_tokens: int | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> RequestStream:
        """Start a request and return its stream, for `for`, `async for`, `result` and `cancel`.

        A reader that leaves `max_pending_tokens` untaken has its request set aside until it takes them. `on_ready` is
        called in the engine's thread when there is something to take again; it must be quick and neither read nor call
        back.

        Raises:
            RequestError: the prompt is refused, the queue is full, or `n` is not 1.
        """
        if sampling_params is not None and sampling_params.n != 1:
            hint = "Call submit_samples, which returns the streams of all samples."
            raise RequestError.about("sampling n", expected="1 for one stream", found=str(sampling_params.n), hint=hint)
        streams = self.submit_samples(
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            queue_timeout_s=queue_timeout_s,
            cache_salt=cache_salt,
            reports_drafts=reports_drafts,
            max_pending_tokens=max_pending_tokens,
            on_ready=on_ready,
        )
        return streams.streams[0]

    def submit_samples(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        max_pending_tokens: int | None = None,
        on_ready: Callable[[], None] | None = None,
        **fields: Unpack[RequestOptions],
    ) -> SampleStreams:
        """Start all `n` samples of a prompt; otherwise as `submit`. Samples 1, 2, ...

        Get id suffixes `/1`, `/2`.

        Raises:
            RequestError: the prompt is refused, or the queue has no room for all samples.
        """
        number, seed = self._draw()
        request = self._request(
            prompt,
            SamplingParams() if sampling_params is None else sampling_params,
            request_id=_request_id(number) if request_id is None else request_id,
            seed=seed,
        )
        requests = samples_of(replace(request, **fields))
        streams = SampleStreams(len(requests), on_ready=on_ready)
        try:
            for sample in requests:
                streams.start(partial(self._start, sample, max_pending_tokens=max_pending_tokens))
        except BaseException:
            streams.cancel()
            raise
        return streams

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

    def _request(
        self, prompt: Prompt, sampling: SamplingParams, *, request_id: str, seed: int, reports_drafts: bool = False
    ) -> Request:
        """Raises RequestError when this engine cannot take it."""
        read = self._reader.read(prompt, sampling)
        self._say_if_limited(len(read.prompt_token_ids), sampling.max_new_tokens)
        eos_token_ids = frozenset() if sampling.ignore_eos else self._eos_token_ids
        return Request(
            request_id=request_id,
            prompt_token_ids=read.prompt_token_ids,
            sampling=sampling,
            stop_token_ids=eos_token_ids | frozenset(sampling.stop_token_ids),
            bad_word_ids=read.bad_word_ids,
            constraint=read.constraint,
            seed=seed if sampling.seed is None else sampling.seed,
            is_reproducible=self._has_seed or sampling.seed is not None,
            reports_drafts=reports_drafts,
        )

    def _say_if_limited(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Log it, once: such requests end with "length", as in other engines."""
        max_seq_len = self.limits.max_seq_len
        if num_prompt_tokens + max_new_tokens > max_seq_len and not self._has_said_limited:
            self._has_said_limited = True
            _LOG.warning(
                "max_new_tokens %d: limited to %d after a prompt of %d tokens by the engine's max_seq_len %d",
                max_new_tokens,
                max_seq_len - num_prompt_tokens,
                num_prompt_tokens,
                max_seq_len,
            )

    def _start(
        self, request: Request, *, max_pending_tokens: int | None = None, on_ready: Callable[[], None] | None = None
    ) -> RequestStream:
        detokenizer = self.codec.detokenizer() if self.codec else None
        return self._engine.submit(request, detokenizer, max_pending_tokens=max_pending_tokens, on_ready=on_ready)

    def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling,
        on_output: OnOutput | None,
        *,
        reports_drafts: bool = False,
    ) -> GenerationOutput | list[GenerationOutput]:
        on_output = checked("on_output", on_output, _ON_OUTPUT)
        several = list_of_prompts(prompts)
        if several is not None:
            return self._generate_all(several, one_each(several, sampling), on_output, reports_drafts=reports_drafts)
        one = cast(Prompt, prompts)
        (params,) = one_each([one], sampling)
        with self.submit_samples(one, params, reports_drafts=reports_drafts) as streams:
            output = streams.result()
        if on_output is not None:
            on_output(0, output)
        return output

    def _generate_all(
        self,
        prompts: Sequence[Prompt],
        samplings: Sequence[SamplingParams],
        on_output: OnOutput | None,
        *,
        reports_drafts: bool,
    ) -> list[GenerationOutput]:
        read = partial(self._request, reports_drafts=reports_drafts)
        batch = Batch(self._start, self._refusal, max_running=self._max_running, on_output=on_output)
        try:
            for index, (prompt, params) in enumerate(zip(prompts, samplings, strict=True)):
                number, seed = self._draw()
                request_id = _request_id(number)
                batch.add(index, request_id, partial(read, prompt, params, request_id=request_id, seed=seed))
            return batch.finish()
        finally:  # an interrupt, or a callback that raised
            batch.cancel()

    @property
    def _max_running(self) -> int:
        return self.limits.max_batch_size * _RUNNING_PER_PLACE

    async def _output_async(
        self, drawn: tuple[int, int], prompt: Prompt, sampling: SamplingParams, places: asyncio.Semaphore
    ) -> GenerationOutput:
        """The output of one of many, once there is a place for it. Waits while the queue is full."""
        request_id, read = _request_id(drawn[0]), partial(self._request, prompt, sampling, seed=drawn[1])
        async with places:
            with SampleStreams(sampling.n) as streams:
                try:
                    for sample in samples_of(await asyncio.to_thread(read, request_id=request_id)):
                        await streams.start_when_possible(partial(self._start, sample))
                except Exception as error:  # noqa: BLE001 - see `_refusal`
                    return self._refusal(request_id, error)
                return await streams.result_async()

    def _refusal(self, request_id: str, error: Exception) -> GenerationOutput:
        """Output of a prompt that could not be read.

        Bugs and unknown prompt types fail their own request only.
        """
        if isinstance(error, RequestError):
            message = str(error)
        else:
            _LOG.error("%s: the prompt could not be read", request_id, exc_info=error)
            message = f"{type(error).__name__}: {error}"
        return output_without_tokens(request_id, "error", text="" if self.codec else None, error=message)


def _request_id(number: int) -> str:
    return f"request-{number}"
