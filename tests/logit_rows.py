"""Rows of logits that give no token, and numbers at the ends of what a sampler may be asked."""

import math

import torch
from torch import Tensor

from dflash_trt.core.batch import StepSampling
from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.request import SamplingParams
from dflash_trt.core.sampling import STEP_SAMPLING_FIELDS


def rows_without_a_token(vocab_size: int) -> dict[str, Tensor]:
    """float32 [vocab_size] each; the last one has a token, but not the probability of it."""
    good = torch.randn(vocab_size, generator=torch.Generator().manual_seed(5))

    def with_value(value: float, *indices: int) -> Tensor:
        return good.index_fill(0, torch.tensor(indices), value)

    return {
        "all NaN": torch.full((vocab_size,), math.nan),
        "one NaN": with_value(math.nan, vocab_size // 2),
        "the last is NaN": with_value(math.nan, vocab_size - 1),
        "one infinity": with_value(math.inf, vocab_size // 3),
        "two infinities": with_value(math.inf, 0, vocab_size - 1),
        "infinity and NaN": with_value(math.inf, 1).index_fill(0, torch.tensor([2]), math.nan),
        "all -infinity": torch.full((vocab_size,), -math.inf),
        "NaN and -infinity": torch.full((vocab_size,), -math.inf).index_fill(0, torch.tensor([3]), math.nan),
    }


def device_sampling(params: SamplingParams, seed: int = 0) -> StepSampling:
    """As the scheduler hands it to an executor."""
    return StepSampling.of(params, seed=seed)


# What users asked for, and the largest sets of tokens that mean the same: the n most likely ones.
EXTREMES: tuple[tuple[SamplingParams, int | None], ...] = (
    (SamplingParams(temperature=1e-38), 1),
    (SamplingParams(temperature=1e-40), 1),
    (SamplingParams(temperature=2e-38), 1),
    (SamplingParams(temperature=1e-30, top_k=5, top_p=0.9), 1),
    (SamplingParams(temperature=1.0, top_p=1e-300), 1),
    (SamplingParams(temperature=10_000.0, top_p=1e-40, top_k=7), 1),
    (SamplingParams(temperature=10_000.0, top_k=1), 1),
    (SamplingParams(temperature=10_000.0, top_k=3), 3),
    (SamplingParams(temperature=1.0, min_p=1.0), 1),
    (SamplingParams(temperature=1.0, top_k=2**32), None),
    (SamplingParams(temperature=1.0, top_k=2**31 - 1, min_p=1e-300), None),
    (SamplingParams(temperature=10_000.0), None),
)


def columns_off(num_requests: int) -> dict[str, torch.Tensor]:
    """Every sampling input of a step at the value that asks for nothing: tests name those that they are about."""
    return {
        row.name: torch.full((num_requests,), row.off, dtype=torch_dtype(row.dtype))
        for row in STEP_SAMPLING_FIELDS
        if row.off is not None and row.dtype is not None
    }
