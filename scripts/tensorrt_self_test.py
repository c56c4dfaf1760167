"""Checks of a TensorRT engine on a real GPU before it serves: torch's tokens, written pages, graphs.

Drives both executors with the same hand-made steps. Needs no scheduler; `scripts/gpu_check` prints the findings.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dflash_trt.backends.tensorrt.canary import check_pages
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from dflash_trt.core.batch import (
    RequestResult,
    ScheduledRequest,
    StepBatch,
    StepSampling,
    WindowColumns,
    chained,
    plan_of,
    request_results,
    run_batch,
)
from dflash_trt.core.step_plan import ExecutorLimits, StepExecutor, num_pages_for

_NUM_STEPS = 12
_MAX_PROMPT_LEN = 13


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One row of the table. `detail` says what was compared, or the first difference."""

    name: str
    has_passed: bool
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """One request's pages of a group with a window, which positions take in turn."""

    window: int
    page_size: int
    num_pages: int  # the request's pages in the first group
    page_ids: tuple[int, ...]

    def columns(self, context_len: int, num_tokens: int) -> WindowColumns:
        """Columns that rows of `num_tokens` tokens read or write."""
        first = max(0, context_len - self.window + 1) // self.page_size
        stop = min(num_pages_for(context_len + num_tokens, self.page_size), self.num_pages)
        assert stop - first <= len(self.page_ids), "the pages of a window hold all requests"
        return WindowColumns(first, tuple(self.page_ids[i % len(self.page_ids)] for i in range(first, stop)))


@dataclass(kw_only=True)
class Drive:
    """One request, fed by hand: prefill chunks first, then verify blocks, some with corrupted drafts."""

    prompt: tuple[int, ...]
    page_ids: tuple[int, ...]
    rings: tuple[Ring, ...]  # per page group with a window
    sampling: StepSampling
    context_len: int = 0
    drafts: tuple[int, ...] = ()
    last_token: int | None = None
    history: list[RequestResult] = field(default_factory=list)

    def part(self, *, num_draft_tokens: int, chunk: int) -> ScheduledRequest:
        if self.last_token is None:
            token_ids = self.prompt[self.context_len : self.context_len + chunk]
            num_candidates = 0
        else:
            num_candidates = min(num_draft_tokens, len(self.drafts))
            token_ids = (self.last_token, *self.drafts[:num_candidates])
        num_rows = max(len(token_ids), 2 * (num_draft_tokens + 1))  # a chained step may follow
        return ScheduledRequest(
            request_id=str(self.page_ids[0]),
            token_ids=token_ids,
            context_len=self.context_len,
            num_candidates=num_candidates,
            page_ids=self.page_ids,
            sampling=self.sampling,
            window_pages=tuple(ring.columns(self.context_len, num_rows) for ring in self.rings),
        )

    def take(self, result: RequestResult) -> None:
        self.context_len, self.drafts = result.next_context_len, result.draft_tokens
        if self.context_len >= len(self.prompt):
            self.last_token = result.emitted_tokens[-1]
        self.history.append(result)


def qualify(reference: StepExecutor, engine: TensorRTExecutor, *, vocab_size: int) -> Iterator[Finding]:
    """Every check in turn; a check that raises is a finding that failed."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("greedy tokens, prefill chunks with verify blocks", lambda: _compare(reference, engine, vocab_size, GREEDY)),
        ("sampled tokens, every filter", lambda: _compare(reference, engine, vocab_size, SAMPLED)),
        ("repeated decode shapes (CUDA graphs)", lambda: _repeat(reference, engine, vocab_size)),
        ("chained steps", lambda: _chain(reference, engine, vocab_size, GREEDY[:1])),
        ("chained steps, rejection sampling", lambda: _chain(reference, engine, vocab_size, REJECTION)),
        ("pages of others stay untouched (canary)", lambda: check_pages(engine)),
    ]
    for name, check in checks:
        try:
            yield Finding(name=name, has_passed=True, detail=check())
        except Exception as error:  # noqa: BLE001 - whatever it is belongs into the table
            yield Finding(name=name, has_passed=False, detail=f"{type(error).__name__}: {error}")


GREEDY = (StepSampling(),) * 3
SAMPLED = (
    StepSampling(temperature=0.8, top_k=20, top_p=0.9, seed=(1 << 61) + 1),
    StepSampling(temperature=1.2, min_p=0.02, seed=2),
    StepSampling(),
)
REJECTION = (
    StepSampling(temperature=2.0, seed=3, draft_stream=1),
    StepSampling(temperature=1.5, top_p=0.95, seed=(1 << 61) + 4, draft_stream=1),
    StepSampling(temperature=3.0, min_p=0.02, seed=5, draft_stream=1),
)


def _drives(limits: ExecutorLimits, vocab_size: int, samplings: tuple[StepSampling, ...]) -> list[Drive]:
    generator = random.Random(7)
    num_pages = num_pages_for(_MAX_PROMPT_LEN + _NUM_STEPS * (limits.max_draft_len + 1), limits.page_size)
    return [
        Drive(
            prompt=tuple(generator.randrange(vocab_size) for _ in range(_MAX_PROMPT_LEN - 8 + 4 * i)),
            page_ids=_part(num_pages, i),
            rings=tuple(
                Ring(
                    window=group.window,
                    page_size=limits.page_size,
                    num_pages=num_pages,
                    page_ids=_part(group.num_pages // len(samplings), i),
                )
                for group in limits.page_windows
            ),
            sampling=sampling,
        )
        for i, sampling in enumerate(samplings)
    ]


def _part(size: int, index: int) -> tuple[int, ...]:
    """Pages of the request with this index, `size` each."""
    return tuple(range(size * index, size * (index + 1)))


def _run(
    executor: StepExecutor, drives: list[Drive], vocab_size: int, *, spoils: bool, num_steps: int = _NUM_STEPS
) -> list[tuple[RequestResult, ...]]:
    """Requests enter one step after the other. Corrupted drafts cause rejections, the same in every run."""
    generator = random.Random(11)
    steps = []
    for step in range(num_steps):
        live = drives[: step + 1]
        num_draft_tokens = executor.limits.max_draft_len
        for drive in live:
            if spoils and drive.drafts and generator.random() < 0.5:
                spoiled = generator.randrange(len(drive.drafts))
                token = (drive.drafts[spoiled] + 1) % vocab_size
                drive.drafts = (*drive.drafts[:spoiled], token, *drive.drafts[spoiled + 1 :])
        parts = tuple(drive.part(num_draft_tokens=num_draft_tokens, chunk=6) for drive in live)
        results = run_batch(executor, StepBatch(requests=parts, num_draft_tokens=num_draft_tokens))
        for drive, result in zip(live, results, strict=True):
            drive.take(result)
        steps.append(results)
    return steps


def _compare(
    reference: StepExecutor, engine: StepExecutor, vocab_size: int, samplings: tuple[StepSampling, ...]
) -> str:
    expected, found = (
        _run(executor, _drives(executor.limits, vocab_size, samplings), vocab_size, spoils=True)
        for executor in (reference, engine)
    )
    return _must_be_equal(expected, found)


def _repeat(reference: StepExecutor, engine: StepExecutor, vocab_size: int) -> str:
    """One request alone: the shape repeats after the prefill, so warm-up, capture and replays all happen."""
    expected, found = (
        _run(executor, _drives(executor.limits, vocab_size, GREEDY[:1]), vocab_size, spoils=False)
        for executor in (reference, engine)
    )
    return _must_be_equal(expected, found)


def _chain(reference: StepExecutor, engine: StepExecutor, vocab_size: int, samplings: tuple[StepSampling, ...]) -> str:
    """The last steps are submitted in pairs before results are read; tokens and drafts come from slots."""
    expected, found = (_chained_steps(executor, vocab_size, samplings) for executor in (reference, engine))
    return _must_be_equal(expected, found)


def _chained_steps(
    executor: StepExecutor, vocab_size: int, samplings: tuple[StepSampling, ...]
) -> list[tuple[RequestResult, ...]]:
    num_drafts, max_pages = executor.limits.max_draft_len, executor.limits.max_pages
    drives = _drives(executor.limits, vocab_size, samplings)
    steps = _run(executor, drives, vocab_size, spoils=False, num_steps=6)  # all prompts have been read
    while len(steps) < _NUM_STEPS:
        parts = tuple(drive.part(num_draft_tokens=num_drafts, chunk=6) for drive in drives)
        given = plan_of(StepBatch(requests=parts, num_draft_tokens=num_drafts), max_pages=max_pages)
        for handle in [executor.submit(chained(given)) for _ in range(2)]:
            steps.append(request_results(handle.result()))
            for drive, result in zip(drives, steps[-1], strict=True):
                drive.take(result)
    return steps


def _must_be_equal(expected: list[tuple[RequestResult, ...]], found: list[tuple[RequestResult, ...]]) -> str:
    num_tokens = 0
    for step, (want, have) in enumerate(zip(expected, found, strict=True)):
        for i, (a, b) in enumerate(zip(want, have, strict=True)):
            if _integers(a) != _integers(b):
                raise AssertionError(f"step {step}, request {i}: torch {_integers(a)}, TensorRT {_integers(b)}")
            num_tokens += len(a.emitted_tokens)
    worst = max(
        abs(x - y)
        for want, have in zip(expected, found, strict=True)
        for a, b in zip(want, have, strict=True)
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
    )
    return f"{len(expected)} steps, {num_tokens} tokens equal; log probabilities within {worst:.1e}"


def _integers(result: RequestResult) -> tuple[tuple[int, ...], int, tuple[int, ...], int]:
    return result.emitted_tokens, result.num_accepted, result.draft_tokens, result.next_context_len
