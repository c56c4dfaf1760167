"""The requests of one `generate` call: prompts, sampling parameters, and outputs in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from queue import SimpleQueue
from typing import Any, cast

from dflash_trt.core.checked_values import checked, instance, tuple_of
from dflash_trt.core.errors import QueueFullError, RequestError
from dflash_trt.core.request import FinishReason, GenerationOutput, Request, SamplingParams
from dflash_trt.core.sampling import MAX_SAMPLES
from dflash_trt.serving.prompts import Prompt
from dflash_trt.serving.stream import QUEUE_POLL_S, RequestStream, joined_output, samples_of

SAMPLING = instance("SamplingParams", SamplingParams)
_SAMPLINGS = tuple_of("SamplingParams, or a list of one for each prompt", SAMPLING)
Sampling = SamplingParams | Sequence[SamplingParams] | None
OnOutput = Callable[[int, GenerationOutput], None]  # a prompt's index, and its output


class StreamGroup:
    """Streams by a number of the caller's, for one thread. Outputs come in the order of completion."""

    def __init__(self) -> None:
        self._streams: dict[int, RequestStream] = {}
        self._news: SimpleQueue[tuple[int, bool]] = SimpleQueue()  # whose; True: it has ended

    def __len__(self) -> int:
        """The number of requests that run."""
        return len(self._streams)

    def start(self, number: int, submit: Callable[..., RequestStream], *, reads_as_it_comes: bool) -> None:
        """Add the stream of a new request; `submit` takes its `on_ready`.

        It is read when it has ended, in one go, or as it comes: so must those with stop strings be, which end thereby.
        """
        on_ready = partial(self._news.put, (number, False)) if reads_as_it_comes else None
        stream = self._streams[number] = submit(on_ready=on_ready)
        stream.call_at_end(partial(self._news.put, (number, True)))

    def next_output(self) -> tuple[int, GenerationOutput]:
        """Read until a request has ended; there must be one."""
        assert self._streams, "nothing runs"
        while (ended := self._read_one()) is None:
            pass
        return ended

    def read_ready(self) -> Iterator[tuple[int, GenerationOutput]]:
        """Read what is there, without waiting; the requests that have ended."""
        while not self._news.empty():
            if (ended := self._read_one()) is not None:
                yield ended

    def cancel(self) -> None:
        """End all of them."""
        for stream in self._streams.values():
            stream.cancel()

    def _read_one(self) -> tuple[int, GenerationOutput] | None:
        number, has_ended = self._news.get()
        if has_ended:
            return number, self._streams.pop(number).result()
        if number in self._streams:
            self._streams[number].take_steps()
        return None


def list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt] | None:
    """None if `prompts` is one prompt: text, an object, or token ids (its first item is an int).

    Raises:
        RequestError: the messages of a conversation, which are for `chat`; or neither a prompt nor a list.
    """
    if isinstance(prompts, str | Mapping):
        return None
    first = next(iter(_items(prompts)), None)
    if isinstance(first, Mapping) and "role" in first:
        hint = 'Call chat(messages), or pass {"messages": messages}.'
        raise RequestError.about("prompts", expected="prompts", found="the messages of a conversation", hint=hint)
    is_token_id = isinstance(first, Integral) and not isinstance(first, bool)
    return None if is_token_id else cast(Sequence[Prompt], prompts)


def one_each(prompts: Sequence[Prompt], sampling: Sampling) -> Sequence[SamplingParams]:
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


async def gathered(outputs: Iterable[Coroutine[None, None, GenerationOutput]]) -> list[GenerationOutput]:
    """All of them, in order. What ends this task ends them."""
    tasks = [asyncio.create_task(output) for output in outputs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def output_without_tokens(
    request_id: str, finish_reason: FinishReason, *, text: str | None, error: str | None = None
) -> GenerationOutput:
    """Output of a request that never reached the engine. `text` is None without a tokenizer."""
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


def _items(value: Any) -> Collection[Any]:
    if isinstance(value, bytes) or not isinstance(value, Collection) or getattr(value, "ndim", 1) == 0:
        found, hint = type(value).__name__, "Pass text, token ids, messages, or a list of such prompts."
        raise RequestError.about("prompts", expected="a prompt or a list of prompts", found=found, hint=hint)
    return value


class Batch:
    """The requests of one `generate` call, whose thread reads them; at most `max_running` run at a time.

    `start` gives a request to the engine, `refuse` makes the output of one that it does not take. `on_output` gets the
    output of each prompt when all of its samples have ended.
    """

    def __init__(
        self,
        start: Callable[..., RequestStream],
        refuse: Callable[[str, Exception], GenerationOutput],
        *,
        max_running: int,
        on_output: OnOutput | None,
    ) -> None:
        self._start = start
        self._refuse = refuse
        self._max_running = max_running
        self._on_output = on_output
        self._outputs: dict[int, GenerationOutput] = {}
        self._num_samples: dict[int, int] = {}
        self._samples: dict[int, dict[int, GenerationOutput]] = {}  # by prompt, until all samples are finished
        self._group = StreamGroup()

    def add(self, index: int, request_id: str, read: Callable[[], Request]) -> None:
        """Start the samples of one prompt; waits while there are enough requests, or while the queue is full.

        `read` makes its request, or raises.
        """
        for number, output in self._group.read_ready():  # stop strings end requests while prompts are tokenized
            self._ended(number, output)
        self._wait_for_place()
        try:
            requests = samples_of(read())
        except Exception as error:  # noqa: BLE001 - see `Generator._refusal`
            self._num_samples[index] = 1
            self._ended(index * MAX_SAMPLES, self._refuse(request_id, error))
            return
        self._num_samples[index] = len(requests)
        for request in requests:
            self._start_sample(index * MAX_SAMPLES + request.sample_index, request)

    def finish(self) -> list[GenerationOutput]:
        """Wait for all of them; their outputs, in the order of the prompts."""
        while len(self._group):
            self._wait_for_one()
        return [self._outputs[index] for index in sorted(self._outputs)]

    def cancel(self) -> None:
        self._group.cancel()

    def _start_sample(self, number: int, request: Request) -> None:
        while True:
            self._wait_for_place()
            try:
                start = partial(self._start, request)
                self._group.start(number, start, reads_as_it_comes=bool(request.sampling.stop))
                return
            except QueueFullError:
                if len(self._group):
                    self._wait_for_one()
                else:
                    time.sleep(QUEUE_POLL_S)  # others fill the queue
            except Exception as error:  # noqa: BLE001 - as above
                self._ended(number, self._refuse(request.request_id, error))
                return

    def _wait_for_place(self) -> None:
        while len(self._group) >= self._max_running:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        """Read until one request has ended."""
        self._ended(*self._group.next_output())

    def _ended(self, number: int, output: GenerationOutput) -> None:
        """One sample; the last one completes its prompt."""
        index, sample_index = divmod(number, MAX_SAMPLES)
        samples = self._samples.setdefault(index, {})
        samples[sample_index] = replace(output, sample_index=sample_index)
        if len(samples) < self._num_samples[index]:
            return
        del self._samples[index]
        self._outputs[index] = joined_output([samples[i] for i in range(len(samples))])
        if self._on_output is not None:
            self._on_output(index, self._outputs[index])
