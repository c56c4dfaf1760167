"""The requests of one `generate` call: what is one prompt, who samples how, and their outputs in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from dflash_trt.core.checked_values import checked, instance, tuple_of
from dflash_trt.core.errors import RequestError
from dflash_trt.core.request import FinishReason, GenerationOutput, SamplingParams
from dflash_trt.serving.prompts import Prompt
from dflash_trt.serving.stream import RequestStream
from dflash_trt.serving.stream_group import StreamGroup

SAMPLING = instance("SamplingParams", SamplingParams)
_SAMPLINGS = tuple_of("SamplingParams, or a list of one for each prompt", SAMPLING)
Sampling = SamplingParams | Sequence[SamplingParams] | None
OnOutput = Callable[[int, GenerationOutput], None]  # a prompt's index, and its output


def list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt] | None:
    """None for one prompt: text, an object, and token ids (a list or an array that begins with an integer).

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


def _items(value: Any) -> Collection[Any]:
    if isinstance(value, bytes) or not isinstance(value, Collection) or getattr(value, "ndim", 1) == 0:
        found, hint = type(value).__name__, "Pass text, token ids, messages, or a list of such prompts."
        raise RequestError.about("prompts", expected="a prompt or a list of prompts", found=found, hint=hint)
    return value


class Batch:
    """The requests of one `generate` call, whose thread reads them."""

    def __init__(self, on_output: OnOutput | None) -> None:
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
