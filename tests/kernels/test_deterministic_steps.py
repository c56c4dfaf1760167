"""The law of `deterministic` on a GPU: tokens and log probabilities depend on their request alone, bit for bit."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.page_budget import plan_pages
from dflash_trt.backends.torch.loading import bind_tensors
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_states
from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.factories import make_target, make_zlab_drafter
from tests.gemma_targets import EVERYTHING, make_gemma
from tests.kernels.test_step_on_kernels import PAGE_SIZE

pytestmark = pytest.mark.usefixtures("rows_alike")
BLOCK_SIZE, NUM_NEW = 3, 3
PROMPTS = [[5, 9, 17, 40, 8, 33], [7, 5]]
TEMPERATURES = (0.0, 0.8)
Answer = tuple[tuple[int, ...], tuple[float, ...]]


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def make_qwen3(path: Path) -> Path:
    return make_target(path, num_hidden_layers=2, tokenizer=False, **HEADS)


def make_gemma4(path: Path) -> Path:
    layer_types = ["sliding_attention", "full_attention", "full_attention"]
    few = {"num_hidden_layers": 3, "layer_types": layer_types, "num_kv_shared_layers": 1, "num_experts": 4}
    fields = EVERYTHING | HEADS | few | {"vocab_size_per_layer_input": 64}
    return make_gemma(path, family="gemma4_text", vocab_size=64, **fields)


def make_hybrid(path: Path) -> Path:
    layer_types = ["linear_attention", "full_attention"]
    return make_target(path, family="qwen3_5_text", num_hidden_layers=2, layer_types=layer_types, **HEADS)


def make_latents(path: Path) -> Path:
    return make_target(path, family="deepseek_v3", num_hidden_layers=2, **HEADS)


def make_executor(
    root: Path, device: torch.device, *, is_deterministic: bool, make: Callable[[Path], Path] = make_qwen3
) -> TorchGpuExecutor:
    """In float16; experts and quantized weights are rows of test_fixed_tiles.py."""
    target, heads = make(root / "target"), HEADS
    drafter = make_zlab_drafter(
        root / "drafter", target_dir=target, num_layers=1, target_layer_ids=(0,), block_size=BLOCK_SIZE, **heads
    )
    opened = open_pair(target, drafter)
    weights = opened.iter_weights(dtype=torch.float16, mapping=Mapping())
    tensors = {name: tensor.to(device) for name, tensor in weights}
    states = engine_states(opened.target, opened.draft, dtype="float16")
    page_plan = plan_pages(states, page_size=PAGE_SIZE, max_batch_size=4, max_seq_len=32, budget_bytes=1 << 24)
    executor = TorchGpuExecutor(
        bind_tensors(opened.target, opened.draft, tensors),
        page_plan=page_plan,
        max_batch_size=4,
        max_num_tokens=32,
        max_draft_len=BLOCK_SIZE - 1,
        device=device,
        is_deterministic=is_deterministic,
    )
    if executor._resources.splits is not None:
        splits = replace(executor._resources.splits, piece_rows=5)  # so that long chunks run in pieces
        executor._resources = replace(executor._resources, splits=splits)
    return executor


def answers(
    executor: TorchGpuExecutor,
    order: Sequence[int],  # indices of PROMPTS
    num_draft_tokens: int,
    *,
    chunk: int | None = None,
    steps_between: int = 0,  # of one request's arrival and the next one's
    **loop: bool,
) -> list[Answer]:
    config = SchedulerConfig(max_prefill_tokens=chunk)
    scheduler = Scheduler(executor.limits, config, BatchSizeDraftLength({1: num_draft_tokens}))
    engine_loop = EngineLoop(executor, scheduler, **loop)
    streams = []
    for i, index in enumerate(order):
        sampling = SamplingParams(
            max_new_tokens=NUM_NEW, temperature=TEMPERATURES[index], top_p=0.9, ignore_eos=True, logprobs=True
        )
        request = Request(request_id=str(i), prompt_token_ids=tuple(PROMPTS[index]), sampling=sampling, seed=index)
        streams.append(engine_loop.submit(request))
        for _ in range(steps_between):
            engine_loop.step()
    while engine_loop.step():
        pass
    outputs = [stream.result(timeout_s=1) for stream in streams]
    return [(output.token_ids, output.logprobs) for output in outputs]


def test_batch_mates_drafts_chunks_and_pieces_change_no_bit(tmp_path: Path, device: torch.device) -> None:
    executor = make_executor(tmp_path, device, is_deterministic=True)
    expected = [answers(executor, [index], 0)[0] for index in range(len(PROMPTS))]
    assert all(len(tokens) == NUM_NEW for tokens, _ in expected)

    @given(
        order=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=2, max_size=2),
        num_draft_tokens=st.integers(0, BLOCK_SIZE - 1),
        chunk=st.integers(2, 6),
        steps_between=st.integers(0, 1),
        overlaps=st.booleans(),
    )
    @example(order=[1, 0], num_draft_tokens=2, chunk=None, steps_between=0, overlaps=False)
    @settings(max_examples=1, deadline=None)
    def check(order: list[int], num_draft_tokens: int, **how) -> None:
        assert answers(executor, order, num_draft_tokens, **how) == [expected[index] for index in order]

    check()


@pytest.mark.parametrize("make", [pytest.param(make_gemma4, marks=pytest.mark.slow), make_hybrid, make_latents])
def test_nor_do_they_over_other_families(tmp_path: Path, device: torch.device, make: Callable[[Path], Path]) -> None:
    executor = make_executor(tmp_path, device, is_deterministic=True, make=make)
    expected = [answers(executor, [index], 0)[0] for index in range(len(PROMPTS))]
    assert answers(executor, [1, 0], 2, chunk=4) == expected[::-1]


def linear_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A GEMM that splits its sums for few rows, as those of GPUs do."""
    parts = 2 if len(x) < 4 else 1
    sums = [a.float() @ b.float().T for a, b in zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)]
    return sum((part.to(x.dtype) for part in sums), start=torch.zeros((), dtype=x.dtype) if bias is None else bias)


@pytest.mark.skipif(torch.cuda.is_available(), reason="no GPU has said whether its bits change, too")
def test_without_the_setting_batch_mates_and_drafts_change_bits(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control, with a GEMM whose bits depend on the number of rows on every CPU."""
    monkeypatch.setattr(torch.nn.functional, "linear", linear_by_rows)
    executor = make_executor(tmp_path, device, is_deterministic=False)
    assert answers(executor, [1, 0], 2)[1] != answers(executor, [0], 0)[0]
