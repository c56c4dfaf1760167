"""Acceptance arithmetic over finished requests: one definition for every report.

A verify step is a step that had at least one draft to verify.
"""

from collections.abc import Iterable, Sequence

from dflash_trt.core.request import GenerationOutput


def acceptance_length(outputs: Iterable[GenerationOutput]) -> float | None:
    """Mean tokens emitted per verify step over all requests, bonus included; None without verified drafts."""
    counted = list(outputs)
    num_verify_steps = sum(output.num_verify_steps for output in counted)
    if not num_verify_steps:
        return None
    return sum(output.num_emitted_by_verify for output in counted) / num_verify_steps


def specdec_bench_acceptance_length(outputs: Iterable[GenerationOutput]) -> float | None:
    """`Average_AL` of NVIDIA's specdec_bench, SPEED-Bench's harness: mean over requests of per-step means.

    Unlike `acceptance_length` it counts every step that gave a token, the one that ended the prefill with length 1, and
    a step's tokens after a stop has cut them. None when no request has a token.
    """
    lengths = [[len(event.token_ids) for event in output.steps if event.token_ids] for output in outputs]
    means = [sum(steps) / len(steps) for steps in lengths if steps]
    return sum(means) / len(means) if means else None


def accepted_fractions(outputs: Sequence[GenerationOutput]) -> tuple[float, ...]:
    """Fraction of the steps verifying draft i (from 0) that accepted it, and so every draft before it."""
    steps = [event for output in outputs for event in output.steps]
    max_candidates = max((event.num_candidates for event in steps), default=0)
    verified = [sum(event.num_candidates > i for event in steps) for i in range(max_candidates)]
    accepted = [sum(event.num_accepted > i for event in steps) for i in range(max_candidates)]
    return tuple(a / v for a, v in zip(accepted, verified, strict=True))
