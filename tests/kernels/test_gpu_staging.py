"""Shapes, padding, staging memory and the graph cache: everything of the GPU executor that is not a kernel."""

from dataclasses import fields, replace
from itertools import product

import pytest
import torch

from dflash_trt.backends.graphs import GraphCache
from dflash_trt.backends.padding import (
    MAX_GRAPH_TOKENS,
    MAX_GRAPHS,
    StepShape,
    bucket_of,
    decode_shapes,
    full_block_shapes,
    mixed_shapes,
    step_shape,
    verify_block_shape,
    warm_shapes,
)
from dflash_trt.backends.staging import InputStaging, ResultStaging
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, plan_of, request_results
from dflash_trt.core.step_plan import ExecutorLimits, PageUpdates
from dflash_trt.core.step_spec import DRAFT_INPUTS
from dflash_trt.kernels.launching import request_capacity
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength, FixedDraftLength
from tests.reference_inputs import reference_inputs

CPU = torch.device("cpu")
LIMITS = ExecutorLimits(
    max_batch_size=6, max_seq_len=64, max_num_tokens=40, max_draft_len=3, page_size=4, num_pages=96, draft_topk=5
)


def request(num_tokens, *, context_len=0, num_candidates=0, first_page=0, sampling=None):
    num_pages = -(-(context_len + num_tokens) // LIMITS.page_size)
    return ScheduledRequest(
        request_id=f"request {first_page}",
        token_ids=tuple(range(100 + first_page, 100 + first_page + num_tokens)),
        context_len=context_len,
        num_candidates=num_candidates,
        page_ids=tuple(range(first_page, first_page + num_pages)),
        sampling=sampling or StepSampling(),
    )


def batch_of(*requests, num_draft_tokens=3):
    return StepBatch(requests=requests, num_draft_tokens=num_draft_tokens)


def shape_of(batch, limits):
    return step_shape(plan_of(batch), limits)


@pytest.mark.parametrize(("num_requests", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_verify_blocks_run_in_the_next_bucket(num_requests, bucket):
    blocks = [request(4, context_len=9, num_candidates=3, first_page=10 * r) for r in range(num_requests)]
    shape = shape_of(batch_of(*blocks), LIMITS)
    assert shape == StepShape(
        num_requests=bucket, num_tokens=bucket * 4, num_draft_tokens=3, is_decode=True, has_graph=True
    )


@pytest.mark.parametrize(
    ("max_batch_size", "last"), [(64, [64]), (70, [64, 70]), (112, [64, 80, 96, 112]), (113, [96, 112, 113])]
)
def test_buckets_waste_little_of_a_gemm_and_end_at_the_largest_batch(max_batch_size, last):
    limits = replace(LIMITS, max_batch_size=max_batch_size)
    buckets = [shape.num_requests for shape in decode_shapes(limits, num_draft_tokens=3)]
    assert buckets[:12] == [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64]
    assert buckets[-len(last) :] == last
    padded = {n: bucket_of(n, limits) for n in range(1, max_batch_size + 1)}
    assert set(padded.values()) == set(buckets)
    assert all(n <= bucket for n, bucket in padded.items())
    assert max(bucket / n for n, bucket in padded.items() if n > 8) < 1.42


def test_a_bucket_runs_the_kernels_of_its_smallest_batch():
    limits = replace(LIMITS, max_batch_size=4096)
    for n in range(1, 4097):
        assert request_capacity(bucket_of(n, limits)) == request_capacity(n)


def test_blocks_with_fewer_candidates_share_the_shape():
    full, some, none = (request(n + 1, context_len=9, num_candidates=n, first_page=n) for n in (3, 1, 0))
    assert shape_of(batch_of(full, some), LIMITS) == shape_of(batch_of(none, none), LIMITS)
    assert shape_of(batch_of(none, num_draft_tokens=0), LIMITS).num_tokens == 1


LARGE = replace(LIMITS, max_num_tokens=2048, max_seq_len=2048, max_batch_size=64)
WIDE = replace(LARGE, max_batch_size=128, max_draft_len=7)


@pytest.mark.parametrize(
    ("num_blocks", "chunk", "num_requests", "num_tokens"),
    [
        (0, 5, 1, 64),
        (1, 60, 2, 64),
        (1, 61, 2, 128),
        (2, 300, 4, 384),
        (8, 30, 12, 64),
        (63, 8, 64, 384),  # more rows than 64 verify blocks of 4 could have
        (0, 768, 1, 768),
        (3, 800, 4, 812),  # long enough for the host to keep ahead: its own size
    ],
)
def test_a_step_with_a_prefill_chunk_runs_in_a_bucket_of_tokens(num_blocks, chunk, num_requests, num_tokens):
    blocks = [request(4, context_len=9, num_candidates=3, first_page=10 * r) for r in range(num_blocks)]
    shape = shape_of(batch_of(*blocks, request(chunk)), LARGE)
    assert shape == StepShape(
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_draft_tokens=3,
        is_decode=False,
        has_graph=num_tokens <= MAX_GRAPH_TOKENS,
    )


def test_no_bucket_has_more_tokens_than_a_step_may_have():
    shape = shape_of(batch_of(request(4, context_len=9, num_candidates=3), request(7)), LIMITS)
    assert shape == StepShape(num_requests=2, num_tokens=40, num_draft_tokens=3, is_decode=False, has_graph=True)


# The last two: verify blocks of a full bucket alone could have more rows than a graph.
@pytest.mark.parametrize(("limits", "k"), [(LIMITS, 3), (LARGE, 3), (replace(LARGE, max_draft_len=15), 15), (WIDE, 7)])
def test_every_step_of_a_graph_with_a_prefill_chunk_has_a_shape_that_can_be_made_ahead(limits, k):
    shapes = mixed_shapes(limits, num_draft_tokens=k)
    assert len(shapes) == len(set(shapes)) < 90
    for num_blocks in range(limits.max_batch_size):
        blocks = [request(4, context_len=9, num_candidates=3, first_page=4 * r) for r in range(num_blocks)]
        for chunk in range(5, limits.max_num_tokens - 4 * num_blocks + 1, 37):
            shape = shape_of(batch_of(*blocks, request(chunk), num_draft_tokens=k), limits)
            assert shape in shapes or shape.is_decode or not shape.has_graph
            assert shape.num_tokens >= 4 * num_blocks + chunk


def test_every_batch_of_verify_blocks_has_a_shape_that_can_be_made_ahead():
    shapes = decode_shapes(LIMITS, num_draft_tokens=2)
    assert [shape.num_requests for shape in shapes] == [1, 2, 4, 6]
    for num_requests in range(1, LIMITS.max_batch_size + 1):
        blocks = [request(3, context_len=9, num_candidates=2, first_page=4 * r) for r in range(num_requests)]
        assert shape_of(batch_of(*blocks, num_draft_tokens=2), LIMITS) in shapes


POLICIES = {
    "fixed": FixedDraftLength(3),
    "more than the engine drafts": FixedDraftLength(9),
    "by batch size": BatchSizeDraftLength({1: 7, 4: 3, 5: 0}),
    "adaptive": AdaptiveDraftLength(7),
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_step_that_a_policy_may_choose_is_captured_ahead(name):
    """Also those of K = 0: the planner drafts nothing when no request could use it."""
    limits = replace(LIMITS, max_draft_len=7, max_num_tokens=64)
    shapes = {shape for shape in warm_shapes(limits, POLICIES[name].lengths) if shape.has_graph}
    for num_requests in range(1, limits.max_batch_size + 1):
        for k in {0, *(min(k, 7) for k in POLICIES[name].lengths)}:
            blocks = [request(k + 1, context_len=9, num_candidates=k, first_page=4 * r) for r in range(num_requests)]
            assert shape_of(batch_of(*blocks, num_draft_tokens=k), limits) in shapes
            mixed = shape_of(batch_of(*blocks[1:], request(20), num_draft_tokens=k), limits)
            assert mixed in shapes


@pytest.mark.parametrize(
    ("lengths", "max_batch_size", "num_decode", "num_graphs"),
    [
        ((7,), 64, 2 * 12, 166),
        ((7, 5, 3), 64, 4 * 12, MAX_GRAPHS),
        (AdaptiveDraftLength(7).lengths, 64, 7 * 12, MAX_GRAPHS),
        (AdaptiveDraftLength(7).lengths, 512, 7 * 40, 7 * 40),
    ],
)
def test_graphs_are_limited_at_the_cost_of_long_steps_with_a_prefill_chunk(
    lengths, max_batch_size, num_decode, num_graphs
):
    limits = replace(LARGE, max_batch_size=max_batch_size, max_draft_len=7)
    shapes = warm_shapes(limits, lengths)
    captured = [shape for shape in shapes if shape.has_graph]
    assert (sum(shape.is_decode for shape in captured), len(set(captured))) == (num_decode, num_graphs)
    mixed = {shape for k in lengths for shape in mixed_shapes(limits, num_draft_tokens=k)}
    longest = max((shape.num_tokens for shape in captured if not shape.is_decode), default=0)
    assert all(shape in captured for shape in mixed if shape.num_tokens < longest)
    assert [shape.num_tokens for shape in shapes] == sorted((shape.num_tokens for shape in shapes), reverse=True)
    assert len(shapes) - len(captured) <= 8 * (len(lengths) + 1), "few steps compile the kernels of the rest"


@pytest.mark.parametrize("max_num_tokens", [2048, 500, 90])
def test_full_blocks_of_tensorrt_always_have_a_graph(max_num_tokens):
    limits = replace(LARGE, max_num_tokens=max_num_tokens)
    shapes = full_block_shapes(limits, num_draft_tokens=3)
    for num_requests in range(1, min(64, max_num_tokens // 4) + 1):
        blocks = [request(4, context_len=9, num_candidates=3, first_page=4 * r) for r in range(num_requests)]
        shape = verify_block_shape(plan_of(batch_of(*blocks)), limits)
        assert shape in shapes and num_requests <= shape.num_requests and shape.num_tokens <= max_num_tokens


class Copy:
    """Stands for the CUDA event after the copy of the inputs."""

    def __init__(self, *, is_over):
        self.is_over, self.calls = is_over, []

    def query(self):
        self.calls.append("query")
        return self.is_over

    def synchronize(self):
        self.calls.append("synchronize")

    def record(self):
        self.calls.append("record")


@pytest.mark.parametrize(("is_over", "calls"), [(True, ["query"]), (False, ["query", "synchronize"])])
def test_inputs_are_overwritten_only_when_their_copy_is_over(is_over, calls):
    staging = InputStaging(LIMITS, CPU)
    copied = Copy(is_over=is_over)
    for _ in range(3):
        staging.stage(plan_of(batch_of(request(4))), shape_of(batch_of(request(4)), LIMITS))
        staging._host.copied = copied
    copied.calls.clear()
    batch = batch_of(request(4))
    staging.stage(plan_of(batch), shape_of(batch, LIMITS))
    assert copied.calls == calls
    staging.upload()
    assert copied.calls == [*calls, "record"]


def staged(batch, staging=None):
    shape = shape_of(batch, LIMITS)
    staging = staging or InputStaging(LIMITS, CPU)
    staging.stage(plan_of(batch), shape)
    staging.upload()
    staging.assemble(shape)
    return shape, staging.inputs(shape)


def assert_holds(inputs, batch):
    """The real part is what any backend gets; padding has no tokens and is greedy."""
    expected, num_requests = reference_inputs(batch), len(batch.requests)
    num_tokens = int(expected.token_offsets[-1])
    for item in fields(expected):
        found, want = getattr(inputs, item.name), getattr(expected, item.name)
        if item.name == "page_table":
            for row, pages in enumerate(request.page_ids for request in batch.requests):
                assert tuple(found[row, : len(pages)].tolist()) == pages
        elif item.name in ("token_ids", "positions"):
            assert torch.equal(found[:num_tokens], want)
        elif item.name in DRAFT_INPUTS:  # the host's drafts were not drawn
            assert found.shape[1] == batch.num_draft_tokens * LIMITS.draft_topk and not found.any()
        else:
            assert torch.equal(found[: len(want)], want), item.name
    assert (inputs.token_offsets[num_requests:] == num_tokens).all()
    for name in ("context_lens", "num_candidates", "temperature", "logit_rows"):
        assert (getattr(inputs, name)[num_requests:] == 0).all()
    assert (inputs.token_ids[num_tokens:] == 0).all() and (inputs.positions[num_tokens:] == 0).all()


def test_a_padded_step_holds_its_requests_and_nothing_else():
    sampling = StepSampling(temperature=0.5, top_k=7, top_p=0.8, min_p=0.1, seed=2**62 + 1)
    staging = InputStaging(LIMITS, CPU)
    busy = batch_of(*(request(4, context_len=20 + r, num_candidates=3, first_page=9 * r) for r in range(6)))
    small = batch_of(
        request(3, context_len=17, num_candidates=2, first_page=40, sampling=sampling),
        request(1, context_len=3, first_page=50),
        request(4, context_len=8, num_candidates=3, first_page=60),
    )
    chunk = batch_of(request(2, context_len=5, num_candidates=1, first_page=3), request(30, first_page=70))
    for batch in (busy, small, chunk, busy):  # what a step leaves behind does not reach the next one
        _, inputs = staged(batch, staging)
        assert_holds(inputs, batch)
    assert inputs.seed.dtype == torch.int64


def test_addresses_belong_to_a_shape():
    staging = InputStaging(LIMITS, CPU)
    blocks = batch_of(request(4, context_len=9, num_candidates=3), request(4, context_len=2, num_candidates=3))
    _, first = staged(blocks, staging)
    addresses = [getattr(first, item.name).data_ptr() for item in fields(first)]
    staged(batch_of(request(30)), staging)
    _, second = staged(blocks, staging)
    assert [getattr(second, item.name).data_ptr() for item in fields(second)] == addresses
    assert all(address % 16 == 0 for address in addresses)


def test_the_device_gets_changes_of_its_page_table_only():
    staging = InputStaging(LIMITS, CPU)
    plan = plan_of(batch_of(request(1, context_len=12)))
    updates = plan.page_updates
    staging.slots.page_table.fill_(77)
    for columns in (slice(0, 2), slice(2, 4), slice(4, 4)):
        part = PageUpdates(
            slots=updates.slots[columns], columns=updates.columns[columns], page_ids=updates.page_ids[columns]
        )
        staging.stage(replace(plan, page_updates=part), step_shape(plan, LIMITS))
        staging.upload()
        stop = columns.stop
        assert staging.slots.page_table[0].tolist() == [*range(stop), *[77] * (LIMITS.max_pages - stop)]
    assert (staging.slots.page_table[1:] == 77).all()


def test_results_of_two_steps_may_be_on_their_way_at_once():
    results = ResultStaging(LIMITS, CPU)
    shape = shape_of(batch_of(request(4)), LIMITS)
    on_their_way = []
    for number in range(3):
        results.outputs(shape)[0].next_context_lens.fill_(number)
        on_their_way.append(results.download(shape, num_requests=1, has_drafts=True))
    assert [result.read().next_context_lens.tolist() for result in on_their_way] == [[0], [1], [2]]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3])
def test_results_come_back_without_the_padding(num_draft_tokens):
    shape = StepShape(
        num_requests=4,
        num_tokens=4 * (num_draft_tokens + 1),
        num_draft_tokens=num_draft_tokens,
        is_decode=True,
        has_graph=True,
    )
    results = ResultStaging(LIMITS, CPU)
    outputs, drafts = results.outputs(shape)
    width = num_draft_tokens + 1
    outputs.emitted_tokens.copy_(torch.arange(4 * width).view(4, width))
    outputs.emitted_logprobs.copy_(-torch.arange(4 * width).view(4, width) / 8)
    outputs.num_accepted.copy_(torch.tensor([0, num_draft_tokens, 0, 0]))
    outputs.bonus_tokens.fill_(5)
    outputs.next_context_lens.copy_(torch.arange(4) + 50)
    drafts.tokens.copy_(torch.arange(4 * num_draft_tokens).view(4, num_draft_tokens) + 900)
    result = results.download(shape, num_requests=2, has_drafts=num_draft_tokens > 0)
    for tensor in (outputs.emitted_tokens, drafts.tokens):
        tensor.fill_(-1)  # the next step may write while the host reads
    first, second = request_results(result.read())
    assert first.emitted_tokens == (0,) and first.next_context_len == 50
    assert second.emitted_tokens == tuple(range(width, 2 * width))
    assert second.logprobs == tuple(-i / 8 for i in range(width, 2 * width))
    assert second.draft_tokens == tuple(range(900 + num_draft_tokens, 900 + 2 * num_draft_tokens))


class Recorder:
    """A Capture that counts; a replay does not call the function it was made from."""

    def __init__(self):
        self.events = []

    def capture(self, enqueue):
        self.events.append("capture")
        return lambda: self.events.append("replay")

    def enqueue(self):
        self.events.append("run")


def test_a_shape_is_run_and_captured_ahead_then_replayed():
    """TensorRT must have executed the shape right before."""
    recorder = Recorder()
    graphs = GraphCache(recorder.capture)
    graphs.capture("a", recorder.enqueue)
    assert recorder.events == ["run", "capture"]
    for _ in range(2):
        graphs.run("a", recorder.enqueue)
    assert recorder.events[2:] == ["replay", "replay"] and graphs.num_graphs == 1


def test_a_shape_that_was_not_captured_ahead_never_is():
    recorder = Recorder()
    graphs = GraphCache(recorder.capture)
    for _ in range(3):
        graphs.run("a", recorder.enqueue)
    assert recorder.events == ["run"] * 3 and graphs.num_graphs == 0


def test_without_a_capture_steps_run_as_they_are():
    recorder = Recorder()
    graphs = GraphCache(None)
    graphs.capture("a", recorder.enqueue)
    graphs.run("a", recorder.enqueue)
    assert recorder.events == ["run", "run"] and graphs.num_graphs == 0


def test_results_start_at_16_bytes_and_do_not_overlap() -> None:
    for max_batch_size, max_draft_len in product((1, 3, 5, 64), (0, 1, 2, 7)):
        limits = replace(LIMITS, max_batch_size=max_batch_size, max_draft_len=max_draft_len)
        tensors = ResultStaging(limits, CPU).device_tensors
        for number, tensor in enumerate(tensors.values()):
            assert tensor.storage_offset() * tensor.itemsize % 16 == 0
            tensor.fill_(number)
        assert all((tensor == number).all() for number, tensor in enumerate(tensors.values()))
        assert all(tensor.numel() >= max_batch_size for name, tensor in tensors.items() if name != "draft_tokens")
