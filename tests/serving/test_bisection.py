"""Retry by bisection: every request that cannot be computed fails for its own reason."""

from dflash_trt.core.batch import RequestResult, ScheduledRequest, StepBatch, StepResult, StepSampling
from dflash_trt.serving.bisection import run_with_bisection
from tests.scheduler.driver import make_limits


class Picky:
    """Fails on the first odd token of a batch, by its name."""

    limits = make_limits()

    def step(self, batch: StepBatch) -> StepResult:
        for row in batch.requests:
            if row.token_ids[0] % 2:
                raise ValueError(f"token {row.token_ids[0]}")
        result = RequestResult(
            emitted_tokens=(1,), logprobs=(0.0,), num_accepted=0, draft_tokens=(), next_context_len=1
        )
        return StepResult(requests=(result,) * len(batch.requests))


def test_each_failed_request_is_told_its_own_error() -> None:
    rows = tuple(
        ScheduledRequest(
            request_id=f"r{i}", token_ids=(i,), context_len=0, num_candidates=0, page_ids=(i,), sampling=StepSampling()
        )
        for i in range(6)
    )
    batch = StepBatch(requests=rows, num_draft_tokens=0)
    part, result, reasons = run_with_bisection(Picky(), batch, ValueError("token 1"))
    assert reasons == {f"r{i}": f"ValueError: token {i}" for i in (1, 3, 5)}
    assert [row.request_id for row in part.requests] == ["r0", "r2", "r4"]
    assert len(result.requests) == 3
