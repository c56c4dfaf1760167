"""Products of tiles as on a GPU: a row does not depend on its place in the tile, but on the tile's shape.

The interpreter multiplies with NumPy, whose BLAS takes other instructions for other rows of a matrix on some CPUs; a
GPU takes others for tiles of other shapes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


def dot_by_shape(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    """`create_dot` with sums in float64, which show no order, over parts of the inner axis: more for wider tiles."""
    import triton.language as tl

    def create(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32:
            return create_dot(self, a, b, d, *options)
        handle, inner = type(d), a.data.shape[-1]
        part = max(1, inner * 16 // b.data.shape[-1])
        for first in range(0, inner, part):
            left = handle(a.data[..., first : first + part], a.dtype)
            right = handle(b.data[..., first : first + part, :], b.dtype)
            result = create_dot(self, left, right, handle(d.data.astype(np.float64), tl.float64), *options)
            d = handle(result.data.astype(np.float32), d.dtype.scalar)
        return d

    return create
