"""Variants of the kernels of linear layers and norms to compile ahead of time, with fixed tiles or of integers.

Sizes of layers are compiled in, so that a library has those of the engines that it is made for alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from dflash_trt.backends.cuda.packed import form_of
from dflash_trt.backends.torch.loading import bind_tensors
from dflash_trt.core.dtype import FloatDType, stored_dtype, torch_dtype
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.weight_spec import rank_shard
from dflash_trt.engine_dir import PretrainedConfig, tensor_headers
from dflash_trt.formats.base import QuantizedWeight, is_of_experts
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.formats.registry import split_quantized
from dflash_trt.kernels import int8_linear_launch, launch_rules
from dflash_trt.kernels.int8_linear import int8_linear_kernel
from dflash_trt.kernels.int8_linear_launch import TILES, Int8Matrix, int8_linear_constants, num_warps
from dflash_trt.kernels.launching import next_power_of_2
from dflash_trt.kernels.norm import rms_norm_kernel
from dflash_trt.kernels.norm_launch import norm_warps
from dflash_trt.kernels.packed_linear import packed_linear_kernel
from dflash_trt.kernels.packed_linear_launch import (
    NUM_STAGES,
    NUM_WARPS,
    WIDENING_STAGES,
    packed_linear_constants,
    tile_tokens,
)
from dflash_trt.kernels.row_codes import AS_THEY_ARE, FP8, NVFP4, quantize_rows_kernel
from dflash_trt.kernels.row_codes_launch import BLOCK
from dflash_trt.network.ops import Linear
from dflash_trt.network.rank_tensors import map_linears
from dflash_trt.network.step import Network
from plugins.aot.experts_variants import BYTES, E4M3, FLOATS, INT8_CODES, MatrixKernels, token_codes
from plugins.aot.variant import KernelVariant, pointer

_MIN_NORM_BLOCK: Final = 64


@dataclass(frozen=True, kw_only=True, order=True)
class LinearKernels:
    """The linear layers of one size and form, with fixed tiles."""

    out_size: int
    in_size: int
    weight: MatrixKernels

    def variants(self, dtype_name: FloatDType) -> Iterator[KernelVariant]:
        dtype = torch_dtype(dtype_name)
        x, x_block_scale = pointer(dtype), pointer(dtype)
        if self.weight.num_input_scales:
            is_fp8 = self.weight.form == launch_rules.FP8
            yield _quantize_rows(dtype, FP8 if is_fp8 else NVFP4)
            x, x_block_scale = E4M3 if is_fp8 else BYTES, E4M3
        matrix = self.weight.matrix(self.out_size, self.in_size)
        if self.weight.form == launch_rules.PLAIN:
            matrix = replace(matrix, codes=matrix.codes.to(dtype))
        widens_weights = dtype == torch.float32 and self.weight.form != launch_rules.PLAIN
        tokens = tile_tokens(0, is_fixed=True, widens_weights=widens_weights)
        constants = packed_linear_constants(matrix, tokens=tokens)
        size = f"{self.in_size}x{self.out_size}"
        yield KernelVariant(
            name=f"linear_{dtype_name}_{self.weight.name}_{size}_t{tokens}",
            kernel=packed_linear_kernel,
            signature={
                "x": x,
                "x_block_scale": x_block_scale,
                **self.weight.types(dtype),
                "out": pointer(dtype),
                **dict.fromkeys(("num_rows", "num_block_rows"), "i32"),
            },
            constexprs=constants,
            num_warps=NUM_WARPS,
            num_stages=WIDENING_STAGES if widens_weights else NUM_STAGES,
            grid=(f"(num_rows + {tokens - 1}) / {tokens}", str(-(-self.out_size // int(constants["OUT"]))), "1"),
        )


@dataclass(frozen=True, kw_only=True)
class Int8LinearKernels:
    """The linear layers of integers of one size, in every tile that a step takes."""

    out_size: int
    in_size: int
    has_bias: bool

    def variants(self, dtype_name: FloatDType) -> Iterator[KernelVariant]:
        dtype = torch_dtype(dtype_name)
        yield token_codes(dtype)
        scale = torch.empty(self.out_size, device="meta")
        codes = torch.empty((self.out_size, self.in_size), dtype=torch.int8, device="meta")
        matrix = Int8Matrix(codes=codes, weight_scale=scale, bias=scale if self.has_bias else None)
        for tokens, features in TILES.items():
            size = f"{self.in_size}x{self.out_size}"
            yield KernelVariant(
                name=f"int8_linear_{dtype_name}{'_bias' if self.has_bias else ''}_{size}_t{tokens}",
                kernel=int8_linear_kernel,
                signature={
                    "x": INT8_CODES,
                    "x_scale": FLOATS,
                    "codes": INT8_CODES,
                    "weight_scale": FLOATS,
                    **dict.fromkeys(("bias", "out"), pointer(dtype)),
                    "num_rows": "i32",
                },
                constexprs=int8_linear_constants(matrix, tile=(tokens, features)),
                num_warps=num_warps(features),
                num_stages=int8_linear_launch.NUM_STAGES,
                has_fp_fusion=False,
                grid=(f"(num_rows + {tokens - 1}) / {tokens}", str(-(-self.out_size // features)), "1"),
            )


def linears_of(config: PretrainedConfig, *, is_deterministic: bool) -> Iterator[LinearKernels | Int8LinearKernels]:
    """Layers of integers, and of a deterministic engine all others of the target.

    Biases of results that are summed over ranks are rank 0's alone.
    """
    for rank in {0, config.mapping.world_size - 1}:
        of_rank = config.model_copy(update={"mapping": config.mapping.of_rank(rank)})
        network = _bound(of_rank)
        for weights in (network.target_weights, network.drafter):
            for linear in _linears(weights):
                if isinstance(linear.weight, Int8Weight):
                    out_size, in_size = linear.weight.codes.shape
                    has_bias = linear.bias is not None
                    yield Int8LinearKernels(out_size=out_size, in_size=in_size, has_bias=has_bias)
                elif is_deterministic and weights is network.target_weights:
                    yield from _kernels_of(linear)


def _linears(weights: object) -> list[Linear[torch.Tensor]]:
    found: list[Linear[torch.Tensor]] = []

    def find(linear: Linear[torch.Tensor]) -> Linear[torch.Tensor]:
        weight = linear.weight
        is_experts = is_of_experts(weight) if isinstance(weight, QuantizedWeight) else weight.dim() == 3
        if not is_experts:
            found.append(linear)
        return linear

    map_linears(weights, find)
    return found


def max_norm_columns(target: TargetSpec) -> int:
    """Of hidden states, of all heads of a layer, or of latents."""
    latents = (size for mla in target.latents for size in (mla.latent_dim, mla.q_rank or 0))
    return max([target.hidden_size, *(gqa.q_size for gqa in target.attentions), *latents])


def norm_variants(dtype: torch.dtype, *, max_columns: int) -> Iterator[KernelVariant]:
    """For rows of up to `max_columns`. Grids use num_rows."""
    block = _MIN_NORM_BLOCK
    while block <= max(_MIN_NORM_BLOCK, next_power_of_2(max_columns)):
        yield KernelVariant(
            name=f"rms_norm_{str(dtype).removeprefix('torch.')}_b{block}",
            kernel=rms_norm_kernel,
            signature={
                "x": pointer(dtype),
                "weight": FLOATS,
                **dict.fromkeys(("normed", "block_scale"), pointer(dtype)),
                "scale": FLOATS,
                "eps": "fp32",
                **dict.fromkeys(("x_stride", "hidden_size"), "i32"),
            },
            constexprs={"BLOCK": block, "RESULT": AS_THEY_ARE},
            num_warps=norm_warps(block),
            num_stages=1,
            grid=("num_rows", "1", "1"),
        )
        block *= 2


def _bound(config: PretrainedConfig) -> Network[torch.Tensor]:
    """One rank's network over tensors without memory."""
    headers = tensor_headers(config)
    table = {
        name: rank_shard(weight, config.mapping)
        for name, weight in engine_weights(config.target, config.draft, config.quantization).items()
    }
    tensors = {
        name: torch.empty(header.shape, dtype=torch_dtype(stored_dtype(header.dtype) or ""), device="meta")
        for name, header in headers.items()
    }
    plain, quantized = split_quantized(tensors, table, config.quantization.linears if config.quantization else {})
    return bind_tensors(config.target, config.draft, plain, quantized, mapping=config.mapping)


def _kernels_of(linear: Linear[torch.Tensor]) -> Iterator[LinearKernels]:
    """One, or one for each run of segments whose inputs may share a scale."""
    weight, has_bias = linear.weight, linear.bias is not None
    if not isinstance(weight, QuantizedWeight):
        out_size, in_size = weight.shape
        matrix = MatrixKernels(form=launch_rules.PLAIN, has_bias=has_bias)
        yield LinearKernels(out_size=out_size, in_size=in_size, weight=matrix)
        return
    form = form_of(type(weight))
    codes = weight.tensors()["codes"]
    in_size = codes.shape[1] * (2 if form >= launch_rules.MXFP4 else 1)
    has_input_scale = weight.input_scale is not None
    matrix = MatrixKernels(
        form=form,
        has_row_scale=weight.weight_scale is not None or has_input_scale,
        num_input_scales=int(has_input_scale),
        has_bias=has_bias,
    )
    sizes = weight.segments
    runs = [sizes[i:j] for i in range(len(sizes)) for j in range(i + 1, len(sizes) + 1)] if has_input_scale else [sizes]
    for run in runs:
        yield LinearKernels(out_size=sum(run), in_size=in_size, weight=matrix)


def _quantize_rows(dtype: torch.dtype, form: int) -> KernelVariant:
    return KernelVariant(
        name=f"quantize_rows_{str(dtype).removeprefix('torch.')}_{'fp8' if form == FP8 else 'nvfp4'}",
        kernel=quantize_rows_kernel,
        signature={
            "x": pointer(dtype),
            "result": E4M3 if form == FP8 else BYTES,
            "block_scale": E4M3,
            "scale": FLOATS,
            "num_columns": "i32",
        },
        constexprs={"BLOCK": BLOCK, "RESULT": form},
        num_warps=4,
        num_stages=1,
        grid=("num_rows", f"(num_columns + {BLOCK - 1}) / {BLOCK}", "1"),
    )
