"""Retry by bisection: every request that cannot be computed fails for its own reason."""

from dflash_trt.core.batch import RequestResult, ScheduledRequest, StepBatch, StepSampling, plan_of
from dflash_trt.executor.bisection import run_with_bisection
from dflash_trt.executor.fake import FakeExecutor
from tests.scheduler.driver import make_limits


class Picky(FakeExecutor):
    """Fails on the first odd token of a batch, by its name."""

    def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
        for row in batch.requests:
            if row.token_ids[0] % 2:
                raise ValueError(f"token {row.token_ids[0]}")
        return super().run_rows(batch)


def test_each_failed_request_is_told_its_own_error() -> None:
    rows = tuple(
        ScheduledRequest(
            request_id=f"r{i}", token_ids=(i,), context_len=0, num_candidates=0, page_ids=(i,), sampling=StepSampling()
        )
        for i in range(6)
    )
    executor = Picky(make_limits(max_batch_size=6))
    result, reasons = run_with_bisection(
        executor, plan_of(StepBatch(requests=rows, num_draft_tokens=2)), ValueError("token 1")
    )
    assert reasons == {i: f"ValueError: token {i}" for i in (1, 3, 5)}
    for i in (0, 2, 4):
        alone = FakeExecutor(executor.limits).submit(plan_of(StepBatch(requests=(rows[i],), num_draft_tokens=2)))
        for name in ("emitted_tokens", "num_accepted", "next_context_lens", "draft_tokens"):
            assert getattr(result, name)[i].tolist() == getattr(alone.result(), name)[0].tolist()
