"""Throughput under a closed load: so many clients, each sending its next request when its last has ended.

How in-flight batching compares with waiting for static batching, and one policy with another, is for `lockstep`.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dflash_trt.core.acceptance import acceptance_length
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.prompts import Prompt
from dflash_trt.serving.stream_group import StreamGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One request to be sent."""

    prompt: Prompt
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """One run. `acceptance_length` counts the bonus."""

    concurrency: int
    num_requests: int
    num_output_tokens: int
    wall_time_s: float
    output_tok_per_s: float
    mean_time_to_first_token_s: float
    acceptance_length: float | None


def mixed_work(prompts: Sequence[Prompt], num_requests: int, max_new_tokens: int) -> list[Work]:
    """Prompts in turn, with many short and few long answers, as requests differ in practice: a third of
    `max_new_tokens` on average.
    """
    lengths = random.Random(0)
    return [
        Work(
            prompt=prompts[i % len(prompts)],
            sampling=SamplingParams(
                max_new_tokens=1 + int((max_new_tokens - 1) * lengths.random() ** 2), ignore_eos=True
            ),
        )
        for i in range(num_requests)
    ]


def run_in_flight(llm: Generator, work: Sequence[Work], *, concurrency: int) -> LoadReport:
    """A request that ends makes room for the next at once."""
    clients = StreamGroup()
    outputs: list[GenerationOutput] = []
    started_s = time.perf_counter()
    for number, item in enumerate(work):
        if number >= concurrency:
            outputs.append(clients.next_output()[1])
        clients.start(number, partial(llm.submit, item.prompt, item.sampling), reads_as_it_comes=False)
    while clients:
        outputs.append(clients.next_output()[1])
    return _report(outputs, concurrency, time.perf_counter() - started_s)


def _report(outputs: Sequence[GenerationOutput], concurrency: int, wall_time_s: float) -> LoadReport:
    failed = [output.error for output in outputs if output.error is not None]
    assert not failed, failed
    num_output_tokens = sum(len(output.token_ids) for output in outputs)
    return LoadReport(
        concurrency=concurrency,
        num_requests=len(outputs),
        num_output_tokens=num_output_tokens,
        wall_time_s=wall_time_s,
        output_tok_per_s=num_output_tokens / wall_time_s,
        mean_time_to_first_token_s=sum(output.time_to_first_token_s for output in outputs) / len(outputs),
        acceptance_length=acceptance_length(outputs),
    )
