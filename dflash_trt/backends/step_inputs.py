"""A StepBatch as the input tensors of the step contract, and output tensors as a StepResult: the one place for both.

The packer writes into memory that is allocated once, column by column, without an object per token of its own. It knows
`STEP_INPUTS` and no tensor's use; which shape a batch is padded to is `padding.py`'s business.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import isnan
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_trt.backends.padding import StepShape, exact_shape, largest_shape, max_pages_per_request
from dflash_trt.core.batch import ExecutorLimits, RequestResult, ScheduledRequest, StepBatch, StepResult
from dflash_trt.core.dtype import num_bytes_of, torch_dtype
from dflash_trt.core.sampling import StepSampling
from dflash_trt.core.step_spec import STEP_INPUTS
from dflash_trt.network.ops import StepInputs
from dflash_trt.network.step import StepOutputs

_ALIGNMENT_BYTES = 256
_Array = NDArray[Any]


def check_batch(batch: StepBatch, limits: ExecutorLimits) -> None:
    """Assert what the scheduler guarantees."""
    assert 0 < len(batch.requests) <= limits.max_batch_size
    assert batch.num_tokens <= limits.max_num_tokens
    assert batch.num_draft_tokens <= limits.max_draft_len
    for request in batch.requests:
        end = request.context_len + len(request.token_ids)
        assert request.token_ids and end <= limits.max_seq_len
        assert end <= len(request.page_ids) * limits.page_size
        assert request.num_candidates <= min(batch.num_draft_tokens, len(request.token_ids) - 1)


def sequence_batch(
    token_ids: Sequence[int], *, page_size: int, context_len: int = 0, num_draft_tokens: int = 0
) -> StepBatch:
    """One sequence, or a chunk of it, on the first pages, for measuring: it overwrites what is there."""
    request = ScheduledRequest(
        request_id="sequence",
        token_ids=tuple(token_ids),
        context_len=context_len,
        num_candidates=0,
        page_ids=tuple(range(-(-(context_len + len(token_ids)) // page_size))),
        sampling=StepSampling(),
    )
    return StepBatch(requests=(request,), num_draft_tokens=num_draft_tokens)


def step_inputs(batch: StepBatch) -> StepInputs[Tensor]:
    """A batch in memory of its own, unpadded."""
    shape = exact_shape(batch)
    assert shape.num_pages is not None
    packer = StepPacker(shape, max_pages=shape.num_pages)
    packer.pack(batch, shape)
    return packer.host.inputs(shape)


class InputBlock:
    """Memory for all step inputs at their largest, side by side in one block that one copy can fill.

    The page table is last: only its rows in use need be copied.
    """

    def __init__(
        self, largest: StepShape, *, max_pages: int, device: torch.device | None = None, is_pinned: bool = False
    ) -> None:
        self._max_pages = max_pages
        tensors = sorted(STEP_INPUTS, key=lambda tensor: tensor.name == "page_table")
        self._table = tensors[-1]
        axes = largest.sizes(max_pages=max_pages)
        sizes = [num_bytes_of(tensor.dtype) * tensor.num_elements(axes) for tensor in tensors]
        starts = [0, *accumulate(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes)]
        self._table_start = starts[-2]
        self.memory = torch.zeros(starts[-1], dtype=torch.uint8, device=device, pin_memory=is_pinned)
        self.flat = {
            tensor.name: self.memory[start : start + size].view(torch_dtype(tensor.dtype))
            for tensor, start, size in zip(tensors, starts, sizes, strict=False)
        }

    def inputs(self, shape: StepShape) -> StepInputs[Tensor]:
        """The tensors in the shapes of a step; the same addresses every time."""
        sizes, views = shape.sizes(max_pages=self._max_pages), {}
        for tensor in STEP_INPUTS:
            view = self.flat[tensor.name][: tensor.num_elements(sizes)]
            views[tensor.name] = view if len(tensor.axes) == 1 else view.view(tensor.extents(sizes))
        return StepInputs(**views)

    def used(self, shape: StepShape) -> Tensor:
        """The bytes that a step of this shape reads."""
        num_ids = self._table.num_elements(shape.sizes(max_pages=self._max_pages))
        return self.memory[: self._table_start + num_ids * num_bytes_of(self._table.dtype)]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the requests of a batch lie one after another."""

    counts: _Array  # tokens of each request
    offsets: _Array  # [R + 1], their sums
    context_lens: _Array
    num_candidates: _Array
    width: int

    @classmethod
    def of(cls, requests: Sequence[ScheduledRequest], width: int) -> "_Layout":
        counts = np.array([len(request.token_ids) for request in requests], dtype=np.int64)
        return cls(
            counts,
            np.concatenate((np.zeros(1, np.int64), counts.cumsum())),
            np.array([request.context_len for request in requests], dtype=np.int64),
            np.array([request.num_candidates for request in requests], dtype=np.int64),
            width,
        )

    def positions(self) -> _Array:
        positions: _Array = np.arange(self.offsets[-1]) - np.repeat(self.offsets[:-1] - self.context_lens, self.counts)
        return positions

    def token_offsets(self) -> _Array:
        return self.offsets

    def logit_rows(self) -> _Array:
        last = self.offsets[1:, None] - 1
        rows: _Array = np.minimum(last - self.num_candidates[:, None] + np.arange(self.width), last)
        return rows.ravel()


_FROM_LAYOUT: Final[dict[str, Callable[[_Layout], _Array]]] = {
    "positions": _Layout.positions,
    "token_offsets": _Layout.token_offsets,
    "logit_rows": _Layout.logit_rows,
}


class StepPacker:
    """Writes batches into `host`, whose tensors are those of the last one packed.

    With a `scratch_page`, requests that pad a step have a verify block each on that page; without one they have no
    tokens. Token rows beyond those of the requests are of no request.
    """

    def __init__(
        self, largest: StepShape, *, max_pages: int, scratch_page: int | None = None, is_pinned: bool = False
    ) -> None:
        self.host = InputBlock(largest, max_pages=max_pages, is_pinned=is_pinned)
        self._max_pages = max_pages
        self._scratch_page = scratch_page
        self._columns = [(t, self.host.flat[t.name].numpy(), attrgetter(t.source or "token_ids")) for t in STEP_INPUTS]
        self._table = _PageTable(self.host.flat["page_table"].numpy(), filler=scratch_page or 0)

    @classmethod
    def of_limits(
        cls, limits: ExecutorLimits, *, scratch_page: int | None = None, is_pinned: bool = False
    ) -> "StepPacker":
        """Room for every step that the limits allow."""
        max_pages = max_pages_per_request(limits)
        return cls(largest_shape(limits), max_pages=max_pages, scratch_page=scratch_page, is_pinned=is_pinned)

    def pack(self, batch: StepBatch, shape: StepShape) -> None:
        """Overwrite the tensors of the batch before."""
        requests = self._padded(batch.requests, shape)
        layout, sizes = _Layout.of(requests, shape.width), shape.sizes(max_pages=self._max_pages)
        for tensor, column, of_request in self._columns:
            if "P" in tensor.axes:
                self._table.write([of_request(request) for request in requests], sizes["P"])
                continue
            values: Any
            if tensor.source is None:
                values = _FROM_LAYOUT[tensor.name](layout)
            elif "T" in tensor.axes:
                tokens = chain.from_iterable(of_request(request) for request in requests)
                values = np.fromiter(tokens, dtype=column.dtype, count=layout.offsets[-1])
            else:
                values = [of_request(request) for request in requests]
            column[: len(values)] = values
            unused = column[len(values) : tensor.num_elements(sizes)]
            unused[:] = layout.offsets[-1] if tensor.name == "token_offsets" else tensor.padding

    def _padded(self, requests: tuple[ScheduledRequest, ...], shape: StepShape) -> tuple[ScheduledRequest, ...]:
        num_missing = shape.num_requests - len(requests)
        if self._scratch_page is None or num_missing == 0:
            return requests
        block = ScheduledRequest(
            request_id="padding",
            token_ids=(0,) * shape.width,
            context_len=0,
            num_candidates=shape.num_draft_tokens,
            page_ids=(self._scratch_page,),
            sampling=StepSampling(),
        )
        return requests + (block,) * num_missing


class _PageTable:
    """The page table on the host: a row is rewritten only from where it differs from that of the step before.

    Behind the pages of a request its row holds the filler, which is never read but may be gathered.
    """

    def __init__(self, flat: _Array, *, filler: int) -> None:
        self._flat = flat
        self._filler = filler
        self._width = 0
        self._written: list[tuple[int, ...]] = []
        flat[:] = filler

    def write(self, rows: Sequence[tuple[int, ...]], width: int) -> None:
        """Rows of `width` entries. Another width than before rewrites all."""
        if width != self._width:
            self._flat[: self._width * len(self._written)] = self._filler  # all that is not filler already
            self._width, self._written = width, []
        self._written.extend([()] * (len(rows) - len(self._written)))
        for index, pages in enumerate(rows):
            written = self._written[index]
            if pages == written:
                continue
            kept = len(written) if pages[: len(written)] == written else 0
            start = index * width
            self._flat[start + kept : start + len(pages)] = pages[kept:]
            self._flat[start + len(pages) : start + len(written)] = self._filler
            self._written[index] = pages


def step_result(outputs: StepOutputs[Tensor]) -> StepResult:
    """Bring the outputs to the host."""
    acceptance = outputs.acceptance
    num_accepted = acceptance.num_accepted.tolist()
    emitted = acceptance.emitted_tokens.tolist()
    logprobs = acceptance.emitted_logprobs.tolist()
    next_context_lens = acceptance.next_context_lens.tolist()
    drafts = [()] * len(emitted) if outputs.draft_tokens is None else outputs.draft_tokens.tolist()
    results = (
        RequestResult(
            emitted_tokens=tuple(emitted[r][: num_accepted[r] + 1]),
            logprobs=tuple(logprobs[r][: num_accepted[r] + 1]),
            num_accepted=num_accepted[r],
            draft_tokens=tuple(drafts[r]),
            next_context_len=next_context_lens[r],
        )
        for r in range(len(emitted))
    )
    return StepResult(requests=tuple(_up_to_non_finite(result) for result in results))


def _up_to_non_finite(result: RequestResult) -> RequestResult:
    """Translate the NaN of the step contract: what was emitted before the first row whose logits gave no token."""
    num_good = next((i for i, logprob in enumerate(result.logprobs) if isnan(logprob)), None)
    if num_good is None:
        return result
    next_context_len = result.next_context_len - result.num_accepted + num_good
    return RequestResult(
        emitted_tokens=result.emitted_tokens[:num_good],
        logprobs=result.logprobs[:num_good],
        num_accepted=num_good,
        draft_tokens=(),
        next_context_len=next_context_len,
        non_finite_position=next_context_len - 1,
    )
