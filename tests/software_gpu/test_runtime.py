"""The double of CUDA's runtime sees what CUDA forbids, and computes in the order of streams: scripts/test_cuda."""

import os
from collections.abc import Callable

import pytest
import torch

if os.environ.get("SOFTWARE_GPU_EXECUTES") != "1":
    pytest.skip("needs PyTorch's CUDA build on a GPU made of software: scripts/test_cuda", allow_module_level=True)

from software_gpu.runtime.library import software_cuda


@pytest.fixture
def new_problems() -> Callable[[], list[str]]:
    before = len(software_cuda().problems)
    return lambda: software_cuda().problems[before:]


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def test_a_graph_computes_each_time_that_it_is_launched() -> None:
    x, out = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = capture(lambda: out.copy_(x + 1))
    assert out.tolist() == [0, 0, 0]
    for value in (1.0, 2.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [value + 1] * 3


def test_a_stream_that_waits_for_no_event_does_not_see_another_ones_work() -> None:
    """Work is done as late as CUDA allows; the negative control is the event."""
    x = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    side, found = torch.cuda.Stream(), []
    for waits in (False, True):
        with torch.cuda.stream(side):
            x.add_(1)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        found.append(int(x.item()))
        torch.cuda.synchronize()
    assert found == [0, 2]


def test_a_pinned_block_is_given_to_nobody_else_while_a_copy_is_on_its_way(new_problems) -> None:
    """As PyTorch's own copies see to; its allocator waits for an event."""
    found, addresses, side = [], set(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        for value in range(4):
            pinned = torch.full((8,), value).pin_memory()
            addresses.add(pinned.data_ptr())
            found.append(pinned.to("cuda", non_blocking=True))
            del pinned
    side.synchronize()
    assert [int(x[0]) for x in found] == [0, 1, 2, 3] and len(addresses) == 4
    assert not new_problems()


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda x: torch.cuda.synchronize(), "cudaDeviceSynchronize during a capture"),
        (lambda x: x.sum().item(), "cudaStreamSynchronize of a stream that is captured"),
        (lambda x: torch.tensor([1.0, 2.0], device="cuda"), "a copy H2D of pageable memory in a capture"),
    ],
    ids=["synchronize", "item", "a tensor of the host"],
)
def test_what_waits_inside_of_a_capture_is_told(
    work: Callable[[torch.Tensor], object], expected: str, new_problems: Callable[[], list[str]]
) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError):
        capture(lambda: work(x))
    assert new_problems()[0] == expected


def test_the_host_is_seen_where_it_touches_pinned_memory_in_flight(new_problems: Callable[[], list[str]]) -> None:
    pinned, x = torch.zeros(1000, pin_memory=True), torch.ones(1000, device="cuda")
    pinned.copy_(x, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert float(pinned.sum()) == 1000 and new_problems() == []
    pinned.copy_(x, non_blocking=True)
    pinned.sum()
    assert new_problems() == ["the host reads a pinned block while a copy into it is in flight"]
    torch.cuda.synchronize()
    x.copy_(pinned, non_blocking=True)
    pinned.fill_(3)
    assert new_problems()[1:] == ["the host writes a pinned block while a copy out of it is in flight"]
