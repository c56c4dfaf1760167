"""The attention kernels on a GPU: bfloat16, large steps, CUDA graphs, and the rate at which pages are read."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.kernels import rope_and_pages_launch
from dflash_trt.kernels.attention_launch import AttentionOptions, RequestTensors, allocate_workspace, attend_pages
from tests.kernels import reference_attention
from tests.kernels import test_rope_and_pages_kernels as page_tests
from tests.kernels.attention_steps import Heads, Step, Tensors, make_tensors
from tests.kernels.test_attention_kernels import DRAFTS, STEPS, draft_tensors, error, run_draft, run_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: bfloat16, graphs and speed"),
]

DEVICE = torch.device("cuda")
# Weights and values are rounded to bfloat16 (2^-9), the result once more; values are of size 1 to 4. An H200 keeps it.
BFLOAT16_TOLERANCE = 3e-2
PERTURBED = 0.2


def in_bfloat16(step: Step) -> Step:
    return replace(step, dtype=torch.bfloat16)


@pytest.mark.parametrize("step", [in_bfloat16(step) for step in STEPS.values()], ids=STEPS.keys())
def test_bfloat16_steps_attend_as_the_reference_says(step: Step) -> None:
    tensors = make_tensors(step)
    got, num_rows = run_step(step, tensors, DEVICE), sum(step.rows)
    want = reference_attention.attend_pages(tensors.q, tensors.pages, tensors.requests, step.options)
    assert error(got[:num_rows], want[:num_rows]) <= BFLOAT16_TOLERANCE
    integers = torch.uint8 if tensors.pages.element_size() == 1 else torch.int16  # float8 rows cannot be rolled
    shifted = replace(tensors, pages=tensors.pages.view(integers).roll(1, dims=4).view(tensors.pages.dtype))
    perturbed = reference_attention.attend_pages(shifted.q, shifted.pages, shifted.requests, step.options)
    assert error(got[:num_rows], perturbed[:num_rows]) > PERTURBED


@pytest.mark.parametrize("name", DRAFTS)
def test_bfloat16_drafts_attend_as_the_reference_says(name: str) -> None:
    step = in_bfloat16(DRAFTS[name])
    tensors, block = draft_tensors(step)
    got = run_draft(step, tensors, block, DEVICE)
    want = reference_attention.attend_draft(tensors.q, block, tensors.pages, tensors.requests, step.options)
    assert error(got, want) <= BFLOAT16_TOLERANCE


@functools.cache
def big_step(rows: tuple[int, ...], contexts: tuple[int, ...]) -> tuple[Step, Tensors]:
    """Qwen3-8B's heads, pages of 32."""
    heads = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
    step = Step(rows=rows, contexts=contexts, heads=heads, page_size=32, dtype=torch.bfloat16)
    return step, make_tensors(step).to(DEVICE)


def launch(step: Step, tensors: Tensors, workspace: Tensor, attended: Tensor) -> None:
    attend_pages(
        tensors.q,
        tensors.pages,
        tensors.requests,
        step.options,
        workspace=workspace,
        num_verify_rows=16,
        attended=attended,
    )


def workspace_of(step: Step) -> Tensor:
    heads = step.heads
    return allocate_workspace(kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, device=DEVICE)


@pytest.mark.parametrize(
    "rows", [(16,) * 4, (1,) * 4, (8, 1, 16, 3), (1000, 16, 16, 1)], ids=["verify", "decode", "ragged", "with prefill"]
)
def test_long_contexts_attend_as_the_reference_says(rows: tuple[int, ...]) -> None:
    step, tensors = big_step(rows, (8000, 31, 4096, 12_345))
    attended = torch.full_like(tensors.q, torch.nan)
    launch(step, tensors, workspace_of(step), attended)
    want = reference_attention.attend_pages(tensors.q, tensors.pages, tensors.requests, step.options)
    assert error(attended, want) <= BFLOAT16_TOLERANCE


def test_a_captured_launch_serves_other_lengths() -> None:
    """The graph is captured once; only the content of the tensors changes between replays."""
    step, tensors = big_step((16, 16, 16), (5000, 200, 70))
    workspace, attended = workspace_of(step), torch.full_like(tensors.q, torch.nan)
    launch(step, tensors, workspace, attended)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(step, tensors, workspace, attended)
    for rows, contexts in (((16, 16, 16), (5000, 200, 70)), ((7, 1, 3), (31, 203, 0)), ((1, 32, 15), (4990, 9, 64))):
        offsets = torch.tensor((0, *rows), device=DEVICE).cumsum(0).int()
        tensors.requests.token_offsets.copy_(offsets)
        tensors.requests.context_lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        attended.fill_(torch.nan)
        graph.replay()
        want = reference_attention.attend_pages(tensors.q, tensors.pages, tensors.requests, step.options)
        assert error(attended[: sum(rows)], want[: sum(rows)]) <= BFLOAT16_TOLERANCE
        assert attended[sum(rows) :].isnan().all()


def median_ms(run: Any, *, num_runs: int = 30) -> float:
    """Of replays of a graph, so that launch gaps stay out."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(num_runs):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[num_runs // 2]


@pytest.mark.parametrize("num_rows", [1, 8, 16])
def test_pages_are_read_at_four_fifths_of_the_copy_rate(num_rows: int) -> None:
    """16 requests of 8k context, 32 heads over 8 K/V heads of 128: 537 MB of keys and values, beyond any cache."""
    num_requests, context = 16, 8192 - num_rows
    num_pages = num_requests * 8192 // 32
    pages = torch.randn(num_pages, 2, 32, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    order = torch.randperm(num_pages, device=DEVICE).int().view(num_requests, -1)
    requests = RequestTensors(
        token_offsets=torch.arange(num_requests + 1, device=DEVICE, dtype=torch.int32) * num_rows,
        context_lens=torch.full((num_requests,), context, device=DEVICE, dtype=torch.int32),
        page_table=order,
    )
    q = torch.randn(num_requests * num_rows, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    workspace, attended = allocate_workspace(kv_heads=8, head_dim=128, device=DEVICE), torch.empty_like(q)

    def attend() -> None:
        attend_pages(
            q, pages, requests, AttentionOptions(), workspace=workspace, num_verify_rows=num_rows, attended=attended
        )

    destination = torch.empty_like(pages)
    copy_rate = 2 * pages.nbytes / median_ms(lambda: destination.copy_(pages))
    read_rate = pages.nbytes / median_ms(attend)
    assert read_rate >= 0.8 * copy_rate, f"{read_rate / 1e6:.0f} GB/s of {copy_rate / 1e6:.0f} GB/s"


@pytest.mark.parametrize("page_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_bfloat16_rows_are_rotated_and_stored_as_the_reference_says(page_dtype: torch.dtype) -> None:
    scales = (0.02, 0.05) if page_dtype == torch.float8_e4m3fn else (1.0, 1.0)
    case = page_tests.Case(dtype=torch.bfloat16, page_dtype=page_dtype, head_dim=128, scales=scales)
    rows = page_tests.make_rows(case)
    (got_q, got), (want_q, want) = (run(rows, case) for run in (_store, _expected))
    assert got_q is not None and want_q is not None
    assert error(got_q, want_q) <= BFLOAT16_TOLERANCE
    # One step of the format, where the two sides round a tie's neighbourhood differently.
    step = 2**-3 if page_dtype == torch.float8_e4m3fn else 2**-7
    assert ((got.float() - want.float()).abs() <= step * want.float().abs() + 1e-6).all()


def _store(rows: page_tests.Rows, case: page_tests.Case) -> tuple[Tensor | None, Tensor]:
    return page_tests.store(rows, case, DEVICE, limits=True)


def _expected(rows: page_tests.Rows, case: page_tests.Case) -> tuple[Tensor | None, Tensor]:
    return page_tests.expected(rows, case, limits=True)


def test_page_writes_can_be_captured() -> None:
    case = page_tests.Case(dtype=torch.bfloat16, head_dim=128)
    rows = page_tests.make_rows(case)
    moved = rows.to(DEVICE)

    def write() -> None:
        rope_and_pages_launch.rotate_and_store(
            moved.q, moved.k, moved.v, moved.pages, moved.requests, moved.positions, moved.rotation
        )

    write()
    written = moved.pages.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write()
    moved.pages.fill_(1.0)
    graph.replay()
    assert torch.equal(moved.pages, written)
