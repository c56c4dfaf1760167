"""Each kernel alone, on the shapes of an 8B model: its time, its floor, and PyTorch's own kernel where there is one."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from dflash_trt.kernels import attention_launch, norm_launch, row_codes_launch
from dflash_trt.kernels.attention_launch import AttentionOptions, RequestTensors
from dflash_trt.kernels.rope_and_pages_launch import Rotation, rotate_and_store
from gpu_visit_parts.delta_nets import delta_net_kernels
from gpu_visit_parts.kernel_case import Call, Kernel, cases_of
from gpu_visit_parts.setting import SETTING, Case
from gpu_visit_parts.vocabulary import vocabulary_kernels


def cases() -> Iterator[Case]:
    return cases_of(kernels())


def kernels() -> Iterator[Kernel]:
    shapes = [(r, w, c) for c in (1024, 8192) for r in (1, 4, 16, 64) for w in (1, 4, 8, 16)]
    for num_requests, width, context in [(2, 3, 9)] if SETTING.is_dry_run else shapes:
        yield decode_attention(num_requests, width, context)
        if width > 1:
            yield _draft_attention(num_requests, width, context)
    for length in [6] if SETTING.is_dry_run else [2048, 8192]:
        yield _prefill_attention(length)
    for num_rows in [3] if SETTING.is_dry_run else [1, 16, 128, 1024]:
        yield from _row_kernels(num_rows)
        yield from _linears(16 if SETTING.is_dry_run else num_rows)
    for num_rows in [2] if SETTING.is_dry_run else [1, 16, 128, 512]:
        yield from vocabulary_kernels(num_rows)
    yield from delta_net_kernels()


def _pages(num_requests: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with every request's own pages, shuffled, and the table."""
    per_request = -(-num_positions // SETTING.page_size)
    shape = (num_requests * per_request, 2, SETTING.page_size, SETTING.kv_heads, SETTING.head_dim)
    pages = torch.randn(shape, dtype=SETTING.dtype, device=SETTING.device)
    table = torch.randperm(shape[0], device=SETTING.device).int().view(num_requests, per_request)
    return pages, table


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=SETTING.dtype, device=SETTING.device)


def _integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=SETTING.device)


def _workspace() -> torch.Tensor:
    return attention_launch.allocate_workspace(
        kv_heads=SETTING.kv_heads, head_dim=SETTING.head_dim, device=SETTING.device
    )


def decode_attention(num_requests: int, width: int, context: int, *, has_fp8_pages: bool = False) -> Kernel:
    num_rows, num_keys = num_requests * width, context + width
    page_bytes = (1 if has_fp8_pages else 2) * 2.0 * num_requests * num_keys * SETTING.kv_heads * SETTING.head_dim

    def make() -> Call:
        pages, table = _pages(num_requests, num_keys)
        pages = pages.to(torch.float8_e4m3fn) if has_fp8_pages else pages
        q, out = _tokens(num_rows, SETTING.heads, SETTING.head_dim), _tokens(num_rows, SETTING.heads, SETTING.head_dim)
        requests = RequestTensors(
            token_offsets=_integers([r * width for r in range(num_requests + 1)]),
            context_lens=_integers([context] * num_requests),
            page_table=table,
        )
        workspace = _workspace()
        return lambda: attention_launch.attend_pages(
            q, pages, requests, AttentionOptions(), workspace=workspace, num_verify_rows=width, attended=out
        )

    return Kernel(
        kernel="attend_pages",
        shape=f"{num_requests} requests x {width} rows over {context}{', FP8 pages' if has_fp8_pages else ''}",
        num_bytes=page_bytes + 4.0 * num_rows * SETTING.heads * SETTING.head_dim,
        flops=4.0 * num_rows * num_keys * SETTING.heads * SETTING.head_dim,
        make=make,
        torch_kernels=_sdpa_kernels(num_requests, width, num_keys, is_causal=False),
    )


def _draft_attention(num_requests: int, width: int, context: int) -> Kernel:
    num_rows = num_requests * width

    def make() -> Call:
        pages, table = _pages(num_requests, context)
        q, out = _tokens(num_rows, SETTING.heads, SETTING.head_dim), _tokens(num_rows, SETTING.heads, SETTING.head_dim)
        block = (
            _tokens(num_rows, SETTING.kv_heads, SETTING.head_dim),
            _tokens(num_rows, SETTING.kv_heads, SETTING.head_dim),
        )
        lens = _integers([context] * num_requests)
        requests = RequestTensors(token_offsets=lens, context_lens=lens, page_table=table)
        options, workspace = AttentionOptions(is_causal=False), _workspace()
        return lambda: attention_launch.attend_draft(
            q, block, pages, requests, options, workspace=workspace, attended=out
        )

    num_keys = context + width
    return Kernel(
        kernel="attend_draft",
        shape=f"{num_requests} blocks of {width} over {context}",
        num_bytes=2.0
        * (
            2 * num_requests * num_keys * SETTING.kv_heads * SETTING.head_dim
            + 2 * num_rows * SETTING.heads * SETTING.head_dim
        ),
        flops=4.0 * num_rows * num_keys * SETTING.heads * SETTING.head_dim,
        make=make,
        torch_kernels=_sdpa_kernels(num_requests, width, num_keys, is_causal=False),
    )


def _prefill_attention(length: int) -> Kernel:
    def make() -> Call:
        pages, table = _pages(1, length)
        q, out = _tokens(length, SETTING.heads, SETTING.head_dim), _tokens(length, SETTING.heads, SETTING.head_dim)
        requests = RequestTensors(token_offsets=_integers([0, length]), context_lens=_integers([0]), page_table=table)
        workspace = _workspace()
        return lambda: attention_launch.attend_pages(
            q, pages, requests, AttentionOptions(), workspace=workspace, num_verify_rows=16, attended=out
        )

    return Kernel(
        kernel="attend_pages",
        shape=f"prefill of {length}",
        num_bytes=2.0 * length * SETTING.head_dim * (2 * SETTING.kv_heads + 2 * SETTING.heads),
        flops=2.0 * length * (length + 1) * SETTING.heads * SETTING.head_dim,
        make=make,
        torch_kernels=_sdpa_kernels(1, length, length, is_causal=True),
    )


def _sdpa_kernels(num_requests: int, width: int, num_keys: int, *, is_causal: bool) -> dict[str, Callable[[], Call]]:
    """PyTorch's attention over K/V that lie in one piece per request; a verify block is not masked inside."""
    if SETTING.device.type != "cuda":
        return {}
    backends = {"FlashAttention": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}

    def make(backend: SDPBackend) -> Call:
        q = _tokens(num_requests, SETTING.heads, width, SETTING.head_dim)
        k, v = (_tokens(num_requests, SETTING.kv_heads, num_keys, SETTING.head_dim) for _ in range(2))

        def call() -> object:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

        return call

    return {f"SDPA {name}": partial(make, backend) for name, backend in backends.items()}


def _row_kernels(num_rows: int) -> Iterator[Kernel]:
    def norm() -> Call:
        x, weight = _tokens(num_rows, SETTING.hidden), _tokens(SETTING.hidden)
        return lambda: norm_launch.rms_norm(x, weight, 1e-6)

    def norm_torch() -> Call:
        x, weight = _tokens(num_rows, SETTING.hidden), _tokens(SETTING.hidden)
        return lambda: F.rms_norm(x, (SETTING.hidden,), weight, 1e-6)

    def add_norm() -> Call:
        x, residual, weight = (
            _tokens(num_rows, SETTING.hidden),
            _tokens(num_rows, SETTING.hidden),
            _tokens(SETTING.hidden),
        )
        return lambda: norm_launch.add_rms_norm(x, residual, weight, 1e-6)

    def silu() -> Call:
        gate_up = _tokens(num_rows, 2 * SETTING.ffn)
        return lambda: norm_launch.silu_mul(gate_up)

    def quantize() -> Call:
        x, scale = _tokens(num_rows, SETTING.hidden), torch.ones(1, device=SETTING.device)
        return lambda: row_codes_launch.quantize_fp8(x, scale)

    def store() -> Call:
        qkv = _tokens(num_rows, (SETTING.heads + 2 * SETTING.kv_heads) * SETTING.head_dim)
        q, k, v = (
            x.unflatten(1, (-1, SETTING.head_dim))
            for x in qkv.split([n * SETTING.head_dim for n in SETTING.qkv_heads], dim=1)
        )
        pages, table = _pages(num_rows, SETTING.page_size)  # every row is a request of its own
        zeros = torch.zeros(num_rows, dtype=torch.int32, device=SETTING.device)
        offsets = torch.arange(num_rows + 1, dtype=torch.int32, device=SETTING.device)
        requests = RequestTensors(token_offsets=offsets, context_lens=zeros, page_table=table)
        inv_freq = 1e6 ** (-torch.arange(SETTING.head_dim // 2, device=SETTING.device) * 2.0 / SETTING.head_dim)
        rotation = Rotation(inv_freq=inv_freq, q_norm=_tokens(SETTING.head_dim), k_norm=_tokens(SETTING.head_dim))
        return lambda: rotate_and_store(q, k, v, pages, requests, zeros, rotation)

    rows = f"{num_rows} rows"
    row_bytes = 2.0 * num_rows * SETTING.hidden
    yield Kernel(
        kernel="rms_norm", shape=rows, num_bytes=2 * row_bytes, make=norm, torch_kernels={"rms_norm": norm_torch}
    )
    yield Kernel(kernel="add_rms_norm", shape=rows, num_bytes=4 * row_bytes, make=add_norm)
    yield Kernel(kernel="silu_mul", shape=rows, num_bytes=6.0 * num_rows * SETTING.ffn, make=silu)
    yield Kernel(kernel="quantize_fp8", shape=rows, num_bytes=1.5 * row_bytes, make=quantize)
    yield Kernel(
        kernel="rotate_and_store",
        shape=rows,
        num_bytes=4.0 * num_rows * sum(SETTING.qkv_heads) * SETTING.head_dim,
        make=store,
    )


def _linears(num_rows: int) -> Iterator[Kernel]:
    """GEMMs of PyTorch, which the step uses as they are: how near their floor they come bounds the step."""
    sizes = {
        "qkv": (sum(SETTING.qkv_heads) * SETTING.head_dim, SETTING.hidden),
        "gate_up": (2 * SETTING.ffn, SETTING.hidden),
        "down": (SETTING.hidden, SETTING.ffn),
    }
    for name, (rows, columns) in sizes.items():

        def plain(rows: int = rows, columns: int = columns) -> Call:
            x, weight = _tokens(num_rows, columns), _tokens(rows, columns)
            return lambda: F.linear(x, weight)

        def fp8(rows: int = rows, columns: int = columns) -> Call:
            x, weight = _tokens(num_rows, columns), _tokens(rows, columns).to(torch.float8_e4m3fn)
            one = torch.ones(1, device=SETTING.device)

            def call() -> object:
                codes = row_codes_launch.quantize_fp8(x, one)
                return torch._scaled_mm(codes, weight.t(), scale_a=one, scale_b=one, out_dtype=SETTING.dtype)

            return call

        flops = 2.0 * num_rows * rows * columns
        other_bytes = 2.0 * num_rows * (rows + columns)
        shape = f"{name}, {num_rows} rows"
        yield Kernel(
            kernel="linear", shape=shape, num_bytes=2.0 * rows * columns + other_bytes, flops=flops, make=plain
        )
        yield Kernel(
            kernel="quantize and FP8 linear",
            shape=shape,
            num_bytes=1.0 * rows * columns + other_bytes,
            flops=flops,
            is_fp8=True,
            make=fp8,
        )
