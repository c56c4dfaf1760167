"""Steps of a known shape as CUDA graphs: captured before serving, then replayed.

Knows keys and callables; what a step enqueues is its owner's business. Without a `capture` (on a CPU) every step is
enqueued anew, by the same code.
"""

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

Enqueue = Callable[[], None]
Capture = Callable[[Enqueue], Enqueue]  # records what a call enqueues; what it returns replays that


class GraphCache:
    """One graph per key. `enqueue` must use the same memory in every call with the same key."""

    def __init__(self, capture: Capture | None) -> None:
        self._capture = capture
        self._graphs: dict[Hashable, Enqueue] = {}

    def capture(self, key: Hashable, enqueue: Enqueue) -> None:
        """Run once, then capture, before serving: a step of requests may not run twice.

        The run compiles kernels and fills caches, which a capture must not. TensorRT, too, must have executed a shape
        since its context had another one.
        """
        enqueue()
        if self._capture is not None and key not in self._graphs:
            self._graphs[key] = self._capture(enqueue)

    def run(self, key: Hashable, enqueue: Enqueue) -> None:
        """Replay the graph of this key; without one, enqueue."""
        self._graphs.get(key, enqueue)()

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
