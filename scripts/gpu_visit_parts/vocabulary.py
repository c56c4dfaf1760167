"""The kernels over a vocabulary: drafts and the sampler, with drafts that share the noise, and rejection sampling."""

import itertools
from collections.abc import Iterator
from typing import Final

import torch

from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.sampling import STEP_SAMPLING_FIELDS, StepSampling
from dflash_trt.kernels import sampling_launch
from gpu_visit_parts.kernel_case import Call, Kernel
from gpu_visit_parts.setting import SETTING

NUM_DRAFTS: Final = 7  # of a request whose drafts are tested
DRAFT_TOPK: Final = 32


def vocabulary_kernels(num_rows: int) -> Iterator[Kernel]:
    yield from _draft_kernels(num_rows)
    yield from _sampling_kernels(num_rows)


def _draft_kernels(num_rows: int) -> Iterator[Kernel]:

    def drafts(temperature: float, stream: int) -> Call:
        logits = torch.randn((num_rows, SETTING.vocab), dtype=SETTING.dtype, device=SETTING.device)
        request = torch.zeros(1, dtype=torch.int64, device=SETTING.device)
        degree, streams = torch.full((1,), temperature, device=SETTING.device), request.int() + stream
        columns, draft_topk = (degree, request, streams, request.int()), min(DRAFT_TOPK, SETTING.vocab)
        return lambda: sampling_launch.draft_tokens(logits, *columns, draft_topk=draft_topk)

    def argmax_torch() -> Call:
        logits = torch.randn((num_rows, SETTING.vocab), dtype=SETTING.dtype, device=SETTING.device)
        return lambda: logits.argmax(dim=1)

    for name, temperature, stream in (("temperature 0", 0.0, 0), ("temperature 1", 1.0, 0), ("rejection", 1.0, 1)):
        yield Kernel(
            kernel="draft_tokens",
            shape=f"{num_rows} rows of {SETTING.vocab}, {name}",
            num_bytes=_logits_bytes(num_rows),
            make=lambda temperature=temperature, stream=stream: drafts(temperature, stream),
            torch_kernels={} if temperature else {"argmax": argmax_torch},
        )


def _sampling_kernels(num_rows: int) -> Iterator[Kernel]:
    settings = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (1.0, 0, 1.0, 0.0),
        "min_p": (1.0, 0, 1.0, 0.05),
        "top_k 50": (1.0, 50, 1.0, 0.0),
        "top_p 0.95": (1.0, 0, 0.95, 0.0),
        "top_k 50, top_p 0.95": (1.0, 50, 0.95, 0.0),
    }
    for name, setting in settings.items():
        yield Kernel(
            kernel="sample_and_accept",
            shape=f"{num_rows} rows of {SETTING.vocab}, {name}",
            num_bytes=_logits_bytes(num_rows),
            make=lambda setting=setting: _sampling(num_rows, setting),
        )
    for name, (stream, drafts_are) in itertools.product(
        ("temperature", "top_p 0.95"), enumerate(("drafts that share the noise", "rejection sampling"))
    ):
        yield Kernel(
            kernel="sample_and_accept",
            shape=f"{num_rows} blocks of {1 + NUM_DRAFTS} rows of {SETTING.vocab}, {name}, {drafts_are}",
            num_bytes=_logits_bytes(num_rows * (1 + NUM_DRAFTS)),
            make=lambda setting=settings[name], stream=stream: _verifying(num_rows, setting, stream),
        )


def _logits_bytes(num_rows: int) -> float:
    return 2.0 * num_rows * SETTING.vocab


def _verifying(num_requests: int, setting: tuple[float, int, float, float], stream: int) -> Call:
    """Drafts among the likeliest tokens, of equal probabilities: some are accepted, some are not."""
    width, draft_topk = 1 + NUM_DRAFTS, min(DRAFT_TOPK, SETTING.vocab)
    rows = torch.arange(num_requests * width + 1, dtype=torch.int32, device=SETTING.device)
    zeros, columns = _columns(num_requests, setting, stream)
    logits = _spread_logits(num_requests * width)
    best = logits.view(num_requests, width, -1)[:, :-1].topk(draft_topk, dim=2).indices.int()
    token_ids = torch.zeros(num_requests, width, dtype=torch.int32, device=SETTING.device)
    token_ids[:, 1:] = best[:, :, draft_topk // 4]
    inputs = sampling_launch.SamplingInputs(
        token_ids=token_ids.flatten(),
        positions=rows[:-1].contiguous(),
        token_offsets=rows[::width].contiguous(),
        context_lens=zeros,
        logit_rows=rows[:-1].view(num_requests, width).contiguous(),
        num_candidates=zeros + NUM_DRAFTS,
        draft_topk_ids=best.flatten(1).contiguous(),
        draft_topk_probs=torch.full((num_requests, NUM_DRAFTS * draft_topk), 1 / draft_topk, device=SETTING.device),
        **columns,
    )
    return _call(logits, inputs)


def _sampling(num_rows: int, setting: tuple[float, int, float, float]) -> Call:
    """One request per row."""
    zeros, columns = _columns(num_rows, setting, 0)
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=SETTING.device)
    inputs = sampling_launch.SamplingInputs(
        token_ids=zeros,
        positions=rows[:-1].contiguous(),
        token_offsets=rows,
        context_lens=zeros,
        logit_rows=rows[:-1, None].contiguous(),
        num_candidates=zeros,
        **columns,
    )
    return _call(_spread_logits(num_rows), inputs)


def _spread_logits(num_rows: int) -> torch.Tensor:
    """As a language model's: a few far above the rest."""
    return (3.0 * torch.randn(num_rows, SETTING.vocab, device=SETTING.device)).to(SETTING.dtype)


def _columns(
    num_requests: int, setting: tuple[float, int, float, float], stream: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Zeros, and the columns of sampling; every request has a seed of its own."""
    temperature, top_k, top_p, min_p = setting
    zeros = torch.zeros(num_requests, dtype=torch.int32, device=SETTING.device)
    chosen = StepSampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, draft_stream=stream)
    columns = {
        row.name: torch.full_like(zeros, getattr(chosen, row.name), dtype=torch_dtype(row.dtype))
        for row in STEP_SAMPLING_FIELDS
        if row.dtype is not None
    }
    return zeros, columns | {"seed": torch.arange(num_requests, device=SETTING.device)}


def _call(logits: torch.Tensor, inputs: sampling_launch.SamplingInputs) -> Call:
    num_requests, width = inputs.logit_rows.shape
    outputs = sampling_launch.allocate_outputs(num_requests, width, SETTING.device)
    workspace = sampling_launch.allocate_workspace(len(logits), SETTING.vocab, SETTING.device)
    return lambda: sampling_launch.sample_and_accept(logits, inputs, outputs, workspace)
