"""The kernels that no plugin library holds, as they are launched: to be compiled ahead and looked at."""

import torch

from dflash_trt.kernels import row_copies_launch
from dflash_trt.kernels.launching import next_power_of_2
from dflash_trt.kernels.norm import add_rms_norm_kernel, gated_mul_kernel, rms_norm_kernel
from dflash_trt.kernels.norm_launch import GATED_BLOCK, norm_warps
from dflash_trt.kernels.row_codes import AS_THEY_ARE, FP8, NVFP4, NVFP4_TILED, quantize_fp8_kernel
from dflash_trt.kernels.row_codes_launch import FP8_BLOCK
from dflash_trt.kernels.row_copies import copy_row_kernel
from plugins.aot.variant import KernelVariant, pointer

SUFFIXES = {AS_THEY_ARE: "", FP8: "_fp8", NVFP4: "_nvfp4", NVFP4_TILED: "_nvfp4_tiled"}


def norm_variants(
    dtype: torch.dtype, *, hidden_size: int, ffn_size: int, form: int, is_gelu: bool = False
) -> tuple[KernelVariant, ...]:
    """Grids use num_rows, the rows of the kernel's output. `form`: RESULT of `row_codes.py`."""
    tensor, suffix = pointer(dtype), SUFFIXES[form]
    values = {AS_THEY_ARE: tensor, FP8: pointer(torch.float8_e4m3fn)}.get(form, pointer(torch.uint8))
    block_scale = pointer(torch.float8_e4m3fn) if form in (NVFP4, NVFP4_TILED) else values  # any tensor stands in
    codes = {"block_scale": block_scale, "scale": tensor if form == AS_THEY_ARE else pointer(torch.float32)}
    block, gated_block = next_power_of_2(hidden_size), min(GATED_BLOCK, next_power_of_2(ffn_size))
    hidden, ffn = (f"i32{':16' if size % 16 == 0 else ''}" for size in (hidden_size, ffn_size))
    tensors = {"x": tensor, "weight": tensor, "normed": values, **codes, "eps": "fp32"}
    sums = {"x": tensor, "residual": tensor, "weight": tensor, "total": tensor, "normed": values, **codes}
    return (
        KernelVariant(
            name=f"rms_norm{suffix}",
            kernel=rms_norm_kernel,
            signature=tensors | {"x_stride": hidden, "hidden_size": hidden},
            constexprs={"BLOCK": block, "RESULT": form},
            num_warps=norm_warps(block),
            num_stages=1,
            grid=("num_rows", "1", "1"),
        ),
        KernelVariant(
            name=f"add_rms_norm{suffix}",
            kernel=add_rms_norm_kernel,
            signature=sums | {"eps": "fp32", "hidden_size": hidden},
            constexprs={"BLOCK": block, "RESULT": form},
            num_warps=norm_warps(block),
            num_stages=1,
            grid=("num_rows", "1", "1"),
        ),
        KernelVariant(
            name=f"{'gelu' if is_gelu else 'silu'}_mul{suffix}",
            kernel=gated_mul_kernel,
            signature={"gate_up": tensor, "gated": values, **codes, "ffn_size": ffn},
            constexprs={"BLOCK": gated_block, "RESULT": form, "IS_GELU": is_gelu},
            num_warps=4,
            num_stages=1,
            grid=("num_rows", f"(ffn_size + {gated_block - 1}) / {gated_block}", "1"),
        ),
    )


def quantize_variant(dtype: torch.dtype) -> KernelVariant:
    """The grid uses num_elements."""
    signature = {
        "x": pointer(dtype),
        "scale": pointer(torch.float32),
        "codes": pointer(torch.float8_e4m3fn),
        "num_elements": "i32:16",  # an FP8 GEMM has columns in multiples of 16
    }
    return KernelVariant(
        name="quantize_fp8",
        kernel=quantize_fp8_kernel,
        signature=signature,
        constexprs={"BLOCK": FP8_BLOCK},
        num_warps=4,
        num_stages=1,
        grid=(f"(num_elements + {FP8_BLOCK - 1}) / {FP8_BLOCK}", "1", "1"),
    )


def row_copy_variants() -> tuple[KernelVariant, ...]:
    """One for each word. Grids use num_blocks."""
    return tuple(
        KernelVariant(
            name=f"copy_row_{word}",
            kernel=copy_row_kernel,
            signature={"blocks": pointer(torch.int64), "source": "i32", "destination": "i32"},
            constexprs={"WORD": word, "BLOCK": row_copies_launch.BLOCK},
            num_warps=row_copies_launch.NUM_WARPS,
            num_stages=1,
            grid=("num_blocks", "1", "1"),
        )
        for word in row_copies_launch.WORDS
    )
