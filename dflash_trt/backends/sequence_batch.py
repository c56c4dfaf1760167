"""One sequence on neighbouring pages, for measuring: steps that overwrite what is there."""

from collections.abc import Iterator, Sequence

from dflash_trt.core.batch import ScheduledRequest, StepBatch, WindowColumns
from dflash_trt.core.sampling import StepSampling
from dflash_trt.core.step_plan import ExecutorLimits, PageWindow, num_pages_for


def sequence_batch(
    token_ids: Sequence[int],
    *,
    page_size: int,
    context_len: int = 0,
    num_draft_tokens: int = 0,
    page_windows: Sequence[PageWindow] = (),
) -> StepBatch:
    """One sequence or a chunk of it. In groups with a window, page i is i modulo their number of pages."""
    num_pages = num_pages_for(context_len + len(token_ids), page_size)
    firsts = [max(0, context_len - group.window + 1) // page_size for group in page_windows]
    request = ScheduledRequest(
        request_id="sequence",
        token_ids=tuple(token_ids),
        context_len=context_len,
        num_candidates=0,
        page_ids=tuple(range(num_pages)),
        sampling=StepSampling(),
        window_pages=tuple(
            WindowColumns(first, tuple(i % group.num_pages for i in range(first, num_pages)))
            for first, group in zip(firsts, page_windows, strict=True)
        ),
    )
    return StepBatch(requests=(request,), num_draft_tokens=num_draft_tokens)


def sequence_batches(token_ids: Sequence[int], limits: ExecutorLimits) -> Iterator[StepBatch]:
    """The whole sequence, in chunks whose pages fit in addition to every window."""
    spare = [group.num_pages * limits.page_size - group.window - limits.page_size for group in limits.page_windows]
    size = max(1, min(spare, default=len(token_ids)))
    for start in range(0, len(token_ids), size):
        chunk = token_ids[start : start + size]
        yield sequence_batch(chunk, page_size=limits.page_size, context_len=start, page_windows=limits.page_windows)
