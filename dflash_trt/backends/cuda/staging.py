"""Memory through which a step's inputs reach the device and its results come back, allocated once.

Inputs are packed on the host into one pinned block, copied without waiting, and read at addresses that never change,
so that CUDA graphs stay valid. Padding: a step has as many requests as its bucket, those at the end with no tokens at
all, and as many token rows as all its verify blocks could have, or with a prefill chunk as its bucket of tokens, those
at the end of no request. Neither reads or writes a page.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.backends.step_inputs import step_result
from dflash_trt.core.batch import ExecutorLimits, StepBatch, StepResult
from dflash_trt.core.dtype import num_bytes_of, torch_dtype
from dflash_trt.core.step_spec import STEP_INPUTS
from dflash_trt.kernels.sampling_launch import SamplingOutputs
from dflash_trt.network.ops import Acceptance, StepInputs
from dflash_trt.network.step import StepOutputs

# With more tokens a step takes the device longer than the host needs to launch it, and padding would cost more than
# a graph saves.
MAX_GRAPH_TOKENS: Final = 768
_LEAST_TOKENS, _TOKEN_GRAIN = 64, 128

_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """What a step runs in. `is_decode`: verify blocks only. `has_graph`: of a bucket, to which steps are padded."""

    num_requests: int
    num_tokens: int
    num_draft_tokens: int
    is_decode: bool
    has_graph: bool

    @property
    def width(self) -> int:
        return self.num_draft_tokens + 1


def step_shape(batch: StepBatch, limits: ExecutorLimits) -> StepShape:
    """The shape a batch runs in: that of the next bucket, its own size when that is large."""
    num_requests, num_drafts = len(batch.requests), batch.num_draft_tokens
    bucket = _bucket(num_requests, limits)
    if all(len(request.token_ids) <= num_drafts + 1 for request in batch.requests):
        return _decode_shape(bucket, num_drafts)
    return _mixed_shape(bucket, batch.num_tokens, num_drafts, limits) or StepShape(
        num_requests=num_requests,
        num_tokens=batch.num_tokens,
        num_draft_tokens=num_drafts,
        is_decode=False,
        has_graph=False,
    )


def decode_shapes(limits: ExecutorLimits, *, num_draft_tokens: int) -> list[StepShape]:
    """Verify blocks of every bucket."""
    return [_decode_shape(bucket, num_draft_tokens) for bucket in _buckets(limits)]


def mixed_shapes(limits: ExecutorLimits, *, num_draft_tokens: int) -> list[StepShape]:
    """Steps with a prefill chunk, of every bucket that has a graph."""
    sizes = range(1, min(MAX_GRAPH_TOKENS, limits.max_num_tokens) + 1)
    made = (_mixed_shape(bucket, size, num_draft_tokens, limits) for bucket in _buckets(limits) for size in sizes)
    return list(dict.fromkeys(shape for shape in made if shape is not None))


def warm_shapes(limits: ExecutorLimits, draft_lens: Iterable[int]) -> list[StepShape]:
    """What steps with these K are captured as and what compiles all their kernels: verify blocks of every bucket and
    K; steps with a prefill chunk of every size at the largest K, and of one size per bucket at the others.
    """
    lens = sorted({min(length, limits.max_draft_len) for length in draft_lens}, reverse=True)
    shapes = [shape for length in lens for shape in decode_shapes(limits, num_draft_tokens=length)]
    for i, length in enumerate(lens):
        mixed = mixed_shapes(limits, num_draft_tokens=length)
        shapes += mixed if i == 0 else list({shape.num_requests: shape for shape in reversed(mixed)}.values())
    return shapes


def _buckets(limits: ExecutorLimits) -> list[int]:
    return sorted({_bucket(n, limits) for n in range(1, limits.max_batch_size + 1)})


def _bucket(num_requests: int, limits: ExecutorLimits) -> int:
    """The next power of two, or the largest batch."""
    return min(1 << (num_requests - 1).bit_length(), limits.max_batch_size)


def _decode_shape(num_requests: int, num_draft_tokens: int) -> StepShape:
    return StepShape(
        num_requests=num_requests,
        num_tokens=num_requests * (num_draft_tokens + 1),
        num_draft_tokens=num_draft_tokens,
        is_decode=True,
        has_graph=True,
    )


def _mixed_shape(num_requests: int, num_tokens: int, num_draft_tokens: int, limits: ExecutorLimits) -> StepShape | None:
    """With more rows than verify blocks could have, where a step may have so many: then prefill chunks get attention
    tiles of their own. None: too long for a graph.
    """
    most = max(limits.max_num_tokens, num_requests * (num_draft_tokens + 1))
    needed = max(num_tokens, num_requests * (num_draft_tokens + 1) + 1, _LEAST_TOKENS)
    grain = min(1 << (needed - 1).bit_length(), _TOKEN_GRAIN)
    bucket = min(-(-needed // grain) * grain, most)
    if bucket > MAX_GRAPH_TOKENS or bucket < num_tokens:
        return None
    return StepShape(
        num_requests=num_requests,
        num_tokens=bucket,
        num_draft_tokens=num_draft_tokens,
        is_decode=False,
        has_graph=True,
    )


class InputStaging:
    """The inputs of `core/step_spec.STEP_INPUTS`, on the host and on the device."""

    def __init__(self, limits: ExecutorLimits, device: torch.device) -> None:
        width = limits.max_draft_len + 1
        self._max_pages = -(-limits.max_seq_len // limits.page_size)
        sizes = {
            "T": max(limits.max_num_tokens, limits.max_batch_size * width),
            "R": limits.max_batch_size,
            "R+1": limits.max_batch_size + 1,
            "K+1": width,
            "P": self._max_pages,
        }
        # The page table is last: only the rows in use are copied.
        tensors = sorted(STEP_INPUTS, key=lambda tensor: tensor.name == "page_table")
        nbytes = [num_bytes_of(t.dtype) * torch.Size(sizes[axis] for axis in t.axes).numel() for t in tensors]
        starts = [0, *accumulate(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in nbytes)]
        self._table_start = starts[-2]
        self._host_block = torch.zeros(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device_block = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        self._host: dict[str, Tensor] = {}
        self._device: dict[str, Tensor] = {}
        for tensor, start, size in zip(tensors, starts, nbytes, strict=False):
            for block, views in ((self._host_block, self._host), (self._device_block, self._device)):
                views[tensor.name] = block[start : start + size].view(torch_dtype(tensor.dtype))
        self._staged_pages: list[tuple[int, ...]] = [()] * limits.max_batch_size
        self._copied = _new_event(device)

    def stage(self, batch: StepBatch, shape: StepShape) -> None:
        """Fill the host's block, when the copy of the step before is over."""
        if self._copied is not None and not self._copied.query():  # a step whose results were read is over
            self._copied.synchronize()
        requests, padding = batch.requests, shape.num_requests - len(batch.requests)
        offsets = [0, *accumulate(len(request.token_ids) for request in requests)]
        unused = [0] * (shape.num_tokens - offsets[-1])
        logit_rows: list[int] = []
        for request, stop in zip(requests, offsets[1:], strict=True):
            first = stop - 1 - request.num_candidates
            logit_rows.extend(min(first + j, stop - 1) for j in range(shape.width))
        positions = [request.context_len + i for request in requests for i in range(len(request.token_ids))]
        sampling = [request.sampling for request in requests]
        self._put("token_ids", [token for request in requests for token in request.token_ids] + unused)
        self._put("positions", positions + unused)
        self._put("token_offsets", offsets + offsets[-1:] * padding)
        self._put("context_lens", [request.context_len for request in requests] + [0] * padding)
        self._put("logit_rows", logit_rows + [0] * (padding * shape.width))
        self._put("num_candidates", [request.num_candidates for request in requests] + [0] * padding)
        self._put("temperature", [s.temperature for s in sampling] + [0.0] * padding)
        self._put("top_k", [s.top_k for s in sampling] + [0] * padding)
        self._put("top_p", [s.top_p for s in sampling] + [1.0] * padding)
        self._put("min_p", [s.min_p for s in sampling] + [0.0] * padding)
        self._put("seed", [s.seed for s in sampling] + [0] * padding)
        for row, request in enumerate(requests):
            self._put_pages(row, request.page_ids)

    def upload(self, shape: StepShape) -> None:
        """Copy to the device, on the current stream, without waiting."""
        table_end = self._table_start + shape.num_requests * self._max_pages * torch.int32.itemsize
        self._device_block[:table_end].copy_(self._host_block[:table_end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def inputs(self, shape: StepShape) -> StepInputs[Tensor]:
        """The device's tensors in the shapes of a step; the same addresses every time."""
        sizes = {
            "T": shape.num_tokens,
            "R": shape.num_requests,
            "R+1": shape.num_requests + 1,
            "K+1": shape.width,
            "P": self._max_pages,
        }
        views = {}
        for tensor in STEP_INPUTS:
            extents = [sizes[axis] for axis in tensor.axes]
            views[tensor.name] = self._device[tensor.name][: torch.Size(extents).numel()].view(extents)
        return StepInputs(**views)

    def _put(self, name: str, values: list[Any]) -> None:
        host = self._host[name]
        host[: len(values)].copy_(torch.tensor(values, dtype=host.dtype))

    def _put_pages(self, row: int, page_ids: tuple[int, ...]) -> None:
        """Only what this row does not hold yet: a request's pages are mostly those of the step before."""
        staged = self._staged_pages[row]
        kept = len(staged) if page_ids[: len(staged)] == staged else 0
        start = row * self._max_pages
        self._host["page_table"][start + kept : start + len(page_ids)].copy_(
            torch.tensor(page_ids[kept:], dtype=torch.int32)
        )
        self._staged_pages[row] = page_ids


class ResultStaging:
    """The outputs of a step, side by side in one block, so that one copy brings them to the host."""

    def __init__(self, limits: ExecutorLimits, device: torch.device) -> None:
        most = StepShape(
            num_requests=limits.max_batch_size,
            num_tokens=limits.max_num_tokens,
            num_draft_tokens=limits.max_draft_len,
            is_decode=True,
            has_graph=True,
        )
        size = _sections(most)[-1][2]
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._copied = _new_event(device)

    def outputs(self, shape: StepShape) -> tuple[SamplingOutputs, Tensor]:
        """Where sampling writes, and where the drafts go, int32 [R, K]."""
        return _views(self._device, shape)

    def download(self, shape: StepShape) -> None:
        """Copy to the host, on the current stream, without waiting."""
        size = _sections(shape)[-1][2]
        self._host[:size].copy_(self._device[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def read(self, shape: StepShape, *, num_requests: int) -> StepResult:
        """Wait for the copy; the first `num_requests` requests, which are not padding."""
        if self._copied is not None:
            self._copied.synchronize()
        outputs, drafts = _views(self._host, shape)
        real = {item.name: getattr(outputs, item.name)[:num_requests] for item in fields(outputs)}
        has_drafts = shape.num_draft_tokens > 0
        return step_result(
            StepOutputs(acceptance=Acceptance(**real), draft_tokens=drafts[:num_requests] if has_drafts else None)
        )


def _new_event(device: torch.device) -> Any:
    """None on a CPU, where a copy is over when it returns. `record` uses the current stream."""
    make_event: Any = torch.cuda.Event  # untyped in PyTorch
    return make_event() if device.type == "cuda" else None


def _sections(shape: StepShape) -> list[tuple[str, int, int]]:
    """(name, start, end) of each output, in int32 elements, 16-byte aligned."""
    requests, width = shape.num_requests, shape.width
    sizes = {
        "emitted_tokens": requests * width,
        "emitted_logprobs": requests * width,
        "num_accepted": requests,
        "bonus_tokens": requests,
        "next_context_lens": requests,
        "draft_tokens": requests * (width - 1),
    }
    ends = list(accumulate(-(-size // 4) * 4 for size in sizes.values()))
    return list(zip(sizes, [0, *ends], ends, strict=False))


def _views(block: Tensor, shape: StepShape) -> tuple[SamplingOutputs, Tensor]:
    requests, width = shape.num_requests, shape.width
    views = {}
    for name, start, end in _sections(shape):
        columns = {"emitted_tokens": width, "emitted_logprobs": width, "draft_tokens": width - 1}.get(name)
        section = block[start:end].view(torch.float32) if name == "emitted_logprobs" else block[start:end]
        views[name] = section[:requests] if columns is None else section[: requests * columns].view(requests, columns)
    drafts = views.pop("draft_tokens")
    return SamplingOutputs(**views), drafts
