"""Prefixes that went through host memory: texts, log probabilities and drafts as if they had never left."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.page_budget import plan_engine_pages
from dflash_trt.core.request import GenerationOutput, Request, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.statistics import SchedulerStatistics
from dflash_trt.serving.engine_loop import EngineLoop
from tests.executor.rank_engines import build, make_zlab_pair, opened
from tests.parity.test_foreign_state import PAIRS, VOCAB_SIZE, AnyExecutor, open_pair

TALKS = [[(7 * i * i + 3 * i * talk + talk) % VOCAB_SIZE for i in range(30)] for talk in range(5)]
NUM_NEW = 9


def turns(
    executor: AnyExecutor, talks: Sequence[list[int]] = TALKS, *, num_new: int = NUM_NEW
) -> tuple[list[GenerationOutput], SchedulerStatistics]:
    """Every talk in turn, one at a time, and again with its answer and one more token."""
    scheduler = Scheduler(executor.limits)
    loop = EngineLoop(executor, scheduler)
    outputs, prompts = [], [list(talk) for talk in talks]
    for _ in range(2):
        for index, prompt in enumerate(prompts):
            given: dict[str, Any] = {"temperature": 0.8, "seed": index} if index % 2 else {}
            sampling = SamplingParams(max_new_tokens=num_new, ignore_eos=True, logprobs=True, **given)
            request = Request(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling)
            stream = loop.submit(request)
            while loop.step():
                loop.check_integrity()
            outputs.append(stream.result(timeout_s=1))
            prompt += [*outputs[-1].token_ids, index]
    return outputs, scheduler.statistics()


def contents(outputs: list[GenerationOutput]) -> list[Any]:
    return [
        (
            output.token_ids,
            [(step.num_candidates, step.num_accepted) for step in output.steps],
            output.statistics.num_prefix_hit_tokens,
        )
        for output in outputs
    ]


def check_pair(name: str, root: Path, device: torch.device | None = None) -> None:
    """With pages for one request and the host's memory, and with pages for all."""
    found = {}
    for num_sequences, host_bytes in {1: 1 << 22, 20: 0}.items():
        executor = open_pair(name, root, device, num_sequences=num_sequences, host_bytes=host_bytes)
        found[num_sequences] = turns(executor)
        executor.close()
    (outputs, counts), (expected, others) = found.values()
    assert contents(outputs) == contents(expected)
    logprobs, expected_logprobs = ([output.logprobs for output in found] for found in (outputs, expected))
    if "delta nets" in name:  # answers are computed again in the next prompt, whose pages then may be the first ones
        assert all(a == pytest.approx(b, abs=1e-4) for a, b in zip(logprobs, expected_logprobs, strict=True))
    else:
        assert logprobs == expected_logprobs
    assert counts.num_prefix_hit_tokens > 0 and counts.num_accepted_tokens > 0
    assert counts.num_onboarded_pages > 0 and others.num_offloaded_pages == others.num_evicted_pages == 0


def test_on_two_ranks_each_has_places_of_its_own(tmp_path: Path) -> None:
    make_zlab_pair(tmp_path)
    engine, found = build(tmp_path, tp_size=2, max_batch_size=3, max_num_tokens=20), []
    page_bytes = plan_engine_pages(engine.manifest, RuntimeConfig(kv_cache_bytes=1 << 20)).bytes_per_token * 4
    for num_pages, host_bytes in ((17, 1 << 20), (48, None)):
        with opened(engine, kv_cache_bytes=num_pages * page_bytes, host_cache_bytes=host_bytes) as executor:
            found.append(turns(executor, talks=TALKS[:3]))
    (outputs, counts), (expected, _) = found
    assert contents(outputs) == contents(expected)
    assert [output.logprobs for output in outputs] == [output.logprobs for output in expected]
    assert counts.num_onboarded_pages > 0 and counts.num_accepted_tokens > 0


@pytest.mark.parametrize("name", PAIRS)
def test_what_comes_back_is_what_left(name: str, tmp_path: Path) -> None:
    check_pair(name, tmp_path)
