"""Log probabilities that a step gives besides its tokens': inputs and outputs of an engine's scoring node.

Such a step has shapes and addresses of its own, so it runs without a graph.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.padding import StepShape
from dflash_trt.backends.slots import upload
from dflash_trt.backends.tensorrt.network import HIDDEN_ROWS, SCORED, StepNetworkSpec, score_outputs_of
from dflash_trt.backends.torch.logprobs import on_host, top_of_requests
from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.logprobs import PromptScores, TopTokens
from dflash_trt.core.step_plan import ExecutorLimits, StepPlan, StepResult


class ScoredRows:
    """The node's outputs, at addresses that are bound once, and the inputs of steps that ask for nothing."""

    def __init__(self, spec: StepNetworkSpec, limits: ExecutorLimits, *, device: torch.device) -> None:
        self._device = device
        num_rows = limits.max_batch_size * (limits.max_draft_len + 1) + (limits.max_prompt_scores or 0) + 1
        self.outputs = {
            tensor.name: torch.zeros((num_rows, *tensor.shape[1:]), dtype=torch_dtype(tensor.dtype), device=device)
            for tensor in score_outputs_of(spec)
        }
        self._without = dict(zip(SCORED, torch.zeros((2, 1), dtype=torch.int64, device=device), strict=True))

    def without(self, logit_rows: Tensor) -> dict[str, Tensor]:
        """By name of the engine's tensor, of a step that asks for nothing. `logit_rows` int32 [R*(K+1)]."""
        return self._without | {HIDDEN_ROWS: logit_rows}

    def of_step(self, plan: StepPlan, shape: StepShape) -> "StepScores | None":
        """Upload the rows of a step, on the current stream; None if it reads none, also for other ranks."""
        reads_logits = plan.has_logprobs or plan.num_read_prompt_rows > 0
        return StepScores(plan, shape, self.outputs, self._device) if reads_logits else None


class StepScores:
    """The scored rows of a step: rows of logits of its requests, then those of prompt tokens, and one of nothing."""

    def __init__(self, plan: StepPlan, shape: StepShape, outputs: dict[str, Tensor], device: torch.device) -> None:
        self._plan, self._width, self._outputs = plan, shape.width, outputs
        rows, tokens, of_prompts = _NONE, _NONE, _NONE
        if plan.top_rows is not None:
            rows = (plan.top_rows.requests[:, None] * shape.width + np.arange(shape.width)).ravel()
            tokens = np.zeros_like(rows)
        self._num_top = len(rows)
        if plan.prompt_rows is not None:
            of_prompts = plan.prompt_rows.token_rows
            rows = np.concatenate((rows, shape.num_requests * shape.width + np.arange(len(of_prompts))))
            tokens = np.concatenate((tokens, plan.prompt_rows.next_tokens))
        self._num_rows = len(rows)
        num_of_others = plan.num_read_prompt_rows - len(of_prompts)  # that another rank has more
        of_prompts = np.pad(of_prompts, (0, num_of_others))
        self._of_prompts = upload(torch.from_numpy(of_prompts).int(), device)
        columns = (np.append(column, 0) for column in (rows, tokens))
        self._scored = {name: upload(torch.from_numpy(x), device) for name, x in zip(SCORED, columns, strict=True)}

    def inputs(self, logit_rows: Tensor) -> dict[str, Tensor]:
        """As `ScoredRows.without`: the prompts' tokens follow those of `logit_rows`."""
        return self._scored | {HIDDEN_ROWS: torch.cat((logit_rows, self._of_prompts))}

    def download(self) -> None:
        """Copy the results to the host on the current stream, without waiting."""
        self._outputs = {name: on_host(tensor[: self._num_rows].clone()) for name, tensor in self._outputs.items()}

    def added_to(self, result: StepResult) -> StepResult:
        """Implements ResultReader, after `download`."""
        plan, of_prompts = self._plan, slice(self._num_top, self._num_rows)
        most_likely = self._outputs["top_tokens"], self._outputs["top_logprobs"]
        top, prompt = None, None
        if plan.top_rows is not None:
            count = plan.top_rows.num_top_logprobs
            token_ids, logprobs = (part[: self._num_top, :count].contiguous() for part in most_likely)
            sizes = {"num_requests": plan.rows.num_requests, "width": self._width}
            top = top_of_requests(plan.top_rows, token_ids, logprobs, **sizes)
        if plan.prompt_rows is not None:
            count = plan.prompt_rows.num_top_logprobs
            of_tokens = self._outputs["token_logprobs"][of_prompts].numpy()
            prompt = PromptScores(of_tokens, TopTokens(*(part[of_prompts, :count].numpy() for part in most_likely)))
        return replace(result, top=top, prompt=prompt)


_NONE = np.zeros(0, np.int64)
