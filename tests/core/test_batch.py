"""Rows written out and plans are the same step; a result ends before the first logits that gave no token."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.core.batch import (
    ScheduledRequest,
    SlotMirror,
    StepBatch,
    StepSampling,
    WindowColumns,
    plan_of,
    request_results,
)
from dflash_trt.core.logit_rules import LogitRules
from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.core.step_plan import StepResult

K, PAGE_SIZE, MAX_PAGES = 4, 3, 12
WINDOWS = (1, 4, 9)
RULES = LogitRules.of(Request(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(repetition_penalty=2.0)))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 25), st.integers(1, 8)), min_size=1, max_size=5))
def test_a_plan_of_rows_is_those_rows_also_in_groups_with_windows(places: list[tuple[int, int]]) -> None:
    rows = []
    for number, (context_len, num_tokens) in enumerate(places):
        num_pages = -(-(context_len + num_tokens) // PAGE_SIZE)
        firsts = [max(0, context_len - window + 1) // PAGE_SIZE for window in WINDOWS]
        rows.append(
            ScheduledRequest(
                request_id=f"r{number}",
                token_ids=tuple(range(10 * number, 10 * number + num_tokens)),
                context_len=context_len,
                num_candidates=min(K, num_tokens - 1),
                page_ids=tuple(range(100 * number, 100 * number + num_pages)),
                sampling=StepSampling(seed=number),
                logit_rules=RULES if number % 2 else None,
                known_tokens=tuple(range(5, 5 + context_len)) if number % 2 else (),
                window_pages=tuple(
                    WindowColumns(first, tuple(range(1000 * group + first, 1000 * group + num_pages)))
                    for group, first in enumerate(firsts, start=1)
                ),
            )
        )
    batch = StepBatch(requests=tuple(rows), num_draft_tokens=K)
    mirror = SlotMirror(64, windows=WINDOWS, max_pages=MAX_PAGES)
    assert mirror.assemble(plan_of(batch, max_pages=MAX_PAGES), page_size=PAGE_SIZE) == batch


@pytest.mark.parametrize("num_accepted", range(K + 1))
@pytest.mark.parametrize("first_nan", range(K + 1))
def test_logits_without_a_token_end_a_row_as_if_no_draft_behind_them_were_accepted(
    num_accepted: int, first_nan: int
) -> None:
    start, tokens, drafts = 20, list(range(50, 50 + K + 1)), list(range(70, 70 + K))
    logprobs = -np.arange(1.0, K + 2, dtype=np.float32)
    result = StepResult(
        emitted_tokens=np.array([tokens]),
        emitted_logprobs=logprobs[None].copy(),
        num_accepted=np.array([num_accepted]),
        next_context_lens=np.array([start + num_accepted]),
        draft_tokens=np.array([drafts]),
    )
    [whole] = request_results(result)
    result.emitted_logprobs[0, first_nan] = math.nan
    [found] = request_results(result)
    if first_nan > num_accepted:  # behind the bonus: nobody reads it
        assert found == whole
        return
    assert found == replace(
        whole,
        emitted_tokens=tuple(tokens[:first_nan]),
        logprobs=tuple(logprobs[:first_nan].tolist()),
        num_accepted=first_nan,
        draft_tokens=(),
        next_context_len=start + first_nan,
        non_finite_position=start + first_nan - 1,
    )
