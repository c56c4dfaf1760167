"""TensorRT's executor over an interpreted engine of a pair of checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tensorrt_rtx
import torch

from dflash_trt.backends.page_budget import plan_engine_pages
from dflash_trt.backends.tensorrt.context import StepContexts
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor, _limits_without_pages, limits_with_pages
from dflash_trt.backends.torch.backend import TorchBackend
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.engine_dir import EngineDir, EngineLimits
from tests.trt.fake_engine import USER_MANAGED, FakeEngine
from tests.trt.networks import MAX_NUM_TOKENS, MAX_SEQ_LEN, DefinedStep, define_engine, define_pair

SPLIT_LENGTH = 16  # keys
CPU, STREAM = torch.device("cpu"), SimpleNamespace(cuda_stream=0)


def open_pair_engine(
    trt: ModuleType,
    target: Path,
    drafter: Path | None = None,
    *,
    max_batch_size: int = 8,
    max_seq_len: int = MAX_SEQ_LEN,
    num_snapshots: int = 0,
    **options: Any,
) -> TensorRTExecutor:
    """`options` are of `define_pair`."""
    defined = define_pair(trt, target, drafter, **options)
    sizes = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len, "page_size": defined.spec.page_size}
    sizes |= {"max_num_tokens": max(MAX_NUM_TOKENS, 2 * max_batch_size), "max_draft_len": defined.spec.max_draft_len}
    limits = ExecutorLimits(
        **sizes,
        draft_topk=defined.spec.draft_topk,
        num_pages=512,
        num_snapshots=num_snapshots if defined.spec.states.is_recurrent else None,
        max_prompt_scores=MAX_NUM_TOKENS,
    )
    engine = FakeEngine(defined, EngineLimits(**sizes))
    contexts = StepContexts(engine, USER_MANAGED, STREAM, captured=(), device=CPU)
    return TensorRTExecutor(contexts, defined.spec, limits, stream=STREAM, capture=None, device=CPU)


def open_interpreted(engine: EngineDir, config: RuntimeConfig, **_: Any) -> TensorRTExecutor:
    """TensorRT's executor for an engine directory of backend torch on a CPU, with the limits that the product gives."""
    defined = define_engine(tensorrt_rtx, engine, split_length=SPLIT_LENGTH if config.deterministic else 0)
    return open_defined(defined, engine, config)


def open_defined(defined: DefinedStep, engine: EngineDir, config: RuntimeConfig) -> TensorRTExecutor:
    """The executor of one rank, whose network is defined."""
    pages = plan_engine_pages(engine.manifest, config)
    limits = _limits_without_pages(engine, defined.spec, config)
    limits = limits_with_pages(limits, pages, is_recurrent=defined.spec.states.is_recurrent)
    contexts = StepContexts(
        FakeEngine(defined, engine.manifest.build_config), USER_MANAGED, STREAM, captured=(), device=CPU
    )
    executor = TensorRTExecutor(contexts, defined.spec, limits, stream=STREAM, capture=None, device=CPU)
    executor.page_plan = pages
    return executor


@contextmanager
def interpreted_engines() -> Iterator[None]:
    """Whoever opens an engine of backend torch gets `open_interpreted`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, "open", lambda self, *given, **named: open_interpreted(*given, **named))
        yield
