"""Requests that change or read the logits of their steps, in both loops of an engine."""

from dataclasses import replace
from typing import Any

from dflash_trt.core.request import GenerationOutput
from dflash_trt.core.step_plan import StepExecutor
from tests.parity.test_logit_rules import CASES, PROMPTS, make_loop, make_request, outputs_of
from tests.scheduler.toy_constraint import ToyConstraint

NUM_NEW = 8
SCORED = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 3}


def answers(executor: StepExecutor) -> dict[str, list[Any]]:
    """Tokens of each request, over a vocabulary of 12, and all log probabilities, of the plain loop first."""
    requests = [
        make_request(name, prompt, max_new_tokens=NUM_NEW, **SCORED, **CASES.get(name, {}))
        for name, prompt in zip(("all", "none", "repetition", "bias"), PROMPTS, strict=True)
    ]
    constraint = ToyConstraint(length=NUM_NEW, one_in=3, vocab_size=12)
    requests += [
        replace(request, request_id=f"masked {i}", constraint=constraint) for i, request in enumerate(requests)
    ]
    found: dict[str, list[Any]] = {"tokens": [], "logprobs": []}
    for overlaps in (False, True):
        loop = make_loop(executor, k=3, overlaps=overlaps)
        for output in outputs_of(loop, requests):
            found["tokens"].append(list(output.token_ids))
            found["logprobs"] += logprobs_of(output)
        loop.close()
    return found


def logprobs_of(output: GenerationOutput) -> list[float]:
    """Of the prompt's tokens, then of the most likely tokens behind it."""
    of_prompt = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
    return of_prompt + [entry.logprob for entries in output.top_logprobs for entry in entries]
