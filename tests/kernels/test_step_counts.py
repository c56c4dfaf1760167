"""What a verify step launches, by weight format, and that it makes no tensor on the host."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from dflash_trt.backends.cuda import nvfp4
from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.padding import decode_shape
from dflash_trt.core.batch import StepBatch, plan_of
from tests.factories import Family, make_target, make_zlab_drafter
from tests.kernels.block_scales import checked
from tests.kernels.test_step_on_kernels import make_executors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")

NUM_LAYERS, NUM_DRAFT_LAYERS = 2, 1
HOST = ("aten.lift_fresh", "aten._local_scalar_dense")  # a tensor made of Python's numbers, a number read back
VIEWS = (
    *("view", "_unsafe_view", "reshape", "flatten", "slice", "select", "split", "split_with_sizes", "unbind", "expand"),
    *("squeeze", "unsqueeze", "t", "transpose", "permute", "alias", "detach"),
)
MEMORY = ("empty", "new_empty", "empty_like", "empty_strided", "set_")


class OpCounter(TorchDispatchMode):
    """Operators of PyTorch that compute, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = str(func.overloadpacket)
        name = packet.removeprefix("aten.")
        if name not in (*VIEWS, *MEMORY):
            self.ops[packet] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Kernels, which are not run, and PyTorch's operators inside."""
    kernels: Counter[str] = Counter()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels[kernel.fn.__name__] += 1
        if kernel.fn.__name__ == "draft_block_kernel":  # its tokens are looked up
            args[kernel.arg_names.index("token_ids")].zero_()

    with pytest.MonkeyPatch.context() as patch, OpCounter() as counter:
        patch.setattr(InterpretedFunction, "run", run)
        yield kernels, counter.ops


def count_step(executor: TorchGpuExecutor) -> tuple[Counter[str], Counter[str]]:
    shape = decode_shape(1, executor.limits.max_draft_len)
    executor._staging.stage(plan_of(StepBatch(requests=(), num_draft_tokens=shape.num_draft_tokens)), shape)
    with torch.inference_mode(), counted() as (kernels, ops):
        executor._run(shape)
    return kernels, ops


def scaled_mm_without_content(*matrices: torch.Tensor, **options: Any) -> torch.Tensor:
    """Counted as the one operator that it is; a GPU runs three kernels for it."""
    out = checked(*matrices, **options)
    return torch.empty(out.shape, dtype=out.dtype)


def make_pair(root: Path, family: Family) -> tuple[Path, Path]:
    """Matrices of whole tiles of NVFP4 block scales, as real ones are."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
    target = make_target(root / "target", family=family, num_hidden_layers=NUM_LAYERS, **sizes)
    options = {"target_layer_ids": (0,), "block_size": 3, "attention_bias": family == "gpt_oss", **sizes}
    return target, make_zlab_drafter(root / "drafter", target_dir=target, num_layers=NUM_DRAFT_LAYERS, **options)


# Our kernels, and PyTorch's operators, each at least one launch on a GPU. docs/benchmarks.md has these numbers, too.
@pytest.mark.parametrize(
    ("family", "weight_format", "num_kernels", "num_ops"),
    [
        ("qwen3", None, 36, 52),
        ("qwen3", "fp8", 38, 59),
        ("qwen3", "nvfp4", 41, 52),
        ("qwen3", "nvfp4 in our kernel", 56, 37),
        ("qwen3", "nvfp4_w4a16", 51, 37),
        ("gpt_oss", None, 43, 52),
        ("gpt_oss", "mxfp4", 56, 39),
        ("gpt_oss", "int8", 73, 39),
    ],
)
def test_a_step_launches_so_much_and_makes_no_tensor_on_the_host(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: Family,
    weight_format: str | None,
    num_kernels: int,
    num_ops: int,
) -> None:
    if weight_format == "nvfp4":
        monkeypatch.setattr(nvfp4, "has_fp4_gemm", lambda device: True)
        monkeypatch.setattr(F, "scaled_mm", scaled_mm_without_content)
    weight_format = weight_format and weight_format.split()[0]
    _, executor = make_executors(make_pair(tmp_path, family), torch.device("cpu"), weight_format=weight_format)
    kernels, ops = count_step(executor)
    assert not [name for name in ops if name in HOST]
    assert (kernels.total(), ops.total()) == (num_kernels, num_ops), f"{kernels}\n{ops}"
    if family == "gpt_oss":
        experts = ("routing_kernel", "expert_gate_up_kernel", "expert_down_kernel", "expert_sum_kernel")
        assert [kernels[name] for name in experts] == [NUM_LAYERS] * 4  # and the router's GEMM


def test_a_tensor_of_the_host_is_counted() -> None:
    """The negative control."""
    with counted() as (_, ops):
        torch.ones(2) * torch.tensor(2.0)
        torch.ones(1).item()
    assert [ops[name] for name in HOST] == [1, 1]
