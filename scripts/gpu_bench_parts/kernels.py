"""Each kernel alone, on the shapes of an 8B model: its time, its floor, and PyTorch's own kernel where there is one."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from dflash_trt.kernels import argmax_launch, attention_launch, norm_launch, quantize_fp8_launch, sampling_launch
from dflash_trt.kernels.attention_launch import AttentionOptions, RequestTensors
from dflash_trt.kernels.rope_and_pages_launch import Rotation, rotate_and_store
from gpu_bench_parts.report import Report
from gpu_bench_parts.timing import Roofs, device_us, num_copies

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 32, 8, 128, 4096, 12288, 151936
PAGE_SIZE = 32
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")

Call = Callable[[], object]


@dataclass(kw_only=True)
class Case:
    """`make` gives one call on data of its own; `torch_kernels` the same work by PyTorch, by name, where it can."""

    kernel: str
    shape: str
    num_bytes: float
    make: Callable[[], Call]
    flops: float = 0.0
    is_fp8: bool = False
    torch_kernels: dict[str, Callable[[], Call]] = field(default_factory=dict)


def measure_kernels(report: Report, roofs: Roofs, *, deadline_s: float, is_quick: bool) -> None:
    for case in _cases(is_quick):
        if time.monotonic() > deadline_s:
            report.leave_out(f"kernel {case.kernel} {case.shape}: out of time")
            continue
        if case.is_fp8 and not roofs.fp8_flops_per_s:
            report.leave_out(f"kernel {case.kernel} {case.shape}: this GPU has no FP8 product")
            continue
        try:
            report.add("kernels", _measured(case, roofs))
        except torch.OutOfMemoryError:
            report.leave_out(f"kernel {case.kernel} {case.shape}: out of memory")
        except (RuntimeError, ValueError) as error:
            report.fail(f"kernel {case.kernel} {case.shape}", error)
        torch.cuda.empty_cache()


def _measured(case: Case, roofs: Roofs) -> dict[str, object]:
    copies = num_copies(case.num_bytes)
    took_us = device_us([case.make() for _ in range(copies)])
    floor_us = roofs.floor_us(num_bytes=case.num_bytes, flops=case.flops, is_fp8=case.is_fp8)
    row = {
        "kernel": case.kernel,
        "shape": case.shape,
        "time_us": took_us,
        "floor_us": floor_us,
        "floor_fraction": floor_us / took_us,
        "gb_per_s": case.num_bytes / took_us / 1e3,
        "tflop_per_s": case.flops / took_us / 1e6,
    }
    times = {name: _torch_us(make, copies) for name, make in case.torch_kernels.items()}
    known = {name: took for name, took in times.items() if took is not None}
    best = min(known, key=known.__getitem__, default="")
    return row | {"torch_us": known.get(best, ""), "torch_kernel": best}


def _torch_us(make: Callable[[], Call], copies: int) -> float | None:
    """None where PyTorch has no such kernel for these shapes on this GPU."""
    try:
        return device_us([make() for _ in range(copies)])
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "No available kernel" not in str(error):
            raise
        return None


def _cases(is_quick: bool) -> Iterator[Case]:
    decode_shapes = (
        [(16, 8, 8192)]
        if is_quick
        else [
            (num_requests, width, context)
            for context in (1024, 8192)
            for num_requests in (1, 4, 16, 64)
            for width in (1, 4, 8, 16)
        ]
    )
    for num_requests, width, context in decode_shapes:
        yield _decode_attention(num_requests, width, context)
        if width > 1:
            yield _draft_attention(num_requests, width, context)
    for length in [2048] if is_quick else [2048, 8192]:
        yield _prefill_attention(length)
    for num_rows in [128] if is_quick else [1, 16, 128, 1024]:
        yield from _row_kernels(num_rows)
        yield from _linears(num_rows)
    for num_rows in [128] if is_quick else [1, 16, 128, 512]:
        yield from _vocabulary_kernels(num_rows)


def _pages(num_requests: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with every request's own pages, shuffled, and the table."""
    per_request = -(-num_positions // PAGE_SIZE)
    shape = (num_requests * per_request, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    pages = torch.randn(shape, dtype=DTYPE, device=DEVICE)
    table = torch.randperm(shape[0], device=DEVICE).int().view(num_requests, per_request)
    return pages, table


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def _integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


_WORKSPACE: list[torch.Tensor] = []


def _workspace() -> torch.Tensor:
    if not _WORKSPACE:
        _WORKSPACE.append(attention_launch.allocate_workspace(kv_heads=KV_HEADS, head_dim=HEAD_DIM, device=DEVICE))
    return _WORKSPACE[0]


def _decode_attention(num_requests: int, width: int, context: int) -> Case:
    num_rows, num_keys = num_requests * width, context + width

    def make() -> Call:
        pages, table = _pages(num_requests, num_keys)
        q, out = _tokens(num_rows, HEADS, HEAD_DIM), _tokens(num_rows, HEADS, HEAD_DIM)
        requests = RequestTensors(
            token_offsets=_integers([r * width for r in range(num_requests + 1)]),
            context_lens=_integers([context] * num_requests),
            page_table=table,
        )
        workspace = _workspace()
        return lambda: attention_launch.attend_pages(
            q, pages, requests, AttentionOptions(), workspace=workspace, num_verify_rows=width, attended=out
        )

    return Case(
        kernel="attend_pages",
        shape=f"{num_requests} requests x {width} rows over {context}",
        num_bytes=2.0 * (2 * num_requests * num_keys * KV_HEADS * HEAD_DIM + 2 * num_rows * HEADS * HEAD_DIM),
        flops=4.0 * num_rows * num_keys * HEADS * HEAD_DIM,
        make=make,
        torch_kernels=_sdpa_kernels(num_requests, width, num_keys, is_causal=False),
    )


def _draft_attention(num_requests: int, width: int, context: int) -> Case:
    num_rows = num_requests * width

    def make() -> Call:
        pages, table = _pages(num_requests, context)
        q, out = _tokens(num_rows, HEADS, HEAD_DIM), _tokens(num_rows, HEADS, HEAD_DIM)
        block = _tokens(num_rows, KV_HEADS, HEAD_DIM), _tokens(num_rows, KV_HEADS, HEAD_DIM)
        lens = _integers([context] * num_requests)
        requests = RequestTensors(token_offsets=lens, context_lens=lens, page_table=table)
        options, workspace = AttentionOptions(is_causal=False), _workspace()
        return lambda: attention_launch.attend_draft(
            q, block, pages, requests, options, workspace=workspace, attended=out
        )

    num_keys = context + width
    return Case(
        kernel="attend_draft",
        shape=f"{num_requests} blocks of {width} over {context}",
        num_bytes=2.0 * (2 * num_requests * num_keys * KV_HEADS * HEAD_DIM + 2 * num_rows * HEADS * HEAD_DIM),
        flops=4.0 * num_rows * num_keys * HEADS * HEAD_DIM,
        make=make,
        torch_kernels=_sdpa_kernels(num_requests, width, num_keys, is_causal=False),
    )


def _prefill_attention(length: int) -> Case:
    def make() -> Call:
        pages, table = _pages(1, length)
        q, out = _tokens(length, HEADS, HEAD_DIM), _tokens(length, HEADS, HEAD_DIM)
        requests = RequestTensors(token_offsets=_integers([0, length]), context_lens=_integers([0]), page_table=table)
        workspace = _workspace()
        return lambda: attention_launch.attend_pages(
            q, pages, requests, AttentionOptions(), workspace=workspace, num_verify_rows=16, attended=out
        )

    return Case(
        kernel="attend_pages",
        shape=f"prefill of {length}",
        num_bytes=2.0 * length * HEAD_DIM * (2 * KV_HEADS + 2 * HEADS),
        flops=2.0 * length * (length + 1) * HEADS * HEAD_DIM,
        make=make,
        torch_kernels=_sdpa_kernels(1, length, length, is_causal=True),
    )


def _sdpa_kernels(num_requests: int, width: int, num_keys: int, *, is_causal: bool) -> dict[str, Callable[[], Call]]:
    """PyTorch's attention over K/V that lie in one piece per request; a verify block is not masked inside."""
    backends = {"FlashAttention": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}

    def make(backend: SDPBackend) -> Call:
        q = _tokens(num_requests, HEADS, width, HEAD_DIM)
        k, v = (_tokens(num_requests, KV_HEADS, num_keys, HEAD_DIM) for _ in range(2))

        def call() -> object:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

        return call

    return {f"SDPA {name}": partial(make, backend) for name, backend in backends.items()}


def _row_kernels(num_rows: int) -> Iterator[Case]:
    def norm() -> Call:
        x, weight = _tokens(num_rows, HIDDEN), _tokens(HIDDEN)
        return lambda: norm_launch.rms_norm(x, weight, 1e-6)

    def norm_torch() -> Call:
        x, weight = _tokens(num_rows, HIDDEN), _tokens(HIDDEN)
        return lambda: F.rms_norm(x, (HIDDEN,), weight, 1e-6)

    def add_norm() -> Call:
        x, residual, weight = _tokens(num_rows, HIDDEN), _tokens(num_rows, HIDDEN), _tokens(HIDDEN)
        return lambda: norm_launch.add_rms_norm(x, residual, weight, 1e-6)

    def silu() -> Call:
        gate_up = _tokens(num_rows, 2 * FFN)
        return lambda: norm_launch.silu_mul(gate_up)

    def quantize() -> Call:
        x, scale = _tokens(num_rows, HIDDEN), torch.ones(1, device=DEVICE)
        return lambda: quantize_fp8_launch.quantize_fp8(x, scale)

    def store() -> Call:
        qkv = _tokens(num_rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        q, k, v = (x.unflatten(1, (-1, HEAD_DIM)) for x in qkv.split([n * HEAD_DIM for n in _SPLIT], dim=1))
        pages, table = _pages(num_rows, PAGE_SIZE)  # every row is a request of its own
        zeros = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
        offsets = torch.arange(num_rows + 1, dtype=torch.int32, device=DEVICE)
        requests = RequestTensors(token_offsets=offsets, context_lens=zeros, page_table=table)
        inv_freq = 1e6 ** (-torch.arange(HEAD_DIM // 2, device=DEVICE) * 2.0 / HEAD_DIM)
        rotation = Rotation(inv_freq=inv_freq, q_norm=_tokens(HEAD_DIM), k_norm=_tokens(HEAD_DIM))
        return lambda: rotate_and_store(q, k, v, pages, requests, zeros, rotation)

    rows = f"{num_rows} rows"
    row_bytes = 2.0 * num_rows * HIDDEN
    yield Case(
        kernel="rms_norm", shape=rows, num_bytes=2 * row_bytes, make=norm, torch_kernels={"rms_norm": norm_torch}
    )
    yield Case(kernel="add_rms_norm", shape=rows, num_bytes=4 * row_bytes, make=add_norm)
    yield Case(kernel="silu_mul", shape=rows, num_bytes=6.0 * num_rows * FFN, make=silu)
    yield Case(kernel="quantize_fp8", shape=rows, num_bytes=1.5 * row_bytes, make=quantize)
    yield Case(kernel="rotate_and_store", shape=rows, num_bytes=4.0 * num_rows * sum(_SPLIT) * HEAD_DIM, make=store)


_SPLIT = (HEADS, KV_HEADS, KV_HEADS)


def _linears(num_rows: int) -> Iterator[Case]:
    """GEMMs of PyTorch, which the step uses as they are: how near their floor they come bounds the step."""
    sizes = {"qkv": (sum(_SPLIT) * HEAD_DIM, HIDDEN), "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}
    for name, (rows, columns) in sizes.items():

        def plain(rows: int = rows, columns: int = columns) -> Call:
            x, weight = _tokens(num_rows, columns), _tokens(rows, columns)
            return lambda: F.linear(x, weight)

        def fp8(rows: int = rows, columns: int = columns) -> Call:
            x, weight = _tokens(num_rows, columns), _tokens(rows, columns).to(torch.float8_e4m3fn)
            one = torch.ones(1, device=DEVICE)

            def call() -> object:
                codes = quantize_fp8_launch.quantize_fp8(x, one)
                return torch._scaled_mm(codes, weight.t(), scale_a=one, scale_b=one, out_dtype=DTYPE)

            return call

        flops = 2.0 * num_rows * rows * columns
        other_bytes = 2.0 * num_rows * (rows + columns)
        shape = f"{name}, {num_rows} rows"
        yield Case(kernel="linear", shape=shape, num_bytes=2.0 * rows * columns + other_bytes, flops=flops, make=plain)
        yield Case(
            kernel="quantize and FP8 linear",
            shape=shape,
            num_bytes=1.0 * rows * columns + other_bytes,
            flops=flops,
            is_fp8=True,
            make=fp8,
        )


def _vocabulary_kernels(num_rows: int) -> Iterator[Case]:
    logits_bytes = 2.0 * num_rows * VOCAB

    def argmax() -> Call:
        logits = _tokens(num_rows, VOCAB)
        return lambda: argmax_launch.argmax_tokens(logits)

    def argmax_torch() -> Call:
        logits = _tokens(num_rows, VOCAB)
        return lambda: logits.argmax(dim=1)

    yield Case(
        kernel="argmax",
        shape=f"{num_rows} rows of {VOCAB}",
        num_bytes=logits_bytes,
        make=argmax,
        torch_kernels={"argmax": argmax_torch},
    )
    settings = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (1.0, 0, 1.0, 0.0),
        "min_p": (1.0, 0, 1.0, 0.05),
        "top_k 50": (1.0, 50, 1.0, 0.0),
        "top_p 0.95": (1.0, 0, 0.95, 0.0),
        "top_k 50, top_p 0.95": (1.0, 50, 0.95, 0.0),
    }
    for name, setting in settings.items():
        yield Case(
            kernel="sample_and_accept",
            shape=f"{num_rows} rows of {VOCAB}, {name}",
            num_bytes=logits_bytes,
            make=lambda setting=setting: _sampling(num_rows, setting),
        )


def _sampling(num_rows: int, setting: tuple[float, int, float, float]) -> Call:
    """One request per row. The logits spread like a language model's: a few far above the rest."""
    logits = (3.0 * torch.randn(num_rows, VOCAB, device=DEVICE)).to(DTYPE)
    temperature, top_k, top_p, min_p = setting
    zeros = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=DEVICE)
    inputs = sampling_launch.SamplingInputs(
        token_ids=zeros,
        positions=rows[:-1].contiguous(),
        token_offsets=rows,
        context_lens=zeros,
        logit_rows=rows[:-1, None].contiguous(),
        num_candidates=zeros,
        temperature=torch.full((num_rows,), temperature, device=DEVICE),
        top_k=torch.full_like(zeros, top_k),
        top_p=torch.full((num_rows,), top_p, device=DEVICE),
        min_p=torch.full((num_rows,), min_p, device=DEVICE),
        seed=torch.arange(num_rows, device=DEVICE),
    )
    outputs = sampling_launch.allocate_outputs(num_rows, 1, DEVICE)
    workspace = sampling_launch.allocate_workspace(num_rows, VOCAB, DEVICE)
    return lambda: sampling_launch.sample_and_accept(logits, inputs, outputs, workspace)
