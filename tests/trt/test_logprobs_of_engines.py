"""Laws of `tests/parity/test_logprobs.py` over TensorRT's executor, interpreted."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from dflash_trt.backends.tensorrt.scored_rows import StepScores
from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.core.step_plan import StepHandle, StepPlan
from tests.parity.test_logprobs import TOLERANCE, difference, make_requests, run, worst_of
from tests.parity.test_logprobs import model as model
from tests.parity.test_logprobs import pair as pair
from tests.parity.test_logprobs import test_they_equal_those_of_transformers as test_they_equal_those_of_transformers
from tests.parity.test_logprobs import (
    test_too_few_pages_preempt_and_change_nothing as test_too_few_pages_preempt_and_change_nothing,
)
from tests.trt.engines import open_pair_engine


@pytest.fixture(scope="module")
def opened(trt: ModuleType) -> Any:
    return partial(open_pair_engine, trt)


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "chained"])
def test_a_step_scores_no_more_of_prompts_than_the_engine_has_room_for(
    opened: Any, pair: tuple[Path, Path], model: Any, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    executor = opened(*pair)
    executor.limits = replace(executor.limits, max_prompt_scores=7)
    counts, submit = [], executor.submit

    def counted(plan: StepPlan) -> StepHandle:
        counts.append(0 if plan.prompt_rows is None else len(plan.prompt_rows.token_rows))
        handle: StepHandle = submit(plan)
        return handle

    monkeypatch.setattr(executor, "submit", counted)
    assert worst_of(model, run(executor, make_requests(), overlaps=overlaps)) <= TOLERANCE
    assert max(counts) == 7


@pytest.mark.parametrize("name", ["scored_rows", "hidden_rows"])
def test_values_of_the_row_beside_are_noticed(
    opened: Any, pair: tuple[Path, Path], model: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    honest = StepScores.inputs

    def shifted(self: StepScores, logit_rows: Tensor) -> dict[str, Tensor]:
        found = honest(self, logit_rows)
        first = 0 if name == "scored_rows" else len(logit_rows)  # sampled rows stay as they are
        found[name] = found[name].clone()
        found[name][first:] = found[name][first:].roll(1)
        return found

    monkeypatch.setattr(StepScores, "inputs", shifted)
    assert worst_of(model, run(opened(*pair), make_requests())) > 100 * TOLERANCE


def test_short_prompts_that_fill_the_batch_are_scored_too(opened: Any, pair: tuple[Path, Path], model: Any) -> None:
    """With as many rows of logits as verify blocks have at most, and those of prompts."""
    sampling = SamplingParams(max_new_tokens=12, prompt_logprobs=3)
    requests = [Request(request_id=str(i), prompt_token_ids=(i, 7, 3 + i), sampling=sampling) for i in range(8)]
    for request, output in zip(requests, run(opened(*pair), requests), strict=True):
        prompt = list(request.prompt_token_ids)
        assert difference(model, prompt, output, top_logprobs=0, prompt_logprobs=3) <= TOLERANCE
