"""The page tables of a step's page groups, each an input of the engine at an address of its own."""

from typing import Final

import torch
from torch import Tensor

from dflash_trt.backends.padding import StepShape
from dflash_trt.backends.tensorrt.network import PAGE_TABLE, table_name
from dflash_trt.core.step_plan import ExecutorLimits

_ALIGNMENT: Final = 64  # entries, 256 bytes: what TensorRT asks of an input


class PageTables:
    """Memory for the tables of all groups at their largest; a step uses the first R * P entries of each."""

    def __init__(self, limits: ExecutorLimits, *, device: torch.device) -> None:
        self._max_pages = limits.max_pages
        size = -(-limits.max_batch_size * limits.max_pages // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.zeros((limits.num_page_groups, size), dtype=torch.int32, device=device)
        self._names = [PAGE_TABLE.name, *(table_name(group.window) for group in limits.page_windows)]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Flat, by name of the engine's tensor."""
        return dict(zip(self._names, self._memory.unbind(), strict=True))

    def views(self, shape: StepShape) -> Tensor:  # int32 [G, R, P]
        """Of a step of this shape; the same addresses every time."""
        sizes = shape.sizes(max_pages=self._max_pages)
        rows, pages = sizes["R"], sizes["P"]
        return self._memory[:, : rows * pages].view(-1, rows, pages)
