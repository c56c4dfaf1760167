"""The kernels of routing, experts and packed layers with the sizes of gpt-oss, to be compiled ahead and looked at."""

from dataclasses import replace

import torch

from dflash_trt.kernels.experts import expert_down_kernel, expert_gate_up_kernel
from dflash_trt.kernels.experts_launch import (
    NUM_STAGES,
    PackedExperts,
    down_constants,
    gate_up_constants,
    product_warps,
)
from dflash_trt.kernels.int8_linear import int8_linear_kernel
from dflash_trt.kernels.int8_linear_launch import NUM_STAGES as INT8_STAGES
from dflash_trt.kernels.int8_linear_launch import Int8Matrix, int8_linear_constants, num_warps, tile_of
from dflash_trt.kernels.launch_rules import FP8, FP8_BLOCK, INT4, INT8, MXFP4, NVFP4, PLAIN
from dflash_trt.kernels.packed_linear import packed_linear_kernel
from dflash_trt.kernels.packed_linear_launch import NUM_STAGES as LINEAR_STAGES
from dflash_trt.kernels.packed_linear_launch import NUM_WARPS as LINEAR_WARPS
from dflash_trt.kernels.packed_linear_launch import packed_linear_constants, tile_tokens
from dflash_trt.kernels.packed_matrix import PackedMatrix
from dflash_trt.kernels.routing import routing_kernel
from dflash_trt.kernels.routing_launch import Router, routing_constants, routing_warps
from plugins.aot.experts_variants import ExpertsKernels, MatrixKernels
from plugins.aot.variant import KernelVariant, pointer

HIDDEN = FFN = 2880
FORMS = {"plain": PLAIN, "fp8": FP8, "fp8_block": FP8_BLOCK, "mxfp4": MXFP4, "nvfp4": NVFP4, "int4": INT4}
F, FLOATS, INTS, BYTES = (pointer(dtype) for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.int8))
E4M3, INTEGERS = pointer(torch.float8_e4m3fn), pointer(torch.int8)
BYTES = BYTES.replace("i8", "u8")


def matrix(form: str, out_size: int, in_size: int, *, has_input_scale: bool) -> PackedMatrix:
    """Shapes alone. With "+" after a 4- or 8-bit form, see `experts_variants`."""
    packed = form in ("mxfp4", "nvfp4", "int4")
    dtype = torch.bfloat16 if form == "plain" else torch.uint8
    codes = torch.empty((2, out_size, in_size // (2 if packed else 1)), device="meta", dtype=dtype)
    scale = torch.empty((2, 1), device="meta")
    has_row_scale = form in ("fp8", "nvfp4")
    return PackedMatrix(
        form=FORMS[form],
        codes=codes,
        row_scale=scale if has_row_scale else None,
        input_scale=scale if has_input_scale else None,
        bias=scale,
    )


def types(form: str, *, has_input_scale: bool) -> dict[str, str]:
    codes = F if form == "plain" else E4M3 if has_input_scale and form == "fp8" else BYTES
    block_scale = {"fp8_block": FLOATS, "int4": F}.get(form, codes)
    if form == "nvfp4" and has_input_scale:
        block_scale = E4M3
    return {"codes": codes, "block_scale": block_scale, "block_rows": INTS, "row_scale": FLOATS, "bias": F}


def experts_variants(form: str, *, tokens: int, has_input_scale: bool = False) -> tuple[KernelVariant, ...]:
    """`has_input_scale`: the activations are quantized, too."""
    weights = types(form, has_input_scale=has_input_scale)
    gate_up = matrix(form, 2 * FFN, HIDDEN, has_input_scale=has_input_scale)
    down = matrix(form, HIDDEN, FFN, has_input_scale=has_input_scale)
    experts = PackedExperts(gate_up=gate_up, down=down, activation="clamped_swiglu", limit=7.0, alpha=1.702)
    hidden = F if not has_input_scale else E4M3 if form == "fp8" else BYTES
    sorted_rows = {"order": INTS, "tiles": INTS}
    name = f"{form}{'_quantized' if has_input_scale else ''}_t{tokens}"
    options = {"num_warps": product_warps(tokens), "num_stages": NUM_STAGES, "grid": ("num_tiles", "45", "1")}
    return (
        KernelVariant(
            name=f"gate_up_{name}",
            kernel=expert_gate_up_kernel,
            signature={
                "x": F,
                **weights,
                "input_scale": FLOATS,
                **sorted_rows,
                "weights": FLOATS,
                "hidden": hidden,
                "hidden_block_scale": E4M3 if has_input_scale else F,
                "hidden_scale": FLOATS,
                **dict.fromkeys(("num_tiles", "num_block_rows"), "i32"),
                **dict.fromkeys(("limit", "alpha"), "fp32"),
            },
            constexprs={"num_chosen": 4, **gate_up_constants(experts, tokens=tokens)},
            **options,
        ),
        KernelVariant(
            name=f"down_{name}",
            kernel=expert_down_kernel,
            signature={
                "hidden": hidden,
                "hidden_block_scale": E4M3 if has_input_scale else F,
                **weights,
                **sorted_rows,
                "weights": FLOATS,
                "results": F,
                **dict.fromkeys(("num_tiles", "num_block_rows"), "i32"),
            },
            constexprs=down_constants(experts, tokens=tokens),
            **options,
        ),
    )


def int8_experts_variants(tokens: int) -> list[KernelVariant]:
    """Both products, with tiles of so many tokens."""
    weight = MatrixKernels(form=INT8, has_row_scale=True, has_bias=True)
    experts = ExpertsKernels(
        num_experts=32,
        num_here=32,
        num_chosen=4,
        hidden_size=HIDDEN,
        ffn_size=FFN,
        routing="top_k_softmax",
        normalizes=False,
        activation="clamped_swiglu",
        gate_up=weight,
        down=weight,
        max_rows=4096,
    )
    return [item for item in experts.variants("bfloat16") if "_int8_" in item.name and item.name.endswith(f"t{tokens}")]


def linear_variant(form: str, *, num_rows: int, has_input_scale: bool = False) -> KernelVariant:
    weights = types(form, has_input_scale=has_input_scale)
    weight = matrix(form, 4096, 4096, has_input_scale=has_input_scale)
    constants = packed_linear_constants(weight, tokens=tile_tokens(num_rows))
    x = F if not has_input_scale else E4M3 if form == "fp8" else BYTES
    return KernelVariant(
        name=f"linear_{form}{'_quantized' if has_input_scale else ''}_t{constants['TOKENS']}",
        kernel=packed_linear_kernel,
        signature={
            "x": x,
            "x_block_scale": E4M3 if has_input_scale else x,
            **weights,
            "out": F,
            "num_rows": "i32",
            "num_block_rows": "i32",
        },
        constexprs=constants,
        num_warps=LINEAR_WARPS,
        num_stages=LINEAR_STAGES,
        grid=("1", "64", "1"),
    )


def int8_variant(num_rows: int) -> KernelVariant:
    scale = torch.empty(4096, device="meta")
    weight = Int8Matrix(
        codes=torch.empty((4096, 4096), dtype=torch.int8, device="meta"), weight_scale=scale, bias=scale
    )
    tokens, features = tile = tile_of(num_rows)
    return KernelVariant(
        name=f"int8_linear_t{tokens}",
        kernel=int8_linear_kernel,
        signature={
            "x": INTEGERS,
            "x_scale": FLOATS,
            "codes": INTEGERS,
            "weight_scale": FLOATS,
            "bias": F,
            "out": F,
            "num_rows": "i32",
        },
        constexprs=int8_linear_constants(weight, tile=tile),
        num_warps=num_warps(features),
        num_stages=INT8_STAGES,
        grid=("1", "1", "1"),
    )


def routing_variant(num_experts: int, num_chosen: int, *, groups: tuple[int, int] | None = None) -> KernelVariant:
    """With `groups`, how many there are and how many are chosen: sigmoids and a bias, as in DeepSeek-V3."""
    router = Router(kind="softmax_top_k", num_chosen=num_chosen, normalizes=True)
    if groups is not None:
        bias = torch.empty(num_experts, device="meta")
        sigmoids = Router(kind="sigmoid_top_k", num_chosen=num_chosen, normalizes=True, choice_bias=bias)
        router = replace(sigmoids, num_groups=groups[0], num_chosen_groups=groups[1])
    integers = ("order", "tiles", "ranks", "counts", "ticket")
    return KernelVariant(
        name=f"routing_e{num_experts}_k{num_chosen}",
        kernel=routing_kernel,
        signature={
            "logits": F,
            "choice_bias": INTS if groups is None else FLOATS,
            "expert_ids": INTS,
            "weights": FLOATS,
            **dict.fromkeys(integers, INTS),
            **dict.fromkeys(("num_rows", "num_tiles", "first_expert", "num_here"), "i32"),
            "factor": "fp32",
        },
        constexprs=routing_constants(router, num_experts=num_experts, tokens=16),
        num_warps=routing_warps(router),
        num_stages=1,
        grid=("num_rows", "1", "1"),
    )
