"""Products of the CPU kernels against oneDNN's and MKL's, for layers of two models: billions of products per second.

    OMP_NUM_THREADS=1 taskset -c 1 python -m scripts.bench_products

Sides take turns; the best CPU time of all rounds. Activations of integers are quantized by our kernel in its time,
and before it for oneDNN, whose bfloat16 needs AVX-512: without, its column is missing.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.native.four_bits import four_bit_linear, stored_linear
from dflash_trt.backends.torch.native.library import CpuKernels, cpu_kernels
from dflash_trt.backends.torch.native.linear import integer_linear, panel_linear
from dflash_trt.formats.int4 import Int4
from dflash_trt.formats.int8 import Int8, Int8Weight, token_codes
from dflash_trt.network.ops import Linear

SHAPES = ((2048, 384), (384, 1024), (6144, 1024), (1024, 3072))  # outputs, inputs: the demo's and Qwen3-0.6B's
ROWS = (1, 8, 64, 240, 512)


def sides_of(kernels: CpuKernels, weight: Tensor, x: Tensor) -> dict[str, Callable[[], Any]]:
    narrow = weight.bfloat16()
    codes = Int8().quantize_matrix(weight, segments=(len(weight),), weight_amax=weight, input_amax=None)
    assert isinstance(codes, Int8Weight)
    four_bits = Linear(
        weight=Int4().quantize_matrix(weight, segments=(len(weight),), weight_amax=weight, input_amax=None)
    )
    int4_float32, int4 = (four_bit_linear(four_bits, kernels, rounds_inputs=rounds) for rounds in (False, True))
    stored = stored_linear(four_bits, kernels, rounds_inputs=True)
    float32 = panel_linear(Linear(weight=narrow.float()), kernels)
    bfloat16 = panel_linear(Linear(weight=narrow.float()), kernels, rounds_inputs=True)
    int8 = integer_linear(Linear(weight=codes), kernels)
    assert float32 is not None and bfloat16 is not None and int8 is not None
    assert int4_float32 is not None and int4 is not None and stored is not None
    reorder, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    wide, given, x_codes = reorder(weight), x.bfloat16(), token_codes(x)[0]
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    half = reorder(narrow) if has_bfloat16 else None
    sides = {
        "float32": lambda: float32(x),
        "oneDNN float32": lambda: linear(x, wide, None, "none", [], ""),
        "MKL float32": lambda: F.linear(x, weight),
        "bfloat16": lambda: bfloat16(x),
        "oneDNN bfloat16": lambda: linear(given, half, None, "none", [], ""),
        "int8": lambda: int8(x),
        "oneDNN int8": lambda: torch._int_mm(x_codes, codes.codes.t()),
        "int4, float32": lambda: int4_float32(x),
        "int4": lambda: int4(x),
        "int4 as stored": lambda: stored(x),
    }
    return {name: run for name, run in sides.items() if has_bfloat16 or name != "oneDNN bfloat16"}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    num_rounds = parser.parse_args().rounds
    kernels = cpu_kernels()
    assert isinstance(kernels, CpuKernels), kernels
    torch.manual_seed(0)
    for index, (num_out, num_in) in enumerate(SHAPES):
        for num_rows in ROWS:
            sides = sides_of(kernels, torch.randn(num_out, num_in), torch.randn(num_rows, num_in))
            best = dict.fromkeys(sides, float("inf"))
            for _ in range(num_rounds):
                for name, run in sides.items():
                    began = time.process_time()
                    run()
                    best[name] = min(best[name], time.process_time() - began)
            if not index and num_rows == ROWS[0]:
                print(f"| outputs x inputs | rows | {' | '.join(sides)} |\n|---|---:|{'---:|' * len(sides)}")
            rates = (num_rows * num_out * num_in / taken / 1e9 for taken in best.values())
            print(f"| {num_out} x {num_in} | {num_rows} | {' | '.join(f'{rate:.0f}' for rate in rates)} |")


if __name__ == "__main__":
    main()
