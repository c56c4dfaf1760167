"""An executor without a device, to measure host cost: it packs plans and returns made-up results."""

import time

import numpy as np

from dflash_trt.backends.padding import step_shape
from dflash_trt.backends.step_inputs import StepPacker, StepShapes, updated_entries
from dflash_trt.core.step_plan import CHAINED, ExecutorLimits, KnownStep, StepPlan, StepResult

_STEP_S = 1e-3  # time of a step, as a draft length policy may see it


class MadeUpResults:
    """Made-up results of steps: each draft is accepted with probability `acceptance`.

    Plans come in the order in which they are submitted.
    """

    def __init__(self, limits: ExecutorLimits, *, acceptance: float, seed: int = 0, token_id: int = 0) -> None:
        """`token_id` is every token and every draft."""
        self._acceptance, self._token_id = acceptance, token_id
        self._random = np.random.default_rng(seed)
        self._context_lens = np.zeros(limits.max_batch_size, np.int64)  # by slot

    def of(self, plan: StepPlan) -> StepResult:
        rows, width = plan.rows, plan.rows.num_draft_tokens + 1
        is_accepted = self._random.random((rows.num_requests, width)) < self._acceptance
        is_accepted &= np.arange(width) < rows.num_candidates[:, None]
        num_accepted = np.logical_and.accumulate(is_accepted, axis=1).sum(1)
        starts = np.where(rows.context_lens == CHAINED, self._context_lens[rows.slot_ids], rows.context_lens)
        next_lens = starts + rows.num_tokens - rows.num_candidates + num_accepted
        self._context_lens[rows.slot_ids] = next_lens
        return StepResult(
            emitted_tokens=np.full((rows.num_requests, width), self._token_id, np.int32),
            emitted_logprobs=np.zeros((rows.num_requests, width), np.float32),
            num_accepted=num_accepted.astype(np.int32),
            next_context_lens=next_lens.astype(np.int32),
            draft_tokens=np.full((rows.num_requests, width - 1), self._token_id, np.int32),
        )


class IdleExecutor:
    """Implements StepExecutor. Tokens are zeros, and each draft is accepted with probability `acceptance`.

    `own_s` is the calling thread's CPU time for making results, which no device would cost the host. `between_s` has
    the times from each available result to the end of the next submission.
    """

    has_queue = True
    can_retry = False

    def __init__(self, limits: ExecutorLimits, *, acceptance: float = 0.7, seed: int = 0) -> None:
        self.limits = limits
        self.own_s = 0.0
        self.between_s: list[float] = []
        self._results = MadeUpResults(limits, acceptance=acceptance, seed=seed)
        self._packer = StepPacker(limits)
        self._shapes = StepShapes(limits, step_shape)
        self._page_table = np.zeros(limits.max_batch_size * limits.table_width, np.int32)
        self._read_s: float | None = None

    def submit(self, plan: StepPlan) -> KnownStep:
        self._packer.pack(plan.rows, self._shapes.of(plan))
        updates = plan.page_updates
        if len(updates.slots):
            self._page_table[updated_entries(updates, self.limits)] = updates.page_ids
        submitted_s = time.thread_time()
        if self._read_s is not None:
            self.between_s.append(submitted_s - self._read_s)
            self._read_s = None
        step = KnownStep(self._results.of(plan), self._note_read, elapsed_s=_STEP_S)
        self.own_s += time.thread_time() - submitted_s
        return step

    @property
    def place_files(self) -> dict[bool, int]:
        """There is no host's tier."""
        return {}

    def close(self) -> None:
        """Nothing is held."""

    def _note_read(self) -> None:
        self._read_s = time.thread_time()
