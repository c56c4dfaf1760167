"""Steps of a known shape as CUDA graphs: captured before serving, then replayed.

Knows keys and callables; what a step enqueues is its owner's business. Without a `capture` (on a CPU) every step is
enqueued anew, by the same code.
"""

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

Enqueue = Callable[[], None]
Capture = Callable[[Enqueue], Enqueue]  # records what a call enqueues; what it returns replays that

_NOTHING: Final[Mapping[int, Enqueue]] = MappingProxyType({})


class GraphCache:
    """One step per key, in parts of a graph each.

    A part must use the same memory in every call with its key.
    """

    def __init__(self, capture: Capture | None) -> None:
        self._capture = capture
        self._graphs: dict[Hashable, Sequence[Enqueue]] = {}

    def capture(self, key: Hashable, *parts: Enqueue) -> None:
        """Run once, then capture, before serving: a step of requests may not run twice.

        The run compiles kernels and fills caches, which a capture must not. TensorRT, too, must have executed a shape
        since its context had another one.
        """
        for part in parts:
            part()
        if self._capture is not None and key not in self._graphs:
            self._graphs[key] = [self._capture(part) for part in parts]

    def run(self, key: Hashable, *parts: Enqueue, replaced: Mapping[int, Enqueue] = _NOTHING) -> None:
        """Replay the key's graphs, or enqueue without them.

        Parts in `replaced`, by index, are enqueued instead.
        """
        for index, part in enumerate(self._graphs.get(key, parts)):
            replaced.get(index, part)()

    @property
    def num_graphs(self) -> int:
        """Steps that are captured."""
        return len(self._graphs)


class CudaCapture:
    """A Capture on one stream. All graphs share one memory pool, since no two run at the same time.

    If a tensor of one capture is held during the next, that does not overwrite it.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, enqueue: Enqueue) -> Enqueue:
        """Unlike torch.cuda.graph, keep the allocator's cache, which steps without a graph need again.

        The exception is short memory: the allocator returns nothing during a capture.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            free_bytes, _ = torch.cuda.mem_get_info()
            if free_bytes < torch.cuda.memory_reserved() - torch.cuda.memory_allocated():
                torch.cuda.empty_cache()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                enqueue()
            finally:
                graph.capture_end()
        replay: Enqueue = graph.replay
        return replay


def unowned(tensor: Tensor) -> Tensor:
    """The same GPU memory without ownership, so that it may be reused while this tensor lives: a graph's."""
    assert tensor.is_cuda and tensor.is_contiguous()
    content: Tensor = torch.as_tensor(_DeviceBytes(tensor.data_ptr(), tensor.nbytes), device=tensor.device)
    return content.view(tensor.dtype).view(tensor.shape)


class _DeviceBytes:
    """Memory under CUDA's array interface, version 3."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3
        }  # fmt: skip


@contextlib.contextmanager
def waits_raise() -> Iterator[None]:
    """Make PyTorch raise RuntimeError on its own operations that would wait for the device: for measuring.

    It covers copies, `item` and synchronizing streams, but not events.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
