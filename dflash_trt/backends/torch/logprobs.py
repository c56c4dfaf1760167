"""Log probabilities besides the emitted tokens', from a step's raw logits; PyTorch on any device.

Nothing of this runs in steps that do not ask for any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.slots import upload
from dflash_trt.core.logprobs import LOGPROBS_ROWS, PromptScores, TopRows, TopTokens
from dflash_trt.core.step_plan import StepPlan, StepResult


class ScoreRows(Protocol):
    """Raw log probabilities of rows of logits."""

    def __call__(
        self, logits: Tensor, num_top: int, *, rows: Tensor | None = None, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The most likely tokens, int32 [M, N], their log probabilities, float32 [M, N], and the tokens'.

        Ties go to the smaller token. The last result has log probabilities of `tokens`, int64 [M], if given. `logits`
        are F [any, V], `rows` int64 [M] their indices, None for all. N is num_top, or V if that is smaller.
        """
        ...


class LogprobsReader:
    """Implements `network.step.LogitsReader` for one step; results stay on the device until read."""

    def __init__(self, plan: StepPlan, device: torch.device | None, score: ScoreRows) -> None:
        self._score = score
        self._num_requests, self._width = plan.rows.num_requests, plan.rows.num_draft_tokens + 1
        self._top_rows, self._top_parts = plan.top_rows, _top_parts(plan, self._width, device)
        self._prompt_rows = plan.prompt_rows
        self._next_tokens: Sequence[Tensor] = ()
        self.prompt_parts: Sequence[Tensor] = ()
        if plan.prompt_rows is not None:
            self.prompt_parts = _parts(torch.from_numpy(plan.prompt_rows.token_rows).int()[:, None], device)
            self._next_tokens = _parts(torch.from_numpy(plan.prompt_rows.next_tokens), device)
        if plan.joint is not None:  # other ranks read more prompts, with a row of this one each time
            num_more = plan.joint.num_prompt_parts - len(self.prompt_parts)
            self.prompt_parts = [*self.prompt_parts, *[upload(torch.zeros(1, 1).int(), device)] * num_more]
        self._top: tuple[Tensor, ...] | None = None
        self._prompt: list[tuple[Tensor, ...]] = []

    def read(self, logits: Tensor) -> None:
        if self._top_rows is not None:
            num_top = self._top_rows.num_top_logprobs
            found = [self._score(logits, num_top, rows=rows)[:2] for rows in self._top_parts]
            self._top = tuple(map(torch.cat, zip(*found, strict=True)))

    def read_prompt(self, logits: Tensor) -> None:
        if self._prompt_rows is None or len(self._prompt) == len(self._next_tokens):
            return
        tokens = self._next_tokens[len(self._prompt)]
        *top, of_tokens = self._score(logits, self._prompt_rows.num_top_logprobs, tokens=tokens)
        assert of_tokens is not None
        self._prompt.append((of_tokens, *top))

    def download(self) -> None:
        """Copy results to the host on the current stream without waiting; call `added_to` after the copies."""
        if self._top is not None:
            self._top = tuple(map(on_host, self._top))
        if self._prompt:
            self._prompt = [tuple(on_host(torch.cat(parts)) for parts in zip(*self._prompt, strict=True))]

    def added_to(self, result: StepResult) -> StepResult:
        """The step's result with what was read and downloaded."""
        top, prompt = None, None
        if self._top is not None and self._top_rows is not None:
            top = top_of_requests(self._top_rows, *self._top, num_requests=self._num_requests, width=self._width)
        if self._prompt:
            logprobs, token_ids, top_logprobs = (torch.cat(parts).numpy() for parts in zip(*self._prompt, strict=True))
            prompt = PromptScores(logprobs, TopTokens(token_ids, top_logprobs))
        return replace(result, top=top, prompt=prompt)


def top_of_requests(
    wanted: TopRows,
    token_ids: Tensor,  # int32 [G*width, N], of the requests that want them
    logprobs: Tensor,  # float32 [G*width, N]
    *,
    num_requests: int,
    width: int,
) -> TopTokens:
    """For all requests of a step, on the host; zeros of the others."""
    requests = wanted.requests
    top = TopTokens.zeros(num_requests, width, wanted.num_top_logprobs)
    top.put(requests, TopTokens(*(part.view(len(requests), width, -1).numpy() for part in (token_ids, logprobs))))
    return top


def score_rows(
    logits: Tensor, num_top: int, *, rows: Tensor | None = None, tokens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Implements ScoreRows."""
    logprobs = (logits if rows is None else logits.index_select(0, rows)).float().log_softmax(1)
    return *top_tokens(logprobs, num_top), None if tokens is None else logprobs.gather(1, tokens[:, None])[:, 0]


def logprobs_reader(
    plan: StepPlan, device: torch.device | None = None, score: ScoreRows = score_rows
) -> LogprobsReader | None:
    """None for a step that asks for nothing on any rank."""
    reads_prompts = plan.joint is not None and plan.joint.num_prompt_parts > 0
    return LogprobsReader(plan, device, score) if plan.has_logprobs or reads_prompts else None


def top_tokens(logprobs: Tensor, num_top: int) -> tuple[Tensor, Tensor]:  # float32 [N, V] -> int32, float32 [N, num]
    """The largest of each row, and their columns; ties by smaller column, which `torch.topk` leaves open.

    Fewer, where a vocabulary has fewer tokens.
    """
    vocab_size = logprobs.shape[1]
    # Integers in the order of the floats: integers of negative floats fall as the bits rise. + 0.0 makes -0.0 a 0.0.
    order = (logprobs + 0.0).view(torch.int32)
    order ^= (order >> 31).bitwise_and_(0x7FFFFFFF)
    columns = torch.arange(vocab_size, device=logprobs.device)
    keys = order.long().bitwise_left_shift_(32).add_(vocab_size - 1 - columns)
    best = keys.topk(min(num_top, vocab_size), dim=1).values
    token_ids = vocab_size - 1 - (best & 0xFFFFFFFF)
    return token_ids.int(), logprobs.gather(1, token_ids)


def _top_parts(plan: StepPlan, width: int, device: torch.device | None) -> Sequence[Tensor]:
    """Rows of logits, int64, in parts."""
    if plan.top_rows is None:
        return ()
    rows = plan.top_rows.requests[:, None] * width + np.arange(width)
    return _parts(torch.from_numpy(rows.flatten()), device)


def _parts(values: Tensor, device: torch.device | None) -> Sequence[Tensor]:
    return torch.split(upload(values, device), LOGPROBS_ROWS)


def on_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
