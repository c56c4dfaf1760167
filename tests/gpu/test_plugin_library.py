"""The plugin library's compiled kernels on a GPU, through its C interface, against PyTorch."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.plugins.building import build_library
from tests.plugins.c_api import LibraryError, PluginLibrary
from tests.plugins.delta_cases import CASES as DELTA_CASES
from tests.plugins.delta_cases import kept_state
from tests.plugins.latent_cases import CASES as LATENT_CASES
from tests.plugins.node_inputs import CASES, NODES, NUM_STATES, SAMPLING_NODES, STATE, NodeInputs, StepCase, defined
from tests.trt.plugin_reference import PluginReference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: it runs compiled kernels"),
    pytest.mark.timeout(1800),  # the kernels are compiled first
]

# Rounding of the inputs' type, twice; values are of size 1 to 4. An H200 keeps this.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 6e-2}
SPOILT = 0.2
FP8 = torch.float8_e4m3fn
KERNELS = ("--head-dims", "64,128", "--softcaps", "without,with", "--chains", "without,with")
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
    """Compiled here, or elsewhere, and named by the variable: compiling takes minutes of a machine."""
    if named := os.environ.get("DFLASH_TRT_TEST_LIBRARY"):
        return PluginLibrary(Path(named))
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}" + ("a" if major >= 9 else "")
    out = Path(__file__).parents[2] / "build" / "test_plugins_gpu"
    built = build_library(out, "--arch", architecture, *KERNELS, module="tests.plugins.small_library", timeout_s=1500)
    return PluginLibrary(built.kernels)


class Call:
    """A node's inputs on the GPU. `run` gives its outputs, and the pages if it has any."""

    def __init__(self, node: str, case: StepCase, *, seed: int = 0) -> None:
        self.node, self.case = node, case
        self.made = NodeInputs(case, torch.device("cuda"), seed=seed)
        self.inputs, self.fields = getattr(self.made, NODES[node])()

    def run(self, library: PluginLibrary) -> list[Tensor]:
        return defined(self.node, [*library(self.node, self.inputs, self.fields), *self.made.written])

    def expected(self) -> list[Tensor]:
        """In float32 on the CPU, from the same rounded inputs; FP8 pages stay what they are."""
        pages = [_wide(tensor.cpu()).clone() for tensor in self.made.written]
        given = {name: _wide(tensor.cpu()) for name, tensor in self.inputs.items()}
        if pages:
            given["state_pools"] = torch.zeros(NUM_STATES, dtype=torch.int64)
            given["state_pools"][STATE] = pages[0].data_ptr()
        reference = PluginReference()
        named = type("Node", (), {"name": self.node, "fields": self.fields})
        outputs = reference(named, [given[name] for name in reference.programs[self.node].input_names])
        outputs = [] if self.node == "WriteDraftContext" else outputs  # its output has no value
        return defined(self.node, [*outputs, *pages])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype != FP8 else tensor


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a.cpu().double() - b.double()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", GPU_CASES)
@pytest.mark.parametrize("node", NODES)
def test_a_node_gives_what_pytorch_gives(library: PluginLibrary, node: str, case: str, dtype: torch.dtype) -> None:
    call = Call(node, replace(GPU_CASES[case], dtype=dtype))
    expected = call.expected()
    found = call.run(library)
    assert difference(found, expected) <= TOLERANCES[dtype]
    if node not in SAMPLING_NODES:
        assert torch.equal(found[-1].cpu().float(), expected[-1].float()), "pages are copied, or divided and rounded"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", DELTA_CASES)
def test_a_delta_net_gives_what_pytorch_gives_and_leaves_its_state(
    library: PluginLibrary, name: str, dtype: torch.dtype
) -> None:
    case = DELTA_CASES[name]
    inputs, fields, state = case.node(dtype)
    node = type("Node", (), {"name": "GatedDelta", "fields": fields})
    expected = PluginReference()(node, list(inputs.values()))
    inputs, fields, found_state = case.node(dtype, "cuda")
    found = library("GatedDelta", inputs, fields)
    assert difference(found, [tensor.float() for tensor in expected]) <= TOLERANCES[dtype]
    assert difference(kept_state(case, found_state), kept_state(case, state)) <= TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", LATENT_CASES)
def test_a_node_over_latents_gives_what_pytorch_gives(library: PluginLibrary, name: str, dtype: torch.dtype) -> None:
    case = LATENT_CASES[name]
    inputs, fields, pages = case.node(dtype)
    node = type("Node", (), {"name": "AttendLatents", "fields": fields})
    expected = PluginReference()(node, list(inputs.values()))
    inputs, fields, found_pages = case.node(dtype, "cuda")
    found = library("AttendLatents", inputs, fields)
    assert difference(found, [tensor.float() for tensor in expected]) <= TOLERANCES[dtype]
    assert torch.equal(found_pages.cpu().float(), pages.float())


@pytest.mark.parametrize("node", NODES)
def test_a_changed_input_is_noticed(library: PluginLibrary, node: str) -> None:
    call = Call(node, GPU_CASES["verify"])
    expected = call.expected()
    name = {"AttendPages": "k", "PreviousRows": "x"}.get(node, "logits" if node in SAMPLING_NODES else "context_v")
    call.inputs[name][0] = call.inputs[name][0].flip(-1)
    assert difference(call.run(library), expected) > SPOILT


@pytest.mark.parametrize("pages", ["large", "large, FP8 pages"])
@pytest.mark.parametrize("node", NODES)
def test_a_captured_call_replays_with_new_content(library: PluginLibrary, node: str, pages: str) -> None:
    """Neither allocation nor synchronization: capture would fail. The replay reads lengths and the pages' address from
    the device.
    """
    case = replace(GPU_CASES[pages], dtype=torch.bfloat16)
    call, fresh = Call(node, case), Call(node, case, seed=1)
    call.run(library)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = library(node, call.inputs, call.fields)
    for name, tensor in call.inputs.items():
        tensor.copy_(fresh.inputs[name])
    expected = fresh.expected()
    graph.replay()
    torch.cuda.synchronize()
    assert difference(defined(node, [*outputs, *fresh.made.written]), expected) <= TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("case", ["large", "large, FP8 pages"])
def test_repeated_calls_give_equal_bits(library: PluginLibrary, case: str) -> None:
    for node in NODES:
        calls = [Call(node, replace(GPU_CASES[case], dtype=torch.bfloat16)) for _ in range(2)]
        results = [call.run(library) for call in calls]
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(*results, strict=True)), node


def test_what_there_is_no_kernel_for_is_said(library: PluginLibrary) -> None:
    call = Call("AttendPages", replace(GPU_CASES["verify"], head_dim=48))
    with pytest.raises(LibraryError, match="HEAD_DIM = 48"):
        call.run(library)
