"""Kernels with the sizes of `--deterministic`, and attention's codes, to be compiled ahead and looked at."""

from dataclasses import replace

import torch

from dflash_trt.kernels.attention_launch import REDUCTION_ROWS, REDUCTION_STAGES, attention_constants
from dflash_trt.kernels.attention_plan import fixed_tile, has_full_loop
from dflash_trt.kernels.attention_reduction import attention_codes_kernel
from dflash_trt.kernels.packed_linear_launch import FIXED_TOKENS
from plugins.aot.attention_variants import attention_variants
from plugins.aot.variant import KernelVariant, pointer
from tests.kernels.packed_variants import linear_variant

SIZES = {"dtype": torch.bfloat16, "head_dim": 128, "has_block": False, "page_size": 32}


def fixed_variants() -> list[KernelVariant]:
    """Linears without a format and with FP8 activations; attention over pages of both types."""
    linears = [linear_variant("plain", num_rows=FIXED_TOKENS)]
    linears += [linear_variant("fp8", num_rows=FIXED_TOKENS, has_input_scale=True)]
    tile = fixed_tile(heads_per_kv=4)
    has_loop = {"HAS_FULL_LOOP": has_full_loop(tile=tile, is_split_fixed=True)}
    attention = [
        attention_variants(**SIZES, page_dtype=page_dtype, tiles=(tile,))[0]
        for page_dtype in (torch.bfloat16, torch.float8_e4m3fn)
    ]
    return [*linears, *(replace(variant, constexprs=variant.constexprs | has_loop) for variant in attention)]


def codes_variant() -> KernelVariant:
    floats = dict.fromkeys(("partials", "partial_stats", "sinks", "scale"), pointer(torch.float32))
    sizes = dict.fromkeys(("kv_heads", "heads_per_kv", "heads_reciprocal", "has_sinks"), "i32")
    types = {
        "attended": pointer(torch.bfloat16),
        "plan": pointer(torch.int32),
        "codes": pointer(torch.float8_e4m3fn),
        **floats,
        **sizes,
    }
    return KernelVariant(
        name="attention_codes_d128_t64",
        kernel=attention_codes_kernel,
        signature={name: types[name] for name in attention_codes_kernel.arg_names if name in types},
        constexprs=attention_constants(head_dim=128) | {"TILE": 64, "ROWS": REDUCTION_ROWS, "STAGES": REDUCTION_STAGES},
        grid=("kv_heads", "tiles", str(64 // REDUCTION_ROWS)),
        num_warps=4,
        num_stages=1,
    )
