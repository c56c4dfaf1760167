"""Variants of the kernels that write pages, to be compiled, as `rope_and_pages_launch.py` and `paged_rows_launch.py`
pass them.
"""

import torch

from dflash_trt.kernels.launching import request_capacity
from dflash_trt.kernels.paged_rows import previous_rows_kernel
from dflash_trt.kernels.paged_rows_launch import ROW_WARPS, row_block
from dflash_trt.kernels.rope_and_pages import draft_context_kernel, rotate_and_store_kernel
from dflash_trt.kernels.rope_and_pages_launch import HEADS_PER_PROGRAM, NUM_WARPS, head_constants, rotation_constants
from plugins.aot.variant import KernelVariant, pointer


def rotate_and_store_variant(
    *,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    head_dim: int,
    has_norm: bool,
    has_rope: bool,
    stores_pages: bool,
    has_limits: bool,
    norms_v: bool = False,
    max_requests: int = 256,
) -> KernelVariant:
    """One use of the kernel. The plain write of a plugin has neither norm nor rope, and q_heads is 0."""
    uses = (
        ("norm", has_norm),
        ("rope", has_rope),
        ("pages", stores_pages),
        ("limits", has_limits),
        ("v_norm", norms_v),
    )
    constants = rotation_constants(head_dim, max_requests)
    tensors = dict.fromkeys(("q", "k", "v", "q_out", "k_out"), pointer(dtype))
    tensors |= {"pages": pointer(page_dtype), "state_pools": pointer(torch.int64)}
    tensors |= {"q_norm": pointer(dtype), "k_norm": pointer(dtype)}
    tensors |= {"inv_freq": pointer(torch.float32)}
    tensors |= dict.fromkeys(("positions", "token_offsets", "page_table", "limits"), pointer(torch.int32))
    scalars = dict.fromkeys(("amplitude", "eps", "k_scale", "v_scale"), "fp32")
    scalars |= dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32:16")
    scalars |= dict.fromkeys(
        ("q_heads", "kv_heads", "num_requests", "pages_per_request", "page_shift", "state_index"), "i32"
    )
    heads = HEADS_PER_PROGRAM
    blocks = [f"(q_heads + {heads - 1}) / {heads}", f"(kv_heads + {heads - 1}) / {heads}"]
    return KernelVariant(
        name=_name("rotate_and_store", dtype, page_dtype, constants, [use for use, is_on in uses if is_on]),
        kernel=rotate_and_store_kernel,
        signature=tensors | scalars,
        constexprs=constants
        | head_constants(head_dim)
        | {"HAS_NORM": has_norm, "HAS_ROPE": has_rope, "STORES_PAGES": stores_pages, "HAS_LIMITS": has_limits}
        | {"POOLED": stores_pages, "NORMS_V": norms_v},
        num_warps=NUM_WARPS,
        num_stages=1,
        grid=("num_rows", " + ".join([*blocks, blocks[1]] if stores_pages else blocks), "1"),
    )


def page_write_variant(
    *, dtype: torch.dtype, page_dtype: torch.dtype, head_dim: int, has_limits: bool, max_requests: int
) -> KernelVariant:
    """The plain write of a plugin; `has_limits`: of a drafter's accepted rows."""
    return rotate_and_store_variant(
        dtype=dtype,
        page_dtype=page_dtype,
        head_dim=head_dim,
        has_norm=False,
        has_rope=False,
        stores_pages=True,
        has_limits=has_limits,
        max_requests=max_requests,
    )


def draft_context_variant(
    *, dtype: torch.dtype, page_dtype: torch.dtype, head_dim: int, has_norm: bool, max_requests: int = 256
) -> KernelVariant:
    constants = rotation_constants(head_dim, max_requests)
    signature = {"kv": pointer(dtype), "pages": pointer(page_dtype), "layer_offsets": pointer(torch.int64)}
    signature |= {"k_norms": pointer(dtype)}
    signature |= dict.fromkeys(("k_scales", "v_scales", "inv_freq"), pointer(torch.float32))
    signature |= dict.fromkeys(("positions", "token_offsets", "page_table", "limits"), pointer(torch.int32))
    signature |= {"amplitude": "fp32", "eps": "fp32"}
    signature |= dict.fromkeys(("kv_heads", "num_requests", "pages_per_request", "page_shift"), "i32")
    return KernelVariant(
        name=_name("draft_context", dtype, page_dtype, constants, ["norm"] if has_norm else []),
        kernel=draft_context_kernel,
        signature=signature,
        constexprs=constants | {"HAS_NORM": has_norm},
        num_warps=NUM_WARPS,
        num_stages=1,
        grid=("num_rows", "num_layers", f"(kv_heads + {HEADS_PER_PROGRAM - 1}) / {HEADS_PER_PROGRAM}"),
    )


def previous_rows_variant(
    dtype: torch.dtype, *, width: int, max_requests: int, is_pooled: bool = True
) -> KernelVariant:
    """Features of a chain; `is_pooled`: their pages are at an address, as a plugin has them. The grid uses num_rows."""
    block, requests = row_block(width), request_capacity(max_requests)
    is_aligned = is_pooled and width % 16 == 0
    tensors = dict.fromkeys(("x", "before", "pages"), pointer(dtype)) | {"state_pools": pointer(torch.int64)}
    tensors |= dict.fromkeys(("positions", "token_offsets", "context_lens", "page_table"), pointer(torch.int32))
    if not is_pooled:
        tensors["state_pools"] = tensors["page_table"]  # which stands in for it
    sizes = dict.fromkeys(("num_requests", "pages_per_request", "page_shift", "state_index"), "i32")
    uses = [str(dtype).removeprefix("torch."), *(["v16"] if is_aligned else []), f"b{block}", f"r{requests}"]
    return KernelVariant(
        name="_".join(["previous_rows", *uses]),
        kernel=previous_rows_kernel,
        signature=tensors | {"width": "i32:16" if is_aligned else "i32"} | sizes,
        constexprs={"REQUESTS": requests, "BLOCK": block, "POOLED": is_pooled},
        num_warps=ROW_WARPS,
        num_stages=1,
        grid=("num_rows", f"(width + {block - 1}) / {block}", "1"),
    )


def _name(
    kernel: str, dtype: torch.dtype, page_dtype: torch.dtype, constants: dict[str, int | bool], uses: list[str]
) -> str:
    types = [str(x).removeprefix("torch.") for x in (dtype, page_dtype)]
    return "_".join([kernel, *types, *uses, f"d{constants['HEAD_DIM']}", f"r{constants['REQUESTS']}"])
