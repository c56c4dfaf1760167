"""The whole step over the GPU kernels, against the step over plain PyTorch: the same network, façade for façade.

Without a GPU the kernels run in Triton's interpreter, so pairs are tiny and float32.
"""

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.graphs import GraphCache
from dflash_trt.backends.padding import decode_shapes, mixed_shapes
from dflash_trt.backends.page_budget import plan_pages
from dflash_trt.backends.torch import attention as torch_attention
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.backends.torch.loading import bind_tensors
from dflash_trt.checkpoint.pair import CheckpointPair, open_pair
from dflash_trt.core.batch import (
    RequestResult,
    ScheduledRequest,
    StepBatch,
    StepSampling,
    chained,
    plan_of,
    request_results,
    run_batch,
)
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_states, engine_weights
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.weight_spec import is_linear, segments_of
from dflash_trt.formats.base import segment_amax
from dflash_trt.formats.registry import engine_tensors, split_quantized
from dflash_trt.formats.registry import weight_format as known_format
from dflash_trt.network.drafters.dflash import DFlashDrafter
from tests.engine_dir.building import build
from tests.factories import make_speculators_drafter, make_target, make_zlab_drafter
from tests.scored_pairs import score_as

PAGE_SIZE = 4
NUM_DRAFT_TOKENS = 2
SAMPLED = StepSampling(temperature=0.9, top_k=40, top_p=0.95, seed=2**33 + 5)

# Sums in another order; measured in the interpreter: 1e-6.
LOGPROB_TOLERANCE = 1e-4
# An activation on the border between two codes may go either way, and FP8 units sum with fewer bits than float32.
# Measured in the interpreter: 1e-6; an H200 keeps the bound.
FP8_LOGPROB_TOLERANCE = 0.05

Executor = TorchExecutor | TorchGpuExecutor


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    few_heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    target = make_target(root / "target", num_hidden_layers=2, **few_heads)
    drafter = make_zlab_drafter(
        root / "drafter",
        target_dir=target,
        target_layer_ids=(0,),
        block_size=NUM_DRAFT_TOKENS + 1,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=6,
        **few_heads,
    )
    return target, drafter


def make_executors(
    pair: tuple[Path, Path],
    device: torch.device,
    *,
    weight_format: str | None = None,
    pages: QuantizationSpec | None = None,
    max_num_tokens: int = 48,
    num_snapshots: int = 0,
    host_bytes: int = 0,
) -> tuple[TorchExecutor, TorchGpuExecutor]:
    opened = open_pair(*pair)
    tensors = dict(opened.iter_weights(dtype=torch.float32, mapping=Mapping()))
    formats = quantized_linears(opened, tensors, weight_format) if weight_format else opened.quantization.linears
    table = engine_weights(opened.target, opened.draft, opened.quantization)
    copies = (tensors, {name: tensor.clone().to(device) for name, tensor in tensors.items()})
    networks = [bind_tensors(opened.target, opened.draft, *split_quantized(copy, table, formats)) for copy in copies]
    page_plan = plan_pages(
        engine_states(opened.target, opened.draft, dtype="float32"),
        page_size=PAGE_SIZE,
        max_batch_size=4,
        max_seq_len=64,
        budget_bytes=1 << 24,
        num_snapshots=num_snapshots,
        host_bytes=host_bytes,
    )
    limits = {"max_batch_size": 4, "max_num_tokens": max_num_tokens, "max_draft_len": NUM_DRAFT_TOKENS}
    return (
        TorchExecutor(networks[0], page_plan=page_plan, quantization=pages, **limits),
        TorchGpuExecutor(networks[1], page_plan=page_plan, device=device, quantization=pages, **limits),
    )


def quantized_linears(pair: CheckpointPair, tensors: dict[str, torch.Tensor], format_name: str) -> dict[str, str]:
    """Pack every linear of whole blocks but the head, in place, with activations calibrated to 6; their formats."""
    formats: dict[str, str] = {}
    for name, spec in engine_weights(pair.target, pair.draft, None).items():
        if not is_linear(spec, name) or name.endswith("lm_head"):
            continue
        known = known_format(format_name)
        if spec.shape[-1] % known.columns_per_block:
            continue
        weight, segments = tensors[name], segments_of(spec)
        ranges = segment_amax(weight, segments)
        if known.shares_weight_scale:
            ranges = ranges.amax(dim=-1, keepdim=True).expand_as(ranges).clone()
        input_amax = torch.full_like(ranges, 6.0) if known.has_input_scale else None
        quantized = known.quantize(weight, segments=segments, weight_amax=ranges, input_amax=input_amax)
        tensors |= engine_tensors(name, quantized)
        formats[name] = format_name
    return formats


def prefill(name: str, length: int, sampling: StepSampling, *, first_page: int, num_pages: int = 8) -> ScheduledRequest:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(4, 260, (length,), generator=generator).tolist()
    pages = tuple(range(first_page, first_page + num_pages))
    return ScheduledRequest(
        request_id=name, token_ids=tuple(tokens), context_len=0, num_candidates=0, page_ids=pages, sampling=sampling
    )


def next_batch(
    batch: StepBatch, result: tuple[RequestResult, ...], *, num_candidates: Callable[[int], int]
) -> StepBatch:
    """Every request verifies some of its drafts."""
    rows = []
    for r, (request, row) in enumerate(zip(batch.requests, result, strict=True)):
        count = min(num_candidates(r), len(row.draft_tokens))
        rows.append(
            ScheduledRequest(
                request_id=request.request_id,
                token_ids=(row.emitted_tokens[-1], *row.draft_tokens[:count]),
                context_len=row.next_context_len,
                num_candidates=count,
                page_ids=request.page_ids,
                sampling=request.sampling,
            )
        )
    return StepBatch(requests=tuple(rows), num_draft_tokens=batch.num_draft_tokens)


def assert_same(found: tuple[RequestResult, ...], expected: tuple[RequestResult, ...]) -> None:
    for row, other in zip(found, expected, strict=True):
        assert row.emitted_tokens == other.emitted_tokens
        assert row.draft_tokens == other.draft_tokens
        assert (row.num_accepted, row.next_context_len) == (other.num_accepted, other.next_context_len)
        assert row.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_TOLERANCE)


def start(executor: Executor) -> tuple[StepBatch, tuple[RequestResult, ...]]:
    requests = (
        prefill("greedy", 6, StepSampling(), first_page=0),  # more than a page
        prefill("sampled", 3, SAMPLED, first_page=10),
    )
    batch = StepBatch(requests=requests, num_draft_tokens=NUM_DRAFT_TOKENS)
    return batch, run_batch(executor, batch)


def test_a_step_over_the_kernels_gives_the_tokens_of_plain_pytorch(
    pair: tuple[Path, Path], device: torch.device
) -> None:
    reference, executor = make_executors(pair, device)
    for pages in executor.pages:
        pages.fill_(torch.nan)  # as another request may have left them
    batch, expected = start(reference)
    assert_same(run_batch(executor, batch), expected)
    batch = next_batch(batch, expected, num_candidates=lambda r: 2)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)
    late = prefill("late", 5, StepSampling(), first_page=30)  # a prefill chunk beside verify blocks of 0 and 1 drafts
    batch = next_batch(batch, expected, num_candidates=(0, 1).__getitem__)
    batch = StepBatch(requests=(*batch.requests, late), num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)
    batch = next_batch(batch, expected, num_candidates=lambda r: 0)
    batch = StepBatch(requests=batch.requests[:1], num_draft_tokens=0)  # no drafts, but the draft context is fed
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)


@pytest.mark.parametrize("is_anchored", [True, False])
def test_windows_from_the_anchor_and_a_tap_on_the_last_layer_reach_the_kernels(
    pair: tuple[Path, Path], device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_anchored: bool
) -> None:
    target, _ = pair
    drafter = make_speculators_drafter(
        tmp_path / "drafter",
        target_dir=target,
        draft_vocab_size=None,
        target_layer_ids=(1,),
        block_size=NUM_DRAFT_TOKENS + 1,
        layer_types=("sliding_attention", "sliding_attention"),
        sliding_window=2,
    )
    reference, executor = make_executors((target, drafter), device)
    if not is_anchored:  # the negative control
        honest = torch_attention._block_bias

        def unanchored(plan, mask, *given):
            return honest(plan, mask.model_copy(update={"is_window_anchored": False}), *given)

        monkeypatch.setattr(torch_attention, "_block_bias", unanchored)
    batch = StepBatch(requests=(prefill("a", 7, StepSampling(), first_page=0),), num_draft_tokens=NUM_DRAFT_TOKENS)
    found, expected = (run_batch(each, batch) for each in (executor, reference))
    drafts = [[row.draft_tokens for row in result] for result in (found, expected)]
    assert (drafts[0] == drafts[1]) == is_anchored


def test_an_fp8_engine_gives_the_tokens_of_plain_pytorch(pair: tuple[Path, Path], device: torch.device) -> None:
    reference, executor = make_executors(pair, device, weight_format="fp8")
    batch = StepBatch(requests=(prefill("a", 5, StepSampling(), first_page=0),), num_draft_tokens=NUM_DRAFT_TOKENS)
    found, expected = run_batch(executor, batch), run_batch(reference, batch)
    assert found[0].emitted_tokens == expected[0].emitted_tokens
    assert found[0].draft_tokens == expected[0].draft_tokens
    error = abs(found[0].logprobs[0] - expected[0].logprobs[0])
    plain = run_batch(make_executors(pair, device)[0], batch)[0].logprobs[0]
    assert error < FP8_LOGPROB_TOLERANCE < abs(found[0].logprobs[0] - plain)


def test_a_changed_weight_is_noticed(pair: tuple[Path, Path], device: torch.device) -> None:
    """The negative control of the test above."""
    reference, executor = make_executors(pair, device)
    drafter = executor.network.drafter
    assert isinstance(drafter, DFlashDrafter)
    drafter.norm.mul_(-1)
    with executor.on_stream():
        executor.network.target_weights.layers[1].mlp_norm.mul_(1.01)
    request = prefill("greedy", 3, StepSampling(), first_page=0)
    batch = StepBatch(requests=(request,), num_draft_tokens=NUM_DRAFT_TOKENS)
    found, expected = run_batch(executor, batch), run_batch(reference, batch)
    assert [row.draft_tokens for row in found] != [row.draft_tokens for row in expected]
    logprobs = [row.logprobs[0] for row in found]
    assert logprobs != pytest.approx([row.logprobs[0] for row in expected], abs=LOGPROB_TOLERANCE)


def test_steps_are_captured_once_then_replayed_and_may_follow_on_the_device(
    pair: tuple[Path, Path], device: torch.device
) -> None:
    """On a CPU a graph stands for the function that enqueues: it is called again, at the same addresses."""
    reference, executor = make_executors(pair, device)
    captured = []
    if device.type == "cpu":

        def capture(enqueue: Callable[[], None]) -> Callable[[], None]:
            captured.append(enqueue)
            return enqueue

        executor.graphs = GraphCache(capture)
    for pool in executor.pages:
        pool.fill_(7.0)
    (shape,) = [s for s in decode_shapes(executor.limits, num_draft_tokens=NUM_DRAFT_TOKENS) if s.num_requests == 2]
    executor.warm_up([shape])
    assert executor.graphs.num_graphs == 1
    assert all(bool((pool == 7.0).all()) for pool in executor.pages)  # padding alone touches no page

    batch, expected = start(reference)
    prefilled = executor.submit(plan_of(batch)).result()
    assert_same(request_results(prefilled), expected)
    for _ in range(3):  # steps that the host fills in with nothing but their layout
        batch = next_batch(batch, expected, num_candidates=lambda r: 2)
        expected = run_batch(reference, batch)
        assert_same(request_results(executor.submit(chained(plan_of(batch))).result()), expected)
    assert executor.graphs.num_graphs == 1
    assert device.type == "cuda" or len(captured) == 3  # the target, sampling, drafts


def test_prefill_chunks_of_one_bucket_share_a_graph(pair: tuple[Path, Path], device: torch.device) -> None:
    reference, executor = make_executors(pair, device, max_num_tokens=16)
    if device.type == "cpu":
        executor.graphs = GraphCache(lambda enqueue: enqueue)
    for pool in executor.pages:
        pool.fill_(7.0)
    [shape] = [s for s in mixed_shapes(executor.limits, num_draft_tokens=NUM_DRAFT_TOKENS) if s.num_requests == 2]
    executor.warm_up([shape])
    assert all(bool((pool == 7.0).all()) for pool in executor.pages)
    for length in (6, 5):  # as many tokens as the graph has rows for, and fewer
        requests = (prefill("a", length, StepSampling(), first_page=0), prefill("b", 4, SAMPLED, first_page=10))
        batch = StepBatch(requests=requests, num_draft_tokens=NUM_DRAFT_TOKENS)
        assert_same(run_batch(executor, batch), run_batch(reference, batch))
    assert executor.graphs.num_graphs == 1


def test_the_logits_of_a_sequence_are_those_of_plain_pytorch(pair: tuple[Path, Path], device: torch.device) -> None:
    reference, executor = make_executors(pair, device)
    tokens = list(range(4, 11))
    torch.testing.assert_close(executor.target_logits(tokens), reference.target_logits(tokens), rtol=1e-4, atol=1e-4)


def test_a_closed_executor_gives_weights_and_pages_back_though_it_is_still_held(
    pair: tuple[Path, Path], device: torch.device
) -> None:
    _, executor = make_executors(pair, device)
    executor.target_logits((5, 9, 2))
    weight, graphs, staging, results = (
        executor.network.target_weights.embedding,
        executor.graphs,
        executor._staging,
        executor._results,
    )
    freed = [weakref.ref(item) for item in (weight, graphs, staging, results, *executor.pages)]
    del weight, graphs, staging, results
    executor.close()
    gc.collect()
    assert [item() for item in freed] == [None] * len(freed)
    executor.close()


def test_an_engine_directory_opens_on_a_device(pair: tuple[Path, Path], device: torch.device, tmp_path: Path) -> None:
    limits = {"max_batch_size": 4, "max_seq_len": 64, "max_num_tokens": 48, "page_size": PAGE_SIZE}
    engine = build(tmp_path, tmp_path / "engine", target=str(pair[0]), drafter=str(pair[1]), **limits)
    executor = TorchGpuExecutor.open(engine, RuntimeConfig(kv_cache_bytes=1 << 22), device=device)
    reference = TorchExecutor.open(engine, RuntimeConfig(kv_cache_bytes=1 << 22))
    assert executor.limits == reference.limits and executor.page_plan == reference.page_plan
    batch = StepBatch(requests=(prefill("a", 3, SAMPLED, first_page=0),), num_draft_tokens=NUM_DRAFT_TOKENS)
    assert_same(run_batch(executor, batch), run_batch(reference, batch))
    plain = TorchGpuExecutor.open(engine, RuntimeConfig(use_drafter=False, kv_cache_bytes=1 << 22), device=device)
    assert plain.limits.max_draft_len == 0
    with pytest.raises(ConfigError, match="kv_cache_free_memory_fraction: expected a number"):
        TorchGpuExecutor.open(engine, RuntimeConfig(kv_cache_free_memory_fraction=1.5), device=device)


@pytest.mark.parametrize(
    "scales", [(LayerKvScales(k=0.02, v=0.01), LayerKvScales(k=0.03, v=0.007)), (LayerKvScales(),) * 2]
)
@pytest.mark.usefixtures("exact_fp8")
def test_fp8_pages_of_target_and_drafter_give_the_tokens_of_plain_pytorch(
    pair: tuple[Path, Path], device: torch.device, scales: tuple[LayerKvScales, LayerKvScales]
) -> None:
    pages = QuantizationSpec(target_kv=scales, draft_kv=scales)
    reference, executor = make_executors(pair, device, pages=pages)
    exact, _ = make_executors(pair, device)
    batch, expected = start(reference)
    found, unrounded = run_batch(executor, batch), run_batch(exact, batch)
    for is_last in (False, True):
        for row, other in zip(found, expected, strict=True):
            assert (row.emitted_tokens, row.draft_tokens) == (other.emitted_tokens, other.draft_tokens)
            assert row.logprobs == pytest.approx(other.logprobs, abs=FP8_LOGPROB_TOLERANCE)
        if not is_last:
            batch = next_batch(batch, expected, num_candidates=lambda r: 2)
            found, expected, unrounded = (run_batch(each, batch) for each in (executor, reference, exact))
    assert found[0].logprobs != pytest.approx(unrounded[0].logprobs, abs=1e-6), "the pages are FP8"
    assert {tensor.dtype for tensor in executor.pages} == {torch.float8_e4m3fn}


def test_an_engine_larger_than_the_kernels_are_made_for_is_refused(
    pair: tuple[Path, Path], device: torch.device
) -> None:
    reference, _ = make_executors(pair, device)
    sizes = {"max_batch_size": 5000, "max_num_tokens": 48, "max_draft_len": NUM_DRAFT_TOKENS}
    with pytest.raises(ConfigError, match="max_batch_size: expected at most 4096 on a GPU, found 5000"):
        TorchGpuExecutor(reference.network, page_plan=reference.page_plan, device=device, **sizes)
    odd = replace(reference.page_plan, page_size=12)
    with pytest.raises(ConfigError, match="page_size: expected a power of two on a GPU, found 12"):
        TorchGpuExecutor(reference.network, page_plan=odd, device=device, **sizes | {"max_batch_size": 4})


@pytest.mark.parametrize("change", [{}, {"softcap": None}, {"scale": None}], ids=["same", "no soft cap", "no scale"])
def test_scales_and_soft_caps_reach_the_kernels(
    pair: tuple[Path, Path], device: torch.device, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """With a change, the negative control: PyTorch scores as the kernels do not."""
    score_as(monkeypatch, {"scale": 0.6, "softcap": 0.7}, sys.modules[__name__])
    reference, executor = make_executors(pair, device)
    honest = torch_attention.attend
    monkeypatch.setattr(torch_attention, "attend", lambda *given: honest(*given[:-1], replace(given[-1], **change)))
    batch, expected = start(reference)
    found = run_batch(executor, batch)
    if not change:
        assert_same(found, expected)
        batch = next_batch(batch, expected, num_candidates=lambda r: 2)
        assert_same(run_batch(executor, batch), run_batch(reference, batch))
    else:
        assert abs(found[0].logprobs[0] - expected[0].logprobs[0]) > 10 * LOGPROB_TOLERANCE
