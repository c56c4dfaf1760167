"""What runs on a GPU runs in tests: no check, branch or default of the GPU back end asks whether a tensor is on one."""

import ast
from pathlib import Path

import pytest
import torch

from dflash_trt.kernels.launching import check_tensor

ROOT = Path(__file__).parents[2]
FOLDERS = ("dflash_trt/backends/cuda", "dflash_trt/kernels")
# File and function -> why a CPU has no such thing.
ALLOWED = {
    "backends/cuda/executor.py:open": "warm-up compiles and captures, which the interpreter has no use for",
    "backends/cuda/executor.py:_new_stream": "the stream itself",
    "backends/cuda/host_memory.py:__init__": "page-locked memory",
    "backends/cuda/linear.py:_has_fp8_gemm": "the capability of the GPU",
    "backends/cuda/nvfp4.py:has_fp4_gemm": "the capability of the GPU",
    "backends/cuda/step_launches.py:draft": "memory of a graph, which later captures reuse",
    "kernels/attention_launch.py:num_multiprocessors": "the number of multiprocessors",
}


def asks_for_a_gpu(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    is_type = node.attr == "type" and ast.unparse(node.value).split(".")[-1] == "device"
    return is_type or node.attr in ("is_cuda", "is_cpu") or ast.unparse(node) == "torch.cuda.is_available"


def questions(source: str) -> list[str]:
    """The functions that ask, by the innermost one's name."""
    found = []

    def visit(node: ast.AST, name: str) -> None:
        name = node.name if isinstance(node, ast.FunctionDef) else name
        if asks_for_a_gpu(node):
            found.append(name)
        for child in ast.iter_child_nodes(node):
            visit(child, name)

    visit(ast.parse(source), "module")
    return found


def test_only_what_a_cpu_does_not_have_asks_for_the_device() -> None:
    found = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            place = path.relative_to(ROOT / "dflash_trt")
            found |= {f"{place}:{name}" for name in questions(path.read_text())}
    assert found == set(ALLOWED)


@pytest.mark.parametrize("asks", ["x.is_cuda", "x.device.type == 'cuda'", "device.type", "torch.cuda.is_available()"])
def test_every_way_to_ask_is_found(asks: str) -> None:
    assert questions(f"def launch(x):\n    if {asks}:\n        pass") == ["launch"]


def test_an_odd_slice_is_refused_on_a_cpu_as_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="16-byte aligned"):
        check_tensor("page_table", torch.zeros(9, dtype=torch.int32)[1:], dtype=torch.int32, shape=[8])
