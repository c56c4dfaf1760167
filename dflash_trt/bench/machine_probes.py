"""Costs of a step besides matrix products, fitted to times of small engines with random weights.

The engines have other sizes than any that is served: the machine's rates are wanted, not a model's. Each step's time,
minus its products', is a sum of non-negative costs times the counts of `plan.step_work`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.padding import step_shape
from dflash_trt.backends.page_budget import plan_pages
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.backends.torch.loading import bind_tensors
from dflash_trt.bench.machine_rates import clock_of_cpu, cpu_library
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, plan_of
from dflash_trt.core.model.decoder import LayerSpec, TargetSpec
from dflash_trt.core.model.draft import DraftSpec, engine_states, engine_weights
from dflash_trt.core.model.feed_forward import Dense
from dflash_trt.core.model.gqa import AttentionMask, Gqa
from dflash_trt.core.model.rope import RopeSpec
from dflash_trt.core.step_plan import StepPlan
from dflash_trt.engine_dir import PretrainedConfig
from dflash_trt.plan.computed_rows import ComputedRows
from dflash_trt.plan.step_work import EngineWork, StepWork

_PAGE_SIZE: Final = 32
_MAX_REQUESTS: Final = 16
_NUM_DRAFTS: Final = 7
_NUM_ROUNDS: Final = 7


class ProbeSize(NamedTuple):
    """A target and its DFlash drafter."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    num_draft_layers: int
    vocab_size: int


# hidden and intermediate size, heads, K/V heads, head_dim, layers, draft layers, vocabulary
CPU_SIZES: Final = (
    ProbeSize(128, 256, 4, 2, 32, 2, 1, 256),
    ProbeSize(256, 768, 4, 2, 64, 10, 4, 1024),
    ProbeSize(512, 1536, 8, 2, 64, 5, 2, 4096),
)
GPU_SIZES: Final = (ProbeSize(1024, 3072, 8, 2, 128, 4, 2, 32768), ProbeSize(4096, 12288, 32, 8, 128, 12, 4, 131072))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeTime:
    """A step that ran, and what it did."""

    work: StepWork
    seconds: float


class ProbeEngine:
    """An executor over random weights, with its drafter or without."""

    def __init__(self, size: ProbeSize, device: torch.device, *, has_drafter: bool) -> None:
        self._device = device
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        target, draft = probe_specs(size)
        config = PretrainedConfig(target=target, draft=draft, dtype="float32" if device.type == "cpu" else "bfloat16")
        self.work = EngineWork(config, has_drafter=has_drafter)
        tensors = _random_tensors(target, draft, dtype, device)
        network = bind_tensors(target, draft if has_drafter else None, tensors)
        states = engine_states(target, draft if has_drafter else None, dtype=config.dtype)
        plan = plan_pages(
            states, page_size=_PAGE_SIZE, max_batch_size=_MAX_REQUESTS, max_seq_len=1024, budget_bytes=1 << 40
        )
        limits: dict[str, Any] = {
            "page_plan": plan,
            "max_batch_size": _MAX_REQUESTS,
            "max_num_tokens": 2048,
            "max_draft_len": _NUM_DRAFTS,
        }
        self._executor: Any
        if device.type == "cpu":
            self._executor = TorchExecutor(network, kernels=cpu_library(), **limits)
        else:
            from dflash_trt.backends.cuda.executor import TorchGpuExecutor

            self._executor = TorchGpuExecutor(network, device=device, **limits)
        self._vocab_size = size.vocab_size

    def step(self, *, num_requests: int, num_tokens: int, context_len: int, num_drafts: int) -> Probe:
        """Requests that are alike: prompt chunks, or blocks of `num_drafts` + 1 tokens."""
        num_pages = -(-(context_len + num_tokens) // _PAGE_SIZE)
        is_block = num_tokens == num_drafts + 1
        batch = StepBatch(
            requests=tuple(
                ScheduledRequest(
                    request_id=str(r),
                    token_ids=tuple((7 * r + 3 * i) % self._vocab_size for i in range(num_tokens)),
                    context_len=context_len,
                    num_candidates=num_drafts if is_block else 0,
                    page_ids=tuple(range(r * num_pages, (r + 1) * num_pages)),
                    sampling=StepSampling(),
                )
                for r in range(num_requests)
            ),
            num_draft_tokens=num_drafts,
        )
        rows = ComputedRows(
            num_tokens=np.full(num_requests, num_tokens),
            context_lens=np.full(num_requests, context_len),
            num_draft_tokens=num_drafts,
        )
        plan = plan_of(batch)
        if self._device.type == "cuda":
            self._executor.warm_up([step_shape(plan, self._executor.limits)])
        return Probe(self.work.of(rows), plan, self._seconds)

    def close(self) -> None:
        self._executor.close()

    def _seconds(self, plan: StepPlan) -> float:
        started_s = clock_of_cpu()
        handle = self._executor.submit(plan)
        handle.result()
        return clock_of_cpu() - started_s if self._device.type == "cpu" else float(handle.elapsed_s)


@dataclass(frozen=True, slots=True)
class Probe:
    """A step that can be run again and again."""

    work: StepWork
    plan: StepPlan
    seconds: Callable[[StepPlan], float]


def probe_times(device: torch.device, sizes: Sequence[ProbeSize]) -> list[ProbeTime]:
    """Medians of rounds over all steps in turn, so that a slow moment affects all equally."""
    times: list[ProbeTime] = []
    for size, has_drafter in itertools.product(sizes, (False, True)):
        engine = ProbeEngine(size, device, has_drafter=has_drafter)
        probes = list(_steps(engine, has_drafter=has_drafter))
        found: list[list[float]] = [[] for _ in probes]
        for _ in range(_NUM_ROUNDS + 1):
            for seconds, probe in zip(found, probes, strict=True):
                seconds.append(probe.seconds(probe.plan))
        times += [
            ProbeTime(work=probe.work, seconds=statistics.median(seconds[1:]))
            for seconds, probe in zip(found, probes, strict=True)
        ]
        engine.close()
    return times


def _steps(engine: ProbeEngine, *, has_drafter: bool) -> Iterator[Probe]:
    for num_requests, context_len in itertools.product((1, 4, 16), (64, 448)):
        for drafts in (3, _NUM_DRAFTS) if has_drafter else (0,):
            yield engine.step(
                num_requests=num_requests, num_tokens=drafts + 1, context_len=context_len, num_drafts=drafts
            )
    chunk = {"context_len": 0, "num_drafts": _NUM_DRAFTS if has_drafter else 0}
    yield engine.step(num_requests=1, num_tokens=200, **chunk)
    yield engine.step(num_requests=4, num_tokens=60, **chunk)


COSTS: Final = {  # cost: the count of `StepWork` that it multiplies; None means 1
    "kv_s_per_byte": "kv_bytes",
    "mixing_s_per_flop": "mixing_flops",
    "activation_s_per_byte": "activation_bytes",
    "logit_s": "num_logits",
    "token_s": "num_tokens",
    "request_s": "num_requests",
    "layer_s": "num_layers",
    "pass_s": "num_passes",
    "step_s": None,
}


def fitted_costs(times: Sequence[ProbeTime], products_s: Callable[[StepWork], float]) -> dict[str, float]:
    """Non-negative least squares of the relative error; `products_s` is taken as known."""
    columns = [[1.0 if name is None else float(getattr(t.work, name)) for name in COSTS.values()] for t in times]
    seconds = np.array([t.seconds for t in times])
    rest = seconds - np.array([products_s(t.work) for t in times])
    found = _non_negative(np.array(columns) / seconds[:, None], rest / seconds)
    return dict(zip(COSTS, found.tolist(), strict=True))


def _non_negative(a: Any, b: Any) -> Any:  # float64 [N, C], [N] -> [C]
    """Least squares with a column left out as long as one is negative, the most negative first."""
    scale = np.abs(a).max(axis=0)
    scale[scale == 0] = 1.0
    kept, x = list(range(a.shape[1])), np.zeros(a.shape[1])
    while kept:
        found = np.linalg.lstsq(a[:, kept] / scale[kept], b, rcond=None)[0]
        if found.min() >= 0:
            x[kept] = found / scale[kept]
            break
        kept.pop(int(found.argmin()))
    return x


def probe_specs(size: ProbeSize) -> tuple[TargetSpec, DraftSpec]:
    """A target of Qwen3's kind with a tied head, and a DFlash drafter that taps every other layer."""
    mixer = Gqa(
        num_heads=size.num_heads,
        num_kv_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        rope=RopeSpec(theta=1e4),
        has_qk_norm=True,
    )
    forward = Dense(intermediate_size=size.intermediate_size)
    common: dict[str, Any] = {"hidden_size": size.hidden_size, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
    target = TargetSpec(
        family="qwen3",
        vocab_size=size.vocab_size,
        is_embedding_tied=True,
        layers=(LayerSpec(mixer=mixer, feed_forward=forward),) * size.num_layers,
        **common,
    )
    block = mixer.model_copy(update={"mask": AttentionMask(is_causal=False)})
    draft = DraftSpec(
        source_format="z-lab",
        layers=(LayerSpec(mixer=block, feed_forward=forward),) * size.num_draft_layers,
        target_layer_ids=tuple(range(0, size.num_layers, 2)),
        target_hidden_size=size.hidden_size,
        target_vocab_size=size.vocab_size,
        draft_block_size=_NUM_DRAFTS + 1,
        mask_token_id=size.vocab_size - 1,
        **common,
    )
    return target, draft


def _random_tensors(
    target: TargetSpec, draft: DraftSpec, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Random values that bfloat16 holds, as in most checkpoints."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, spec in engine_weights(target, draft, None).items():
        if len(spec.shape) == 1:
            value = torch.ones(spec.shape)
        else:
            value = torch.randn(spec.shape, generator=generator) / spec.shape[-1] ** 0.5
        tensors[name] = value.bfloat16().to(device=device, dtype=dtype)
    return tensors
