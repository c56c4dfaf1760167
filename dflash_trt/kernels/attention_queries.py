"""Queries of the attention kernels: rows of a tile, in the type of the products."""

# mypy: ignore-errors
# ruff: noqa: N803, SIM102  (constants of a kernel are upper case; it takes branches one by one)

import triton
import triton.language as tl


@triton.jit
def load_queries(rows, is_dim, IS_WHOLE: tl.constexpr):
    if IS_WHOLE:
        return tl.load(rows)
    return tl.load(rows, mask=is_dim, other=0.0)


@triton.jit
def for_pages(queries, pages):
    """Queries in the products' type: FP8 numbers are exact in float16, and convert in few instructions."""
    if pages.dtype.element_ty == tl.float8e4nv:
        if queries.dtype == tl.bfloat16:
            queries = queries.to(tl.float16)
    return queries
