"""Layers with windows in pages of their own, over the GPU kernels: the tokens that one group of pages gives."""

from pathlib import Path

import pytest
import torch

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.page_budget import plan_pages
from dflash_trt.backends.page_groups import PageNeeds, StepSizes
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.backends.torch.loading import bind_tensors
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_states
from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.core.step_plan import StepExecutor
from dflash_trt.network.state import Cache
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.factories import make_target, make_zlab_drafter

LIMITS = {"max_batch_size": 1, "max_num_tokens": 12, "max_draft_len": 2}
PAGES = {"page_size": 4, "max_batch_size": 1, "max_seq_len": 48}
PROMPT = tuple(4 + 5 * i % 50 for i in range(23))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """All layers of the target have a window of 5 tokens, those of the drafter one of 7."""
    root, heads = tmp_path_factory.mktemp("pair"), {"num_attention_heads": 2, "num_key_value_heads": 1}
    target = make_target(root / "target", family="mistral", num_hidden_layers=2, sliding_window=5, **heads)
    slides = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 7}
    drafter = make_zlab_drafter(
        root / "drafter", target_dir=target, target_layer_ids=(0,), block_size=3, num_layers=2, **slides, **heads
    )
    return target, drafter


def make_executor(pair: tuple[Path, Path], device: torch.device | None) -> TorchExecutor | TorchGpuExecutor:
    """Without a device, plain PyTorch over one group of pages."""
    opened = open_pair(*pair)
    tensors = {name: tensor.to(device) for name, tensor in opened.iter_weights(dtype=torch.float32, mapping=Mapping())}
    network = bind_tensors(opened.target, opened.draft, tensors)
    states, sizes = engine_states(opened.target, opened.draft, dtype="float32"), PAGES
    if device is not None:
        sizes = PAGES | {"steps": StepSizes(max_num_tokens=12, max_draft_len=2)}
    page_plan = plan_pages(states, **sizes, budget_bytes=PageNeeds(states=states, **sizes).bytes_of(1))
    if device is None:
        return TorchExecutor(network, page_plan=page_plan, **LIMITS)
    return TorchGpuExecutor(network, page_plan=page_plan, device=device, **LIMITS)


def tokens_of(executor: StepExecutor) -> tuple[int, ...]:
    loop = EngineLoop(executor, Scheduler(executor.limits, SchedulerConfig(enable_prefix_caching=False)))
    sampling = SamplingParams(max_new_tokens=5, ignore_eos=True)
    stream = loop.submit(Request(request_id="one", prompt_token_ids=PROMPT, sampling=sampling))
    while loop.step():
        loop.check_integrity()
    return stream.result(timeout_s=1).token_ids


def spoil(executor: TorchGpuExecutor, *, with_blank_pages: bool) -> None:
    """Fill all pages with NaN, as of requests that ended with an error."""
    for cache in (*executor._state.target_kv, *executor._state.draft_kv):
        assert isinstance(cache, Cache) and cache.group > 0
        blank_page = executor.limits.page_windows[cache.group - 1].blank_page
        cache.tensor[: blank_page + with_blank_pages] = torch.nan


def test_tokens_are_those_of_one_group_whatever_is_left_in_pages(pair: tuple[Path, Path], device: torch.device) -> None:
    expected = tokens_of(make_executor(pair, None))
    executor = make_executor(pair, device)
    assert isinstance(executor, TorchGpuExecutor)
    assert [group.window for group in executor.limits.page_windows] == [5, 7]
    assert [group.num_pages for group in executor.limits.page_windows] == [7, 7]  # the whole has 13
    spoil(executor, with_blank_pages=False)
    assert tokens_of(executor) == expected
    spoil(executor, with_blank_pages=True)
    assert tokens_of(executor) != expected, "kernels load keys before a window, whose weight of 0 does not hide NaN"
