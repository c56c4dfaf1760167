#!/usr/bin/env python3
"""Fit the kernel costs of a plan without the extra `silicon` to NVIDIA's measured tables.

    python -m scripts.kernel_fits [--check]

Writes dflash_trt/plan/kernel_fits.json: for each GPU and kind of kernel, seconds a call and the fractions of bandwidth
and peak in `latency + max(bytes / (bandwidth x memory), FLOPs / (peak x compute))`, by least squares of the logarithms
of time, over sizes of published models; and how far the fit is from the tables. --check compares instead of writing.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

import dflash_trt.plan.kernel_fits
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.model.rope import RopeSpec
from dflash_trt.plan.attention_work import MixingWork
from dflash_trt.plan.exchanges import Exchange
from dflash_trt.plan.gpus import GPUS, Gpu
from dflash_trt.plan.kernel_fits import KernelFit, KernelTime
from dflash_trt.plan.kernel_tables import KernelTables
from dflash_trt.plan.step_work import Experts, Product, chosen_fraction

_FEATURES = (1024, 2048, 4096, 6144, 12288, 24576)
_ROWS = (1, 8, 16, 64, 128, 512, 2048, 8192)
_BYTES = {None: 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625, "mxfp4": 0.53125, "int4": 0.5625}
# hidden size, intermediate size, experts, experts of a token: gpt-oss-120b, Qwen3-30B-A3B, Qwen3-235B-A22B, Kimi-K2
_EXPERTS = ((2880, 2880, 128, 4), (2048, 768, 128, 8), (4096, 1536, 128, 8), (7168, 2048, 384, 8))
_HEADS = ((32, 8, 128), (64, 8, 64), (16, 4, 128), (8, 1, 128))

Sample = tuple[float, float, float, float]  # calls, bytes, FLOPs, measured seconds


def products(tables: KernelTables, name: str | None) -> Iterator[Sample]:
    for n, k, rows in itertools.product(_FEATURES, _FEATURES, _ROWS):
        item = Product(rows=rows, elements=n * k, num_bytes=n * k * _BYTES[name], format=name, shape=(n, k))
        yield from _sample(tables.product(item), 1, item.num_bytes, item.flops)


def experts(tables: KernelTables, name: str | None) -> Iterator[Sample]:
    for (hidden, ffn, number, chosen), ep_size, rows in itertools.product(_EXPERTS, (1, 4, 8), _ROWS):
        moe = Moe(num_experts=number, num_experts_per_token=chosen, intermediate_size=ffn, routing="softmax_top_k")
        sizes = Experts(hidden_size=hidden, moe=moe, moe_tp_size=1, ep_size=ep_size, num_tokens=rows)
        elements = chosen_fraction(moe, rows) * 3 * hidden * ffn * number / ep_size
        each = rows * chosen / (number * chosen_fraction(moe, rows))
        item = Product(rows=each, elements=elements, num_bytes=elements * _BYTES[name], format=name, experts=sizes)
        yield from _sample(tables.product(item), 1, item.num_bytes, item.flops)


def attention(tables: KernelTables) -> Iterator[Sample]:
    lengths = (256, 1024, 4096, 16384)
    shapes = [(batch, 1, seen) for batch in (1, 8, 64) for seen in lengths]
    shapes += [(1, tokens, seen) for tokens in lengths for seen in (0, 4096)]
    for (heads, kv_heads, size), (batch, tokens, seen) in itertools.product(_HEADS, shapes):
        mixer = Gqa(num_heads=heads, num_kv_heads=kv_heads, head_dim=size, rope=RopeSpec(theta=1e4))
        num_bytes = batch * (seen + tokens) * 4 * kv_heads * size
        flops = 4 * heads * size * batch * (tokens * seen + tokens * (tokens + 1) / 2)
        item = MixingWork(
            mixer=mixer,
            times=1,
            num_bytes=num_bytes,
            flops=flops,
            num_tokens=np.full(batch, tokens),
            num_seen=np.full(batch, seen),
            block_size=1,
            kv_itemsize=2,
        )
        yield from _sample(tables.mixing(item), 1, num_bytes, flops)


def exchanges(tables: KernelTables) -> Iterator[Sample]:
    for ranks, rows, features in itertools.product((2, 4, 8), (1, 16, 128, 1024, 4096), (4096, 7168)):
        num_bytes = 2 * rows * features * 2 * (ranks - 1) / ranks
        item = Exchange(kind="all_reduce", count=1, rows=rows, features=features, num_bytes=num_bytes)
        yield from _sample(tables.exchange(item, ranks), 1, num_bytes, 0.0)


def _sample(measured: KernelTime | None, calls: float, num_bytes: float, flops: float) -> Iterator[Sample]:
    if measured is not None:
        yield calls, num_bytes, flops, measured.seconds


def fit(samples: list[Sample], bandwidth: float, peak: float) -> KernelFit | None:
    if not samples:
        return None
    calls, num_bytes, flops, measured = np.array(samples).T

    def predicted(logs: np.ndarray) -> np.ndarray:
        latency_s, memory, compute = np.exp(logs)
        return calls * latency_s + np.maximum(num_bytes / (bandwidth * memory), flops / (peak * compute))

    start = np.log([5e-6, 0.7, 0.5])
    bounds = (np.log([1e-7, 0.02, 0.01]), np.log([1e-3, 1.0, 1.0]))
    found = least_squares(lambda logs: np.log(predicted(logs) / measured), start, bounds=bounds, loss="soft_l1")
    errors = np.abs(np.log(predicted(found.x) / measured))
    latency_s, memory, compute = np.exp(found.x)
    return KernelFit(
        latency_s=_rounded(latency_s),
        memory_fraction=_rounded(memory),
        peak_fraction=_rounded(compute),
        median_ratio=_rounded(math.exp(float(np.median(errors)))),
        num_points=len(samples),
    )


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def fits(gpu: Gpu) -> dict[str, KernelFit]:
    tables = KernelTables(gpu.name)
    kinds: dict[str, tuple[Callable[[], Iterator[Sample]], int]] = {"attention": (lambda: attention(tables), 16)}
    for name in (None, "fp8", "fp8_block", "nvfp4"):
        kinds[f"products {name}"] = (lambda name=name: products(tables, name), gpu.operand_bits(name))  # type: ignore[misc]
    for name in (None, "fp8_block", "nvfp4", "mxfp4", "int4"):
        kinds[f"experts {name}"] = (lambda name=name: experts(tables, name), gpu.operand_bits(name))  # type: ignore[misc]
    assert gpu.bytes_per_s is not None and gpu.link_bytes_per_s is not None
    found = {kind: fit(list(samples()), gpu.bytes_per_s, gpu.flops_of(bits)) for kind, (samples, bits) in kinds.items()}
    found["exchanges"] = fit(list(exchanges(tables)), gpu.link_bytes_per_s, 1e15)
    return {kind: item for kind, item in found.items() if item is not None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 where the stored fits differ")
    words = parser.parse_args()
    found = {gpu.name: {kind: item._asdict() for kind, item in fits(gpu).items()} for gpu in GPUS}
    path = Path(dflash_trt.plan.kernel_fits.__file__).with_suffix(".json")
    text = json.dumps(found, indent=1) + "\n"
    if words.check:
        return int(text != path.read_text())
    path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
