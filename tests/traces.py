"""Several requests over one executor, by hand: each enters a step after the last, so that chunks and blocks mix."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dflash_trt.core.batch import RequestResult, StepBatch, StepSampling, plan_of, request_results
from dflash_trt.core.step_plan import StepPlan
from tests.engines import Decoding

PROMPTS = ([5, 9, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [7], [3] * 14)  # of a vocabulary of 12
GREEDY = [StepSampling()] * len(PROMPTS)
SAMPLED = [
    StepSampling(temperature=0.8, top_k=9, top_p=0.95, seed=(1 << 61) + 7),
    StepSampling(temperature=1.3, top_p=0.7, seed=(1 << 61) + 8),
    StepSampling(),
    StepSampling(temperature=2.0, top_k=3, min_p=0.05, seed=3),
]

Steps = list[tuple[RequestResult, ...]]


def trace(
    executor: Any,
    samplings: Sequence[StepSampling],
    *,
    num_draft_tokens: Sequence[int],
    chunk: int = 4,
    num_new: int = 12,
    proposals: Sequence[Sequence[int]] | None = None,
) -> tuple[Steps, list[Decoding]]:
    """Every step's results and all requests, on 12 pages each; the K of the steps come in turn.

    There are as many requests as `samplings`. `proposals` are texts, one per prompt, whose tokens take the place of
    the drafter's.
    """
    pages = iter(range(executor.limits.num_pages))
    runs = [
        Decoding(executor, prompt, tuple(itertools.islice(pages, 12)), sampling)
        for prompt, sampling in zip(PROMPTS, samplings, strict=False)
    ]
    steps: Steps = []
    for step, k in enumerate(itertools.cycle(num_draft_tokens)):
        live = [run for i, run in enumerate(runs) if i <= step and len(run.tokens) < num_new]
        if not live:
            break
        for run, text in zip(runs, proposals or (), strict=False):
            run.drafts = tuple(text[len(run.tokens) : len(run.tokens) + k])
        parts = [run.verify_part(min(k, len(run.drafts))) if run.tokens else run.prefill_part(chunk) for run in live]
        slots = [i for i, run in enumerate(runs) if any(run is other for other in live)]
        batch = StepBatch(requests=tuple(parts), num_draft_tokens=k)
        plan = _in_slots(plan_of(batch, max_pages=executor.limits.max_pages), slots)
        results = request_results(executor.submit(plan).result())
        steps.append(results)
        for run, part, result in zip(live, parts, results, strict=True):
            run.take(part, result)
    return steps, runs


def _in_slots(plan: StepPlan, slots: Sequence[int]) -> StepPlan:
    """The rows of `plan_of`, each in a slot of its own for all steps, where its recurrent state is."""
    ids = np.array(slots)
    updates = replace(plan.page_updates, slots=ids[plan.page_updates.slots])
    slot_updates = tuple(replace(update, slot=slots[update.slot]) for update in plan.slot_updates)
    rows = replace(plan.rows, slot_ids=ids)
    return replace(plan, rows=rows, page_updates=updates, slot_updates=slot_updates)


def integers(steps: Steps) -> list[Any]:
    """Everything the steps decided."""
    return [[(r.emitted_tokens, r.num_accepted, r.draft_tokens, r.next_context_len) for r in row] for row in steps]


def logprobs(steps: Steps) -> torch.Tensor:
    return torch.tensor([value for row in steps for result in row for value in result.logprobs])
