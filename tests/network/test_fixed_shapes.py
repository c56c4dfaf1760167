"""Calls of fixed shapes: the bits of a row depend neither on its place nor on the rows beside it."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.attention import attend_rows
from dflash_trt.backends.torch.attention_plan import plan_attention
from dflash_trt.backends.torch.deterministic_ops import DeterministicOps
from dflash_trt.backends.torch.fixed_shapes import BlockHeights, in_blocks, in_vectors
from dflash_trt.backends.torch.linear import HalfLinear, apply_linear, pack_for_cpu
from dflash_trt.backends.torch.scores import Scores
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.network.ops import Linear, StepInputs
from tests.caches import cache_of
from tests.logit_rows import columns_off

PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 16, 2, 32
DTYPES = [torch.float32, torch.bfloat16]
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=GENERATOR).to(dtype)


def changed_rows(compute: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Rows of x whose results among others, in any of several places, are not those that they have alone."""
    alone = torch.cat([compute(row[None]) for row in x])
    among = torch.zeros(len(x), dtype=torch.bool)
    for size in (2, 15, 16, 17, 40, len(x)):
        for start in range(0, len(x) - size + 1, 7):
            rows = slice(start, start + size)
            among[rows] |= (compute(x[rows]) != alone[rows]).flatten(1).any(1)
    return int(among.sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(384, 1024), (72, 40), (640, 1920)], ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_gemm_in_blocks_depends_on_no_other_row(is_packed: bool, shape: tuple[int, int], dtype: torch.dtype) -> None:
    linear: Linear[Tensor] = Linear(weight=random(*shape, dtype=dtype) / 8)
    linear = pack_for_cpu(linear) if is_packed else linear
    compute, x = partial(apply_linear, linear=linear), random(150, shape[1], dtype=dtype)
    heights = BlockHeights().of("linear", compute, x)
    assert changed_rows(partial(in_blocks, compute, heights=heights), x) == 0


def test_heights_of_other_bits_are_not_taken() -> None:
    def by_height(x: Tensor) -> Tensor:
        out = x.clone()
        out[0, 0] += len(x) >= 64
        return out

    assert BlockHeights().of("kind", by_height, random(1, 10)) == (1, 2, 4, 8, 16, 32)
    assert BlockHeights().of("kind", lambda x: 2 * x, random(1, 10)) == (1, 2, 4, 8, 16, 32, 64, 128)
    assert BlockHeights().of("kind", lambda x: x + len(x), random(1, 10)) == (16,)


@pytest.mark.parametrize("shape", [(384, 1024), (72, 40), (640, 1920)], ids=str)
def test_float16_weights_in_blocks_depend_on_no_other_row(shape: tuple[int, int]) -> None:
    """FBGEMM's kernels of one row and of two add up in an order of their own where the CPU has no AVX-512."""
    linear = pack_for_cpu(Linear(weight=random(*shape).bfloat16().float()))
    if not isinstance(linear, HalfLinear):
        pytest.skip("float16 weights need FBGEMM, which this PyTorch is built without")
    ops = DeterministicOps.__new__(DeterministicOps)  # a linear layer needs nothing of a step
    assert changed_rows(partial(ops.linear, linear=linear), random(50, shape[1])) == 0


@pytest.mark.parametrize(
    ("num_rows", "heights", "expected"),
    [
        (0, (16,), [16]),
        (1, (16,), [16]),
        (49, (16,), [16, 16, 16, 16]),
        (1, (1, 8, 16), [1]),
        (7, (1, 8, 16), [8]),
        (60, (8, 16, 32), [32, 16, 16]),
        (66, (1, 8, 16, 32), [32, 32, 8]),
        (32, (16, 32), [32]),
    ],
)
def test_blocks_hold_every_row(num_rows: int, heights: tuple[int, ...], expected: list[int]) -> None:
    called = []

    def compute(x: Tensor) -> Tensor:
        called.append(len(x))
        return 2 * x

    x = random(num_rows, 5)
    assert torch.equal(in_blocks(compute, x, heights), 2 * x)
    assert called == expected


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("width", [40, 1000, 1024])
def test_a_function_in_vectors_depends_on_no_place(width: int, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for function in (F.silu, torch.sigmoid, torch.tanh):
            assert changed_rows(partial(in_vectors, function), random(50, width) * 3) == 0
    finally:
        torch.set_num_threads(before)


def test_a_function_of_a_whole_tensor_depends_on_the_place() -> None:
    """The negative control."""
    assert changed_rows(F.silu, random(50, 1000) * 3) > 0


def test_a_function_in_vectors_reads_strided_and_large_tensors() -> None:
    for x in (random(7, 18)[:, :9], random(300, 1000), random(3, 128)[:, ::2]):
        torch.testing.assert_close(in_vectors(torch.tanh, x), torch.tanh(x), rtol=0, atol=1e-6)


def attended(q: Tensor, k: Tensor, v: Tensor, pieces: list[list[int]], window: int | None, scores: Scores) -> Tensor:
    """Rows of two sequences, given to attention in pieces: rows of each per call. [2, T, heads * D]"""
    num_tokens, num_pages = q.shape[1], 16
    pages = cache_of(torch.full((2 * num_pages, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM), torch.nan, dtype=q.dtype))
    out = torch.empty(2, num_tokens, q.shape[2] * HEAD_DIM, dtype=q.dtype)
    starts = [0, 0]
    for sizes in pieces:
        rows = [(r, starts[r] + i) for r in (0, 1) for i in range(sizes[r])]
        index = tuple(torch.tensor(rows).t())
        plan = plan_attention(
            _inputs(starts, sizes, num_pages), page_size=PAGE_SIZE, num_draft_tokens=3, has_fixed_shapes=True
        )
        found = attend_rows(plan, q[index], k[index], v[index], pages, AttentionMask(window=window), scores)
        out[index] = found
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert starts == [num_tokens] * 2
    return out


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_depends_neither_on_chunks_nor_on_batch_mates(
    dtype: torch.dtype, softcap: float | None, has_sinks: bool, window: int | None
) -> None:
    num_tokens, num_heads = 140, 6
    q = random(2, num_tokens, num_heads, HEAD_DIM, dtype=dtype)
    k, v = random(2, 2, num_tokens, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    scores = Scores(softcap=softcap, sinks=random(num_heads) if has_sinks else None, is_tiled=True)
    whole = attended(q, k, v, [[num_tokens, 0], [0, num_tokens]], window, scores)
    pieces = [[1, 100]] * 1 + [[30, 1]] * 4 + [[3, 4]] * 6 + [[1, 12]]
    assert torch.equal(attended(q, k, v, pieces, window, scores), whole)
    plain = attended(q, k, v, pieces, window, Scores(softcap=softcap, sinks=scores.sinks))
    torch.testing.assert_close(plain, whole, rtol=0, atol=3e-2 if dtype == torch.bfloat16 else 1e-5)


def _inputs(starts: list[int], sizes: list[int], num_pages: int) -> StepInputs[Tensor]:
    present = [r for r in (0, 1) if sizes[r]]
    context_lens = torch.tensor([starts[r] for r in present], dtype=torch.int32)
    ends = torch.tensor([sizes[r] for r in present]).cumsum(0)
    positions = [starts[r] + i for r in present for i in range(sizes[r])]
    return StepInputs(
        token_ids=torch.zeros(len(positions), dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        token_offsets=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int(),
        context_lens=context_lens,
        page_table=torch.tensor([[r * num_pages + i for i in range(num_pages)] for r in present], dtype=torch.int32),
        logit_rows=torch.zeros(len(present), 1, dtype=torch.int32),
        num_candidates=torch.zeros(len(present), dtype=torch.int32),
        **columns_off(len(present)),
    )
