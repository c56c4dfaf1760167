"""Requests that change or read the logits of their steps, in both loops of an engine."""

from dataclasses import replace
from typing import Any

from dflash_trt.core.step_plan import StepExecutor
from tests.parity.test_logit_rules import CASES, PROMPTS, make_loop, make_request, outputs_of
from tests.scheduler.toy_constraint import ToyConstraint

NUM_NEW = 8


def answers(executor: StepExecutor) -> list[Any]:
    """What each request gets, over a vocabulary of 12."""
    requests = [
        make_request(name, prompt, max_new_tokens=NUM_NEW, **CASES.get(name, {}))
        for name, prompt in zip(("all", "none", "repetition", "bias"), PROMPTS, strict=True)
    ]
    constraint = ToyConstraint(length=NUM_NEW, one_in=3, vocab_size=12)
    requests += [
        replace(request, request_id=f"masked {i}", constraint=constraint) for i, request in enumerate(requests)
    ]
    found: list[Any] = []
    for overlaps in (False, True):
        loop = make_loop(executor, k=3, overlaps=overlaps)
        found += [list(output.token_ids) for output in outputs_of(loop, requests)]
        loop.close()
    return found
