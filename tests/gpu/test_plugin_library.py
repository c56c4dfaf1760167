"""The plugin library's compiled kernels on a GPU, through its C interface, against PyTorch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.plugins.building import build_library
from tests.plugins.c_api import LibraryError, PluginLibrary
from tests.plugins.node_inputs import CASES, NODES, NodeInputs, StepCase
from tests.trt.test_plugins import PluginReference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: it runs compiled kernels"),
    pytest.mark.timeout(1800),  # the kernels are compiled first
]

# Rounding of the inputs' type, twice; values are of size 1 to 4. Not measured on a GPU yet.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 6e-2}
SPOILT = 0.2
FP8 = torch.float8_e4m3fn
LARGE = StepCase(
    num_tokens=(8,) * 30 + (300, 8),
    context_lens=tuple(37 * r % 900 for r in range(32)),
    width=8,
    heads=32,
    kv_heads=8,
    head_dim=128,
    page_size=32,
    window=0,
    vocab_size=151936,
)
GPU_CASES = {name: replace(case, head_dim=64) for name, case in CASES.items()} | {
    "large": LARGE,
    "large, sliding": replace(LARGE, window=200, is_causal=1),
    "large, FP8 pages": replace(LARGE, page_dtype=FP8, k_scale=0.02, v_scale=0.3),
}


@pytest.fixture(scope="module")
def library() -> PluginLibrary:
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}" + ("a" if major >= 9 else "")
    out = Path(__file__).parents[2] / "build" / "test_plugins_gpu"
    built = build_library(out, "--arch", architecture, "--head-dims", "64,128", timeout_s=1500)
    return PluginLibrary(built.kernels)


def reference(node: str, inputs: dict[str, Tensor], fields: dict[str, float]) -> list[Tensor]:
    """In float32 on the CPU, from the same rounded inputs; FP8 pages stay what they are."""
    contracts = PluginReference().contracts
    named = type("Node", (), {"name": node, "fields": fields})
    is_network = {name: tensor.is_floating_point() and tensor.dtype != FP8 for name, tensor in inputs.items()}
    given = [inputs[name].cpu().float() if is_network[name] else inputs[name].cpu() for name in contracts[node].inputs]
    return PluginReference()(named, given)


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a.cpu().double() - b.double()).abs().max()) for a, b in pairs)


def make(node: str, case: StepCase) -> tuple[dict[str, Tensor], dict[str, float]]:
    inputs, fields = getattr(NodeInputs(case, torch.device("cuda")), NODES[node])()
    return inputs, fields


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", GPU_CASES)
@pytest.mark.parametrize("node", NODES)
def test_a_node_gives_what_pytorch_gives(library: PluginLibrary, node: str, case: str, dtype: torch.dtype) -> None:
    inputs, fields = make(node, replace(GPU_CASES[case], dtype=dtype))
    expected = reference(node, inputs, fields)
    found = library(node, inputs, fields)
    assert difference(found, expected) <= TOLERANCES[dtype]
    if node != "SampleAndAccept":
        assert torch.equal(found[-1].cpu().float(), expected[-1].float()), "pages are copied, or divided and rounded"


@pytest.mark.parametrize("node", NODES)
def test_a_changed_input_is_noticed(library: PluginLibrary, node: str) -> None:
    inputs, fields = make(node, GPU_CASES["verify"])
    expected = reference(node, inputs, fields)
    name = {"AttendPages": "k", "SampleAndAccept": "logits"}.get(node, "context_v")
    inputs[name][0] = inputs[name][0].flip(-1)
    assert difference(library(node, inputs, fields), expected) > SPOILT


@pytest.mark.parametrize("pages", ["large", "large, FP8 pages"])
@pytest.mark.parametrize("node", NODES)
def test_a_captured_call_replays_with_new_content(library: PluginLibrary, node: str, pages: str) -> None:
    """Neither allocation nor synchronization: capture would fail. The replay reads lengths from the device."""
    case = replace(GPU_CASES[pages], dtype=torch.bfloat16)
    inputs, fields = make(node, case)
    library(node, inputs, fields)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = library(node, inputs, fields)
    fresh, _ = getattr(NodeInputs(case, torch.device("cuda"), seed=1), NODES[node])()
    for name, tensor in inputs.items():
        tensor.copy_(fresh[name])
    expected = reference(node, fresh, fields)
    graph.replay()
    torch.cuda.synchronize()
    assert difference(found, expected) <= TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("case", ["large", "large, FP8 pages"])
def test_repeated_calls_give_equal_bits(library: PluginLibrary, case: str) -> None:
    for node in NODES:
        results = []
        for _ in range(2):
            inputs, fields = make(node, replace(GPU_CASES[case], dtype=torch.bfloat16))
            results.append([tensor.clone() for tensor in library(node, inputs, fields)])
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(*results, strict=True)), node


def test_what_there_is_no_kernel_for_is_said(library: PluginLibrary) -> None:
    inputs, fields = make("AttendPages", replace(GPU_CASES["verify"], head_dim=48))
    with pytest.raises(LibraryError, match="HEAD_DIM = 48"):
        library("AttendPages", inputs, fields)
