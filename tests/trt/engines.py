"""TensorRT's executor over an interpreted engine of a pair of checkpoints."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from dflash_trt.backends.tensorrt.context import StepContexts
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.engine_dir import EngineLimits
from tests.trt.fake_engine import USER_MANAGED, FakeEngine
from tests.trt.networks import MAX_NUM_TOKENS, MAX_SEQ_LEN, define_pair


def open_pair_engine(
    trt: ModuleType, target: Path, drafter: Path | None = None, *, max_batch_size: int = 8, **options: Any
) -> TensorRTExecutor:
    """`options` are of `define_pair`."""
    defined = define_pair(trt, target, drafter, **options)
    sizes = {"max_batch_size": max_batch_size, "max_seq_len": MAX_SEQ_LEN, "page_size": defined.spec.page_size}
    sizes |= {"max_num_tokens": max(MAX_NUM_TOKENS, 2 * max_batch_size), "max_draft_len": defined.spec.max_draft_len}
    limits = ExecutorLimits(**sizes, draft_topk=defined.spec.draft_topk, num_pages=512)
    stream, device = SimpleNamespace(cuda_stream=0), torch.device("cpu")
    engine = FakeEngine(defined, EngineLimits(**sizes))
    contexts = StepContexts(engine, USER_MANAGED, stream, captured=(), device=device)
    return TensorRTExecutor(contexts, defined.spec, limits, stream=stream, capture=None, device=device)
