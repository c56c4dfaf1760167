"""The shapes that steps run in: a bucket of requests and of tokens, or the batch's own size.

One padding design for CUDA graphs and TensorRT's profiles: a padded step has as many requests as its bucket, and
padding requests come last. They have no tokens at all, and the token rows are padded with rows of no request. Pure
arithmetic over batches and limits.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from dflash_trt.core.step_plan import ExecutorLimits, JointRows, StepPlan
from dflash_trt.core.step_spec import Axis
from dflash_trt.kernels.launching import request_capacity

# With more tokens a step takes the device longer than the host needs to launch it, and padding would cost more than
# a graph saves.
MAX_GRAPH_TOKENS: Final = 768
# Every bucket of verify blocks has a graph for every K. Steps with a prefill chunk get what these leave, the shortest
# first, which gain the most from a graph; the others are launched one by one.
MAX_GRAPHS: Final = 256
_MIN_TOKENS, _TOKEN_GRAIN = 64, 128
_REQUEST_GRAINS: Final = ((2, 1), (16, 4), (64, 8), (1 << 31, 16))  # (number of requests, grain of buckets up to it)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """Shape of a step. `is_decode`: verify blocks only. `has_graph`: a bucket, to which steps are padded.

    `num_pages` is P; None means the most that a sequence may have.
    """

    num_requests: int
    num_tokens: int
    num_draft_tokens: int
    is_decode: bool
    has_graph: bool
    num_pages: int | None = None

    @property
    def width(self) -> int:
        return self.num_draft_tokens + 1

    def sizes(self, *, max_pages: int, num_page_groups: int = 1, draft_topk: int = 0) -> dict[Axis, int]:
        """Size of every axis of a step tensor."""
        return {
            "T": self.num_tokens,
            "R": self.num_requests,
            "R+1": self.num_requests + 1,
            "K": self.num_draft_tokens,
            "K+1": self.width,
            "K*C": self.num_draft_tokens * draft_topk,
            "P": max_pages if self.num_pages is None else self.num_pages,
            "G": num_page_groups,
        }


def largest_shape(limits: ExecutorLimits) -> StepShape:
    """No step has more of anything."""
    return StepShape(
        num_requests=limits.max_batch_size,
        num_tokens=max(limits.max_num_tokens, limits.max_batch_size * (limits.max_draft_len + 1)),
        num_draft_tokens=limits.max_draft_len,
        is_decode=False,
        has_graph=False,
    )


def exact_shape(plan: StepPlan) -> StepShape:
    """No padding: as many requests, tokens and pages per request as the plan has."""
    return StepShape(
        num_requests=plan.rows.num_requests,
        num_tokens=plan.rows.total_tokens,
        num_draft_tokens=plan.rows.num_draft_tokens,
        is_decode=False,
        has_graph=False,
        num_pages=plan.num_pages,
    )


def step_shape(plan: StepPlan, limits: ExecutorLimits) -> StepShape:
    """The shape that a plan runs in: the next bucket, or its own size if that is large.

    Ranks with requests of their own have one bucket of verify blocks. Other steps are not padded for them: experts
    would compute the padding of all ranks.
    """
    joint, num_drafts = plan.joint or JointRows.of([plan]), plan.rows.num_draft_tokens
    bucket, num_tokens = bucket_of(max(joint.num_requests), limits), plan.rows.total_tokens
    if joint.is_decode:
        return decode_shape(bucket, num_drafts)
    padded = _mixed_shape(bucket, num_tokens, num_drafts, limits) if len(joint.num_tokens) == 1 else None
    return padded or StepShape(
        num_requests=plan.rows.num_requests,
        num_tokens=num_tokens,
        num_draft_tokens=num_drafts,
        is_decode=False,
        has_graph=False,
    )


def joint_rows(shape: StepShape, num_ranks: int) -> JointRows:
    """Of ranks whose steps are alike; each may read the logits of a prompt's token."""
    return JointRows(
        num_tokens=(shape.num_tokens,) * num_ranks,
        num_requests=(shape.num_requests,) * num_ranks,
        num_prompt_rows=(1,) * num_ranks,
        num_draft_tokens=shape.num_draft_tokens,
        is_decode=shape.is_decode,
    )


def verify_block_shape(plan: StepPlan, limits: ExecutorLimits) -> StepShape:
    """The shape of a plan in an engine whose larger steps are not padded.

    One of `full_block_shapes` for verify blocks, full or not, if max_num_tokens has room for full ones, else its own
    size. Ranks with requests of their own have one shape, with as much of everything as the rank that has most.
    """
    joint, num_drafts = plan.joint or JointRows.of([plan]), plan.rows.num_draft_tokens
    num_requests = max(joint.num_requests)
    if joint.is_decode and num_requests * (num_drafts + 1) <= limits.max_num_tokens:
        return _full_blocks(num_requests, num_drafts, limits)
    own, num_tokens = exact_shape(plan), max(joint.num_tokens)
    return replace(own, num_requests=num_requests, num_tokens=num_tokens, num_pages=max(1, plan.num_pages))


def full_block_shapes(limits: ExecutorLimits, *, num_draft_tokens: int) -> list[StepShape]:
    """Full verify blocks of every bucket."""
    most = min(limits.max_batch_size, limits.max_num_tokens // (num_draft_tokens + 1))
    sizes = (_full_blocks(n, num_draft_tokens, limits) for n in range(1, most + 1))
    return list(dict.fromkeys(sizes))


def decode_shapes(limits: ExecutorLimits, *, num_draft_tokens: int) -> list[StepShape]:
    """Verify blocks of every bucket."""
    return [decode_shape(bucket, num_draft_tokens) for bucket in _buckets(limits)]


def mixed_shapes(limits: ExecutorLimits, *, num_draft_tokens: int) -> list[StepShape]:
    """Steps with a prefill chunk, of every bucket that has a graph."""
    sizes = range(1, min(MAX_GRAPH_TOKENS, limits.max_num_tokens) + 1)
    made = (_mixed_shape(bucket, size, num_draft_tokens, limits) for bucket in _buckets(limits) for size in sizes)
    return list(dict.fromkeys(shape for shape in made if shape is not None))


def warm_shapes(
    limits: ExecutorLimits, draft_lens: Iterable[int], *, tile_edges: Iterable[int] = (), pads_prompts: bool = True
) -> list[StepShape]:
    """Shapes to run before serving, so that steps of these K and K = 0 neither capture nor compile.

    The largest come first. Shapes with `has_graph` are to be captured: every bucket of verify blocks, and as many
    steps with a prefill chunk as MAX_GRAPHS leaves, if `pads_prompts`. The others compile the remaining kernels,
    including one size after each of `tile_edges`: numbers of tokens after which a kernel uses another tile.
    """
    lens = sorted({0, *(min(length, limits.max_draft_len) for length in draft_lens)}, reverse=True)
    captured = [shape for length in lens for shape in decode_shapes(limits, num_draft_tokens=length)]
    mixed = [shape for length in lens if pads_prompts for shape in mixed_shapes(limits, num_draft_tokens=length)]
    mixed.sort(key=lambda shape: shape.num_tokens)
    captured += mixed[: max(0, MAX_GRAPHS - len(captured))]
    compiled = (shape for length in lens for shape in prefill_kernel_shapes(limits, length, tile_edges=tile_edges))
    return sorted([*captured, *compiled], key=lambda shape: (shape.num_tokens, shape.num_requests), reverse=True)


def bucket_of(num_requests: int, limits: ExecutorLimits) -> int:
    """The next of 1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80 and so on by 16s, or the largest batch."""
    grain = next(grain for most, grain in _REQUEST_GRAINS if num_requests <= most)
    return min(-(-num_requests // grain) * grain, limits.max_batch_size)


def decode_shape(num_requests: int, num_draft_tokens: int) -> StepShape:
    return StepShape(
        num_requests=num_requests,
        num_tokens=num_requests * (num_draft_tokens + 1),
        num_draft_tokens=num_draft_tokens,
        is_decode=True,
        has_graph=True,
    )


def _buckets(limits: ExecutorLimits) -> list[int]:
    return sorted({bucket_of(n, limits) for n in range(1, limits.max_batch_size + 1)})


def _full_blocks(num_requests: int, num_draft_tokens: int, limits: ExecutorLimits) -> StepShape:
    """The next bucket, or as many requests as max_num_tokens has room for."""
    most = limits.max_num_tokens // (num_draft_tokens + 1)
    return decode_shape(min(bucket_of(num_requests, limits), most), num_draft_tokens)


def prefill_kernel_shapes(
    limits: ExecutorLimits, num_draft_tokens: int, *, tile_edges: Iterable[int] = ()
) -> Iterator[StepShape]:
    """Steps with a prefill chunk that together run every kernel.

    A kernel depends on the step's size through its request capacity and the chunk's tile; the shortest step, the
    longest and the ones at tile edges cover the tiles.
    """
    capacities = {request_capacity(n): n for n in range(limits.max_batch_size, 0, -1)}
    for num_requests in capacities.values():
        num_rows = num_requests * (num_draft_tokens + 1)
        shortest, longest = max(num_rows + 1, _MIN_TOKENS), limits.max_num_tokens
        edges = [edge for edge in tile_edges if shortest < edge < longest] if num_requests == 1 else []
        for num_tokens in dict.fromkeys((shortest, *edges, longest)):
            if num_rows < num_tokens <= limits.max_num_tokens:
                yield StepShape(
                    num_requests=num_requests,
                    num_tokens=num_tokens,
                    num_draft_tokens=num_draft_tokens,
                    is_decode=False,
                    has_graph=False,
                )


def _mixed_shape(num_requests: int, num_tokens: int, num_draft_tokens: int, limits: ExecutorLimits) -> StepShape | None:
    """More rows than verify blocks, if allowed, so that prefill chunks use attention tiles of their own.

    None if too long for a graph.
    """
    max_tokens = max(limits.max_num_tokens, num_requests * (num_draft_tokens + 1))
    needed = max(num_tokens, num_requests * (num_draft_tokens + 1) + 1, _MIN_TOKENS)
    grain = min(1 << (needed - 1).bit_length(), _TOKEN_GRAIN)
    bucket = min(-(-needed // grain) * grain, max_tokens)
    if bucket > MAX_GRAPH_TOKENS or bucket < num_tokens:
        return None
    return StepShape(
        num_requests=num_requests, num_tokens=bucket, num_draft_tokens=num_draft_tokens, is_decode=False, has_graph=True
    )
