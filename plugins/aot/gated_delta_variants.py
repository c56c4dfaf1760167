"""Variants of the kernels of gated delta nets to be compiled, as `gated_delta_launch.py` passes them.

Sizes of a model are compiled in, so that a library has the nets of the engines that it is made for alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from dflash_trt.core.dtype import FloatDType, dtype_name, torch_dtype
from dflash_trt.core.state_spec import Recurrent
from dflash_trt.kernels import gated_delta_launch as launch
from dflash_trt.kernels.gated_delta import delta_prompt_kernel, delta_verify_kernel
from dflash_trt.kernels.gated_delta_ends import convolve_kernel, finish_kernel
from dflash_trt.kernels.gated_delta_in_order import delta_in_order_kernel
from plugins.aot.variant import KernelVariant, pointer

_FLOAT32 = ("log_rate", "dt_bias", "state", "keys", "deltas", "decays", "attended")
_INT32 = ("token_offsets", "context_lens", "num_folded", "position")
_INT64 = ("slot_ids", "state_pools")
_SCALARS = {"eps": "fp32"} | dict.fromkeys(("num_rows", "num_requests", "state_index"), "i32")

_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_size", "num_records")


@dataclass(frozen=True, kw_only=True, order=True)
class DeltaKernels:
    """The nets of one kind, of one rank, for steps of at most `max_requests` requests."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_size: int
    num_records: int
    max_requests: int
    is_in_order: bool = False

    @classmethod
    def of(cls, state: Recurrent, *, max_requests: int, is_in_order: bool = False) -> Self:
        sizes = {name: getattr(state, name) for name in _SIZES}
        return cls(**sizes, max_requests=max_requests, is_in_order=is_in_order)

    def state(self, dtype: FloatDType) -> Recurrent:
        return Recurrent(name="state", dtype=dtype, **{name: getattr(self, name) for name in _SIZES})

    def variants(self, dtype: FloatDType) -> tuple[KernelVariant, ...]:
        """Those of a plugin."""
        spec = self.state(dtype)
        return gated_delta_variants(
            spec, torch_dtype(dtype), num_requests=self.max_requests, is_pooled=True, is_in_order=self.is_in_order
        )


def gated_delta_variants(
    spec: Recurrent, dtype: torch.dtype, *, num_requests: int, is_pooled: bool, is_in_order: bool = False
) -> tuple[KernelVariant, ...]:
    """In the order of their launches. Grids use num_requests and num_rows; `is_pooled`: the state is at addresses."""
    return tuple(_variants(spec, dtype, num_requests, is_pooled, is_in_order))


def _variants(
    spec: Recurrent, dtype: torch.dtype, num_requests: int, is_pooled: bool, is_in_order: bool
) -> Iterator[KernelVariant]:
    channel_blocks = -(-spec.num_channels // launch.CHANNELS)
    head_blocks = -(-spec.num_value_heads // launch.HEADS)
    convolve = launch.convolve_constants(spec, num_requests)
    finish = launch.finish_constants(spec, num_requests, is_in_order=is_in_order)
    pooled = {"POOLED": is_pooled}
    name = _name(spec, dtype, is_pooled)
    yield _variant(
        f"convolve_{name}_r{convolve['REQUESTS']}",
        convolve_kernel,
        dtype,
        convolve | pooled,
        num_warps=launch.END_WARPS,
        grid=("num_rows", str(channel_blocks), "1"),
    )
    by_blocks = (
        (delta_verify_kernel, launch.verify_constants(spec), launch.VERIFY_WARPS),
        (delta_prompt_kernel, launch.prompt_constants(spec), launch.PROMPT_WARPS),
    )
    in_order = ((delta_in_order_kernel, launch.in_order_constants(spec), launch.IN_ORDER_WARPS),)
    for kernel, constants, num_warps in in_order if is_in_order else by_blocks:
        columns = -(-spec.value_head_dim // constants["BLOCK_V"])
        yield _variant(
            f"{kernel.__name__.removesuffix('_kernel')}_{name}",
            kernel,
            dtype,
            constants | pooled,
            num_warps=num_warps,
            num_stages=launch.NUM_STAGES,
            grid=("num_requests", str(spec.num_value_heads), str(columns)),
        )
    yield _variant(
        f"finish_{'in_order_' if is_in_order else ''}{name}_r{finish['REQUESTS']}",
        finish_kernel,
        dtype,
        finish | pooled,
        num_warps=launch.END_WARPS,
        grid=("num_rows + num_requests", str(max(head_blocks, channel_blocks)), "1"),
    )


def _variant(
    name: str,
    kernel: Any,
    dtype: torch.dtype,
    constants: Mapping[str, int | bool],
    *,
    num_warps: int,
    num_stages: int = 1,
    grid: tuple[str, str, str],
) -> KernelVariant:
    types = _SCALARS | {
        argument: pointer(element)
        for names, element in ((_FLOAT32, torch.float32), (_INT32, torch.int32), (_INT64, torch.int64))
        for argument in names
    }
    arguments = [argument for argument in kernel.arg_names if argument not in constants]
    return KernelVariant(
        name=name,
        kernel=kernel,
        signature={argument: types.get(argument, pointer(dtype)) for argument in arguments},
        constexprs=constants,
        num_warps=num_warps,
        num_stages=num_stages,
        grid=grid,
    )


def _name(spec: Recurrent, dtype: torch.dtype, is_pooled: bool) -> str:
    heads = f"h{spec.num_key_heads}x{spec.num_value_heads}_d{spec.key_head_dim}x{spec.value_head_dim}"
    parts = [dtype_name(dtype), *(["pooled"] if is_pooled else []), heads, f"c{spec.conv_size}", f"n{spec.num_records}"]
    return "_".join(parts)
