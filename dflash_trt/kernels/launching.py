"""What launchers share: checks of tensors, which are never copied or converted, sizes, and launches by name."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.core.errors import problem

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
# Kernels are compiled for one of a few sizes that is large enough.
_CAPACITIES = (16, 64, 256, 1024, 4096)
MAX_REQUESTS = _CAPACITIES[-1]
MAX_DELTA_HEAD_DIM: Final = 128  # in gated delta nets
MAX_DELTA_RECORDS: Final = 64
MAX_CANDIDATES: Final = 64  # per slot of a draft block, and per draft


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    constants: Mapping[str, int],
    *,
    num_warps: int,
    has_fp_fusion: bool = True,
) -> None:
    """Launch with the arguments and constants that the kernel has, by their names; both may have more."""
    own = constants_of(kernel, constants)
    given = {name: arguments[name] for name in kernel.arg_names if name not in own}
    kernel[grid](**given, **own, num_warps=num_warps, enable_fp_fusion=has_fp_fusion)


def constants_of(kernel: Any, constants: Mapping[str, int]) -> dict[str, int]:
    """The constants that the kernel has."""
    return {name: constants[name] for name in kernel.arg_names if name in constants}


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    dtype: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | None],  # None means any
    row_stride_is_free: bool = False,  # only the axes after the first must be dense
    may_be_unaligned: bool = False,  # for a kernel that is not specialized on its alignment
) -> None:
    """Raise ValueError unless the tensor is of this dtype and shape, dense and 16-byte aligned."""
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if tensor.dtype not in dtypes:
        _refuse(name, " or ".join(str(d) for d in dtypes), str(tensor.dtype), "Convert it before the launch.")
    is_shaped = tensor.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not is_shaped:
        wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
        _refuse(name, f"shape {wanted}", str(list(tensor.shape)), "Shapes stand in the launcher's docstring.")
    is_dense = tensor[0].is_contiguous() if row_stride_is_free and len(tensor) else tensor.is_contiguous()
    if not is_dense:
        _refuse(name, "a dense row-major tensor", f"strides {tensor.stride()}", "Call .contiguous() on it.")
    if tensor.data_ptr() % 16 and not may_be_unaligned:
        _refuse(name, "a 16-byte aligned address", hex(tensor.data_ptr()), "Do not pass an odd slice of a buffer.")


def check_pages(pages: Tensor, *, dtype: torch.dtype, head_dim: int, scales: tuple[float, float]) -> None:
    """[pages, 2, page_size, kv_heads, head_dim] of `dtype` or of FP8; only FP8 pages have scales."""
    check_tensor("pages", pages, dtype=(dtype, torch.float8_e4m3fn), shape=[None, 2, None, None, head_dim])
    page_size = pages.shape[2]
    is_power = page_size & (page_size - 1) == 0
    check(is_power, "page_size", expected="a power of two", found=page_size, hint="Build with 16, 32 or 64.")
    check(
        pages.dtype == torch.float8_e4m3fn or scales == (1.0, 1.0),
        "k_scale, v_scale",
        expected="1.0 for pages that are not FP8",
        found=scales,
        hint="Scales belong to FP8 pages.",
    )


def check(is_right: bool, name: str, *, expected: str, found: object, hint: str) -> None:
    if not is_right:
        _refuse(name, expected, str(found), hint)


def _refuse(name: str, expected: str, found: str, hint: str) -> None:
    raise ValueError(problem(name, expected=expected, found=found, hint=hint))


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def topk_capacity(draft_topk: int) -> int:
    """The constant DRAFT_TOPK: one of two sizes."""
    return 32 if draft_topk <= 32 else MAX_CANDIDATES


def request_capacity(num_requests: int) -> int:
    """The constant REQUESTS: one of a few sizes, so that few variants are compiled."""
    check(
        num_requests <= MAX_REQUESTS,
        "requests in a step",
        expected=f"at most {MAX_REQUESTS}",
        found=num_requests,
        hint="Build the engine with a smaller max_batch_size.",
    )
    return next(capacity for capacity in _CAPACITIES if capacity >= num_requests)
