"""Steps of a known shape as CUDA graphs: run twice, then captured once, then replayed.

Knows keys and callables; what a step enqueues is its owner's business. Without a `capture` (on a CPU) every step is
enqueued anew, by the same code.
"""

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

MAX_GRAPHS = 256  # beyond this many shapes, steps run without a graph

Enqueue = Callable[[], None]
Capture = Callable[[Enqueue], Enqueue]  # records what a call enqueues; what it returns replays that


class GraphCache:
    """One graph per key. `enqueue` must use the same memory in every call with the same key."""

    def __init__(self, capture: Capture | None, *, max_graphs: int = MAX_GRAPHS) -> None:
        self._capture = capture
        self._max_graphs = max_graphs
        self._warm: set[Hashable] = set()
        self._graphs: dict[Hashable, Enqueue] = {}

    def run(self, key: Hashable, enqueue: Enqueue, *, num_reserved: int = 0) -> None:
        """The first run compiles kernels and fills caches, which a capture must not; the second one captures.

        `num_reserved` slots are kept free for calls that reserve fewer.
        """
        replay = self._graphs.get(key)
        if replay is not None:
            replay()
            return
        can_capture = self._capture is not None and len(self._graphs) < self._max_graphs - num_reserved
        if key not in self._warm or not can_capture:
            self._warm.add(key)
            enqueue()
            return
        assert self._capture is not None
        self._graphs[key] = self._capture(enqueue)  # records without running
        self._graphs[key]()

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)


class CudaCapture:
    """A Capture on one stream. All graphs share one memory pool, since no two of them run at the same time."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, enqueue: Enqueue) -> Enqueue:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            enqueue()
        replay: Enqueue = graph.replay
        return replay


class WarmCapture:
    """Runs what it captures once before: TensorRT must have executed a shape since its context had another one.

    A step that is run twice gives the same result.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def __call__(self, enqueue: Enqueue) -> Enqueue:
        enqueue()
        return self._capture(enqueue)


@contextlib.contextmanager
def waits_raise() -> Iterator[None]:
    """Inside, PyTorch raises RuntimeError on operations of its own that would wait for the device: for measuring.

    It knows copies, `item` and synchronizing streams, and not events.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
