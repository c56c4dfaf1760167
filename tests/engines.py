"""Executors over tiny checkpoints, and the smallest loop that can drive one: no scheduler, no engine directory."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_trt.backends.page_budget import plan_pages
from dflash_trt.backends.page_groups import PageNeeds, StepSizes
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.backends.torch.loading import bind_tensors
from dflash_trt.backends.torch.native.library import CpuKernels, cpu_kernels
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.checkpoint.specs import with_draft_window
from dflash_trt.core.batch import RequestResult, ScheduledRequest, StepBatch, StepSampling, WindowColumns, run_batch
from dflash_trt.core.dtype import dtype_name
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_states, engine_weights
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.step_plan import PageWindow
from dflash_trt.formats.registry import split_quantized
from dflash_trt.network.step import Network

if TYPE_CHECKING:
    from dflash_trt.backends.cuda.executor import TorchGpuExecutor

PAGE_SIZE = 4


def make_executor(
    target: Path,
    drafter: Path | None = None,
    *,
    quantization: QuantizationSpec | None = None,
    has_kernels: bool = True,
    is_deterministic: bool = False,
    has_confidence: bool = False,
    **sizes: Any,
) -> TorchExecutor:
    """The executor `dflash-trt run` would use for this pair, with small pages; by default a single group of them, which
    a test can lay out by hand. `sizes` are those of `_load`.
    """
    kernels = cpu_kernels() if has_kernels else None
    network, limits = _load(target, drafter, **sizes)
    return TorchExecutor(
        network,
        quantization=quantization,
        is_deterministic=is_deterministic,
        has_confidence=has_confidence,
        kernels=kernels if isinstance(kernels, CpuKernels) else None,
        **limits,
    )


def make_gpu_executor(
    target: Path, drafter: Path | None, *, device: torch.device, quantization: QuantizationSpec | None, **sizes: Any
) -> "TorchGpuExecutor":
    """The same on a GPU, or on a CPU that runs the GPU's kernels."""
    from dflash_trt.backends.cuda.executor import TorchGpuExecutor

    network, limits = _load(target, drafter, device=device, **sizes)
    return TorchGpuExecutor(network, device=device, quantization=quantization, **limits)


def _load(
    target: Path,
    drafter: Path | None,
    *,
    dtype: torch.dtype = torch.float32,
    max_seq_len: int = 256,
    max_batch_size: int = 8,
    num_snapshots: int = 0,
    max_num_tokens: int = 1024,
    has_page_groups: bool = False,
    budget_bytes: int = 1 << 28,
    num_sequences: int | None = None,
    host_bytes: int = 0,
    draft_window: int | None = None,
    device: torch.device | None = None,
) -> tuple[Network[torch.Tensor], dict[str, Any]]:
    """The network and the limits of its executor. `num_sequences` is what pages and snapshots hold."""
    pair = with_draft_window(open_pair(target, drafter), draft_window)
    table = engine_weights(pair.target, pair.draft, pair.quantization)
    tensors = dict(pair.iter_weights(dtype=dtype, mapping=Mapping()))
    if device is not None:
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    max_draft_len = pair.draft.max_draft_len if pair.draft else 0
    plain, quantized = split_quantized(tensors, table, pair.quantization.linears)
    sizes: dict[str, Any] = {
        "states": engine_states(pair.target, pair.draft, dtype=dtype_name(dtype)),
        "page_size": PAGE_SIZE,
        "max_batch_size": max_batch_size,
        "max_seq_len": max_seq_len,
        "steps": StepSizes(max_num_tokens=max_num_tokens, max_draft_len=max_draft_len) if has_page_groups else None,
    }
    page_plan = plan_pages(**sizes, budget_bytes=budget_bytes, num_snapshots=num_snapshots, host_bytes=host_bytes)
    if num_sequences is not None:
        needs = PageNeeds(**sizes)
        windows = [replace(group, num_pages=group.num_pages * num_sequences) for group in needs.page_windows(1)]
        page_plan = replace(
            page_plan,
            num_pages=(needs.pages_per_sequence + 1) * num_sequences,
            num_snapshots=num_sequences if num_snapshots else 0,
            page_windows=tuple(windows),
            num_windows=num_sequences,
        )
    limits = {
        "page_plan": page_plan,
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "max_draft_len": max_draft_len,
    }
    return bind_tensors(pair.target, pair.draft, plain, quantized), limits


@dataclass
class Decoding:
    """One request driven by hand, whose pages have the same ids in every group.

    `blocks` are the verify blocks [anchor, drafts], in order.
    """

    executor: TorchExecutor
    prompt: list[int]
    pages: tuple[int, ...]
    sampling: StepSampling = field(default_factory=StepSampling)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    context_len: int = 0
    drafts: tuple[int, ...] = ()

    def prefill_part(self, num_tokens: int) -> ScheduledRequest:
        chunk = self.prompt[self.context_len : self.context_len + num_tokens]
        return self._scheduled(tuple(chunk), 0)

    def verify_part(self, num_candidates: int) -> ScheduledRequest:
        drafts = self.drafts[:num_candidates]
        return self._scheduled((self.tokens[-1], *drafts), len(drafts))

    def take(self, part: ScheduledRequest, result: RequestResult) -> None:
        """Advance by what the step answered, and check the invariant of the step contract."""
        is_prefill = not self.tokens
        given = len(part.token_ids) - part.num_candidates
        assert result.next_context_len == self.context_len + given + result.num_accepted
        self.context_len, self.drafts = result.next_context_len, result.draft_tokens
        if is_prefill and self.context_len < len(self.prompt):
            return
        if not is_prefill:
            self.blocks.append(list(part.token_ids))
            self.num_accepted.append(result.num_accepted)
        self.tokens.extend(result.emitted_tokens)
        self.logprobs.extend(result.logprobs)
        assert self.context_len == len(self.prompt) + len(self.tokens) - 1  # the anchor's position

    def _scheduled(self, token_ids: tuple[int, ...], num_candidates: int) -> ScheduledRequest:
        return ScheduledRequest(
            request_id="request",
            token_ids=token_ids,
            context_len=self.context_len,
            num_candidates=num_candidates,
            page_ids=self.pages,
            sampling=self.sampling,
            window_pages=tuple(map(self._window_pages, self.executor.limits.page_windows)),
        )

    def _window_pages(self, group: PageWindow) -> WindowColumns:
        first = max(0, self.context_len - group.window + 1) // self.executor.limits.page_size
        assert max(self.pages) < group.num_pages
        return WindowColumns(first, self.pages[first:])


def decode(
    executor: TorchExecutor,
    prompt: list[int],
    num_new_tokens: int,
    *,
    num_draft_tokens: int,
    chunk: int | None = None,
    sampling: StepSampling | None = None,
    pages: tuple[int, ...] | None = None,
    propose: Callable[[Decoding], tuple[int, ...]] | None = None,
) -> Decoding:
    """Prefill in chunks, then draft and verify until `num_new_tokens` are there (the last step may overshoot).

    `propose` replaces the drafter's tokens before each verify step.
    """
    every_page = tuple(range(executor.limits.max_seq_len // executor.limits.page_size))
    run = Decoding(
        executor=executor,
        prompt=prompt,
        pages=every_page if pages is None else pages,
        sampling=sampling or StepSampling(),
    )
    while len(run.tokens) < num_new_tokens:
        if run.tokens:
            if propose is not None:
                run.drafts = propose(run)
            part = run.verify_part(num_draft_tokens)
        else:
            part = run.prefill_part(chunk or len(prompt))
        result = run_batch(executor, StepBatch(requests=(part,), num_draft_tokens=num_draft_tokens))
        run.take(part, result[0])
    return run
