"""The page tables of a step's page groups, each at an aligned address of its own."""

from typing import Final

import torch
from torch import Tensor

from dflash_trt.backends.padding import StepShape
from dflash_trt.core.step_plan import ExecutorLimits

_ALIGNMENT: Final = 64  # entries, 256 bytes: what TensorRT asks of an input; kernels need 16


class PageTables:
    """Memory for the tables of all groups at their largest; a step uses the first R * P entries of each."""

    def __init__(self, limits: ExecutorLimits, *, device: torch.device) -> None:
        self._max_pages = limits.max_pages
        size = -(-limits.max_batch_size * limits.max_pages // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.zeros((limits.num_page_groups, size), dtype=torch.int32, device=device)

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """The memory of each group."""
        return self._memory.unbind()

    def views(self, shape: StepShape) -> Tensor:  # int32 [G, R, P]
        """Page tables of a step of this shape; the same addresses every time."""
        sizes = shape.sizes(max_pages=self._max_pages)
        rows, pages = sizes["R"], sizes["P"]
        return self._memory[:, : rows * pages].view(-1, rows, pages)
