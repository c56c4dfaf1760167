"""Choices that only a GPU can settle, each against what is there: attention's tiles and splits, and the linears."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dflash_trt.backends.cuda.linear import Plain, apply_device_linear, prepare_device_linear
from dflash_trt.formats.base import segment_amax
from dflash_trt.formats.registry import weight_format
from dflash_trt.kernels import attention_launch
from dflash_trt.kernels.row_codes_launch import quantize_fp8
from dflash_trt.network.ops import Linear
from gpu_visit_parts.kernel_case import Call, Kernel
from gpu_visit_parts.kernels import decode_attention
from gpu_visit_parts.results import Row, Tables
from gpu_visit_parts.setting import SETTING, Case
from gpu_visit_parts.timing import device_us, machine_roofs, num_copies

_Patches = Mapping[str, Callable[..., Any]]  # functions of attention_launch, by name


def cases() -> Iterator[Case]:
    for size in _linear_sizes():
        for num_rows in (16,) if SETTING.is_dry_run else (1, 8, 16, 64, 128, 512):
            for name, make in _LINEARS.items():
                run = partial(_linear, name, make, num_rows, size)
                yield Case(name=f"linear {size[0]} x {size[1]}, {num_rows} rows: {name}", run=run)
    shapes = (
        [(2, 3, 9)] if SETTING.is_dry_run else [(1, 8, 1024), (1, 8, 8192), (16, 8, 8192), (64, 8, 1024), (16, 1, 8192)]
    )
    for has_fp8_pages in (False, True):
        for shape in shapes:
            kernel = decode_attention(*shape, has_fp8_pages=has_fp8_pages)
            for name, patches in _attention_choices().items():
                yield Case(name=f"{kernel.shape}: {name}", run=partial(_attention, kernel, name, patches))


def _attention_choices() -> dict[str, _Patches]:
    """Programs per multiprocessor decide the splits; a floor of the tile, its keys, warps and stages the loop."""
    launch = attention_launch
    options, tile = launch.attention_options, launch.tile_rows

    def of_slots(programs: int) -> _Patches:
        return {
            "work_slots": lambda *, kv_heads, num_multiprocessors: max(1, programs * num_multiprocessors // kv_heads)
        }

    choices: dict[str, _Patches] = {"as it is": {}}
    choices |= {f"{n} programs per multiprocessor": of_slots(n) for n in (1, 3, 4)}
    choices |= {f"key block {n}": {"key_block": lambda *, n=n, **_: n} for n in (32, 128)}
    choices |= {f"{n} warps": {"attention_options": _with(options, num_warps=n)} for n in (2, 8)}
    choices |= {f"{n} stages": {"attention_options": _with(options, num_stages=n)} for n in (2, 4)}
    choices |= {f"tile floor {n}": {"tile_rows": lambda *words, n=n: max(n, tile(*words))} for n in (64, 128)}
    return choices


def _with(function: Callable[..., dict[str, Any]], **changed: int) -> Callable[..., dict[str, Any]]:
    return lambda **words: function(**words) | changed


def _attention(kernel: Kernel, name: str, patches: _Patches) -> Tables:
    """Its time, and its largest difference from the output of what is there, over the same data."""
    torch.manual_seed(0)
    expected = kernel.make()()
    with ExitStack() as stack:
        for function, other in patches.items():
            stack.enter_context(patch.object(attention_launch, function, other))
        torch.manual_seed(0)
        found = kernel.make()()
        assert isinstance(found, Tensor) and isinstance(expected, Tensor)
        difference = float((found.float() - expected.float()).abs().max())
        took_us = device_us([kernel.make() for _ in range(num_copies(kernel.num_bytes))])
    floor_us = machine_roofs().floor_us(num_bytes=kernel.num_bytes, flops=kernel.flops)
    row: Row = {"shape": kernel.shape, "choice": name, "time_us": took_us, "floor_fraction": floor_us / took_us}
    return {"attention": [row | {"max_difference": difference}]}


def _linear_sizes() -> list[tuple[int, int]]:  # out, in: gate and up, down
    return [(2 * SETTING.ffn, SETTING.hidden), (SETTING.hidden, SETTING.ffn)]


def _plain(x: Tensor, weight: Tensor) -> Call:
    return lambda: F.linear(x, weight)


def _fp8(x: Tensor, weight: Tensor, *, use_fast_accum: bool) -> Call:
    codes, one = weight.to(torch.float8_e4m3fn), torch.ones(1, device=SETTING.device)

    def call() -> Tensor:
        x_codes = quantize_fp8(x, one)
        return torch._scaled_mm(
            x_codes, codes.t(), scale_a=one, scale_b=one, out_dtype=SETTING.dtype, use_fast_accum=use_fast_accum
        )

    return call


def _w4a16(x: Tensor, weight: Tensor) -> Call:
    segments = (len(weight),)
    quantized = weight_format("nvfp4_w4a16").quantize(
        weight.float(), segments=segments, weight_amax=segment_amax(weight.float(), segments), input_amax=None
    )
    linear = prepare_device_linear(Linear(weight=quantized), x.dtype)
    return lambda: apply_device_linear(Plain(x), linear)


_LINEARS: dict[str, Callable[[Tensor, Tensor], Call]] = {
    "unquantized": _plain,
    "fp8": partial(_fp8, use_fast_accum=False),
    "fp8, fast accumulation": partial(_fp8, use_fast_accum=True),
    "nvfp4_w4a16": _w4a16,
}


def _linear(name: str, make: Callable[[Tensor, Tensor], Call], num_rows: int, size: tuple[int, int]) -> Tables:
    def call() -> Call:
        x, weight = (torch.randn(n, size[1], dtype=SETTING.dtype, device=SETTING.device) for n in (num_rows, size[0]))
        return make(x, weight)

    took_us = device_us([call() for _ in range(num_copies(2.0 * size[0] * size[1]))])
    return {"linears": [{"out": size[0], "in": size[1], "rows": num_rows, "format": name, "time_us": took_us}]}
