"""Pages of one layer as the cache that attention takes."""

from torch import Tensor

from dflash_trt.core.dtype import dtype_name
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.core.state_spec import PagedKv
from dflash_trt.network.state import Cache


def cache_of(pages: Tensor, scales: LayerKvScales | None = None) -> Cache[Tensor]:
    """`pages` [pages, 2, page_size, kv_heads, D]."""
    num_kv_heads, head_dim = pages.shape[3:]
    dtype = dtype_name(pages.dtype)
    return Cache(pages, PagedKv(name="kv", num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, scales=scales))
