"""The floor of a step next to the measured speed, and the fraction of it that was reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import max_draft_len
from dflash_trt.plan.machine_file import MachineFile
from dflash_trt.plan.step_floor import Step, floor_of
from dflash_trt.plan.step_work import EngineWork


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """The roofline at one point: a step of `num_requests` decoding requests with `context_len` tokens.

    `floor_tok_per_s` is the speed of steps at their floor, `reached_fraction` the measured fraction of it: prompts, the
    host and everything besides the floor's bytes and FLOPs are missing. `is_least_k`: K changed from step to step, and
    the floor is for the smallest K that can give as many tokens a step.
    """

    label: str
    machine: str
    num_requests: int
    context_len: int
    num_draft_tokens: int
    memory_floor_s: float
    compute_floor_s: float
    floor_s: float
    floor_tok_per_s: float
    reached_fraction: float
    is_least_k: bool = False

    def __str__(self) -> str:
        name = f"{self.label}: " if self.label else ""
        drafts = f"K {'>=' if self.is_least_k else '='} {self.num_draft_tokens}"
        return (
            f"{name}floor of a step ({self.num_requests} x {self.context_len} tokens, {drafts}): "
            f"memory {1e3 * self.memory_floor_s:.3g} ms, compute {1e3 * self.compute_floor_s:.3g} ms, "
            f"{self.floor_tok_per_s:.0f} tok/s; reached {self.reached_fraction:.0%}"
        )


class Roofs:
    """The floors of one engine on one machine."""

    def __init__(self, engine: EngineDir, machine: MachineFile) -> None:
        config = engine.manifest.pretrained_config
        self._machine = machine
        self._max_draft_len = max_draft_len(engine)
        self._works = {has: EngineWork(config, has_drafter=has) for has in (False, True) if config.draft or not has}

    def fixed_drafts(self, config: RuntimeConfig) -> int | None:
        """K of the steps under these settings; None where it is not one number."""
        if not config.use_drafter:
            return 0
        if config.draft_length is None:
            return None if self._max_draft_len else 0
        return None if config.adaptive_draft_length or len(config.draft_length) > 1 else config.max_draft_tokens

    def beside(
        self,
        tok_per_s: float,
        *,
        num_requests: int,
        context_len: int,
        acceptance_length: float | None,
        num_draft_tokens: int | None = None,
        label: str = "",
    ) -> Roofline:
        """Roofline for the `tok_per_s` of all requests. With K = 0 the drafter takes no part.

        If K is not one number, it is the smallest that the tokens per verify step need.
        """
        length = acceptance_length or 1.0
        drafts = math.ceil(length) - 1 if num_draft_tokens is None else num_draft_tokens
        step = Step(num_requests=num_requests, context_len=context_len, num_draft_tokens=drafts)
        floor = floor_of(self._works[drafts > 0].of(step.rows), self._machine.gpu)
        tokens = num_requests * length
        return Roofline(
            label=label,
            machine=self._machine.name,
            num_requests=num_requests,
            context_len=context_len,
            num_draft_tokens=drafts,
            memory_floor_s=floor.memory_s,
            compute_floor_s=floor.compute_s,
            floor_s=floor.total_s,
            floor_tok_per_s=tokens / floor.total_s,
            reached_fraction=tok_per_s * floor.total_s / tokens,
            is_least_k=num_draft_tokens is None and drafts > 0,
        )


def mean_context_len(prompt_lens: Sequence[int], mean_output_tokens: float) -> int:
    """Tokens of a request half way through its answer."""
    return round(sum(prompt_lens) / len(prompt_lens) + mean_output_tokens / 2)
