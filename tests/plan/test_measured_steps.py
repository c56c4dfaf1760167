"""Planned steps against those of this engine that were measured on an H200: docs/benchmarks.md, "On an H200"."""

import statistics
from functools import cache
from pathlib import Path

import pytest

from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.core.config import BuildConfig
from dflash_trt.plan.computed_rows import ComputedRows
from dflash_trt.plan.gpus import gpu_of
from dflash_trt.plan.kernel_fits import FittedKernels
from dflash_trt.plan.kernel_tables import kernel_tables
from dflash_trt.plan.planning import plan_engine
from dflash_trt.plan.step_costs import StepClock, assumed_costs, clock_of
from dflash_trt.plan.step_work import EngineWork
from scripts.published_shapes import write_config

H200 = gpu_of("h200")
FP8 = ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", "fp8")
PLAIN = (*FP8[:2], None)
HYBRID = ("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", None)
MEASURED = [  # pair and format, requests, K, milliseconds of the device over 1,024 tokens of context
    *((FP8, 1, k, ms) for k, ms in ((0, 3.5), (3, 4.3), (7, 4.3), (15, 4.5))),
    *((FP8, 16, k, ms) for k, ms in ((0, 4.3), (3, 5.2), (7, 5.7), (15, 7.4))),
    *((FP8, 64, k, ms) for k, ms in ((0, 6.4), (3, 9.3), (7, 13.6), (15, 22.8))),
    *((PLAIN, requests, 7, ms) for requests, ms in ((1, 6.4), (16, 7.9), (64, 18.7))),
    *((HYBRID, requests, 7, ms) for requests, ms in ((1, 17.3), (16, 24.7))),
]


@cache
def works(root: Path, target: str, drafter: str, quantization: str | None) -> EngineWork:
    paths = [write_config(root, name) for name in (target, drafter)]
    config = BuildConfig(
        target=str(paths[0]), drafter=str(paths[1]), quantization=quantization, max_batch_size=64, max_seq_len=4096
    )
    return EngineWork(plan_engine(config, read_pair(*paths), H200).pretrained_config, has_drafter=True)


def ratios(root: Path, clock: StepClock) -> list[float]:
    found = []
    for pair, num_requests, num_drafts, milliseconds in MEASURED:
        rows = ComputedRows.decode(num_requests=num_requests, context_len=1024, num_draft_tokens=num_drafts)
        found.append(1e3 * clock.time(works(root, *pair).of(rows)).device_s / milliseconds)
    return found


def test_steps_by_measured_kernels_are_within_8_percent(tmp_path: Path) -> None:
    pytest.importorskip("aiconfigurator_core", reason="the extra `silicon`")
    assert kernel_tables("h200") is not None
    found = ratios(tmp_path, clock_of(H200, None))
    assert all(1 / 1.08 < ratio < 1.08 for ratio in found), found
    assert 0.97 < statistics.median(found) < 1.03


def test_steps_by_fitted_kernels_are_within_25_percent(tmp_path: Path) -> None:
    found = ratios(tmp_path, StepClock(H200, assumed_costs(H200), [FittedKernels(H200)]))
    assert all(1 / 1.25 < ratio < 1.25 for ratio in found), found
    assert 0.95 < statistics.median(found) < 1.05
