"""A gated delta net of Qwen3.5-27B: verify blocks, prompts, and the copy of a slot, against the bytes of its states."""

from collections.abc import Iterator

import torch

from dflash_trt.backends.torch.loading import allocate_state
from dflash_trt.core.dtype import dtype_name
from dflash_trt.core.state_spec import EngineStates
from dflash_trt.kernels.gated_delta_launch import DeltaRows, DeltaWeights, run_gated_delta
from dflash_trt.kernels.row_copies_launch import RowCopies
from dflash_trt.network.state import RecurrentCache
from gpu_visit_parts.kernel_case import Call, Kernel
from gpu_visit_parts.setting import SETTING


def delta_net_kernels() -> Iterator[Kernel]:
    """Of one layer; a model has 48 of them."""
    blocks = [(2, 3)] if SETTING.is_dry_run else [(r, w) for r in (1, 4, 16, 64) for w in (1, 4, 8, 16)]
    for num_requests, width in blocks:
        yield _verify_blocks(num_requests, width)
    for length in [6] if SETTING.is_dry_run else [512, 2048, 8192]:
        yield _prompt(length)
    yield _copy()


def _num_records() -> int:
    return 4 if SETTING.is_dry_run else 16


def _cache(num_slots: int) -> RecurrentCache[torch.Tensor]:
    state = SETTING.delta_net.state("state", dtype_name(SETTING.dtype), num_records=_num_records())
    states = EngineStates(target=(state,))
    (cache,) = allocate_state(states, num_pages=1, page_size=1, num_slots=num_slots, device=SETTING.device).target_kv
    assert isinstance(cache, RecurrentCache)
    return cache


def _step(num_requests: int, width: int, context_len: int) -> tuple[RecurrentCache[torch.Tensor], Call]:
    net, device, dtype = SETTING.delta_net, SETTING.device, SETTING.dtype

    def randn(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=of, device=device)

    cache, num_rows = _cache(num_requests), num_requests * width
    qkvz, ba = randn(num_rows, net.num_channels + net.v_size), randn(num_rows, 2 * net.num_value_heads)
    weights = DeltaWeights(
        conv=randn(net.num_channels, net.conv_size),
        log_rate=randn(net.num_value_heads, of=torch.float32),
        dt_bias=randn(net.num_value_heads, of=torch.float32),
        norm=randn(net.value_head_dim),
    )
    rows = DeltaRows(
        slot_ids=torch.arange(num_requests, device=device),
        token_offsets=torch.arange(num_requests + 1, dtype=torch.int32, device=device) * width,
        context_lens=torch.full((num_requests,), context_len, dtype=torch.int32, device=device),
        has_prompts=width > _num_records(),
    )
    return cache, lambda: run_gated_delta(qkvz, ba, weights, rows, cache.tensors, cache.spec, 1e-6)


def _row_bytes(num_rows: int) -> float:
    """Inputs and results, in and out."""
    net = SETTING.delta_net
    return float(num_rows * (net.num_channels + 3 * net.v_size) * SETTING.dtype.itemsize)


def _state_bytes(num_requests: int, num_records: int) -> float:
    """A state and so many records, read and written."""
    net, whole = SETTING.delta_net, _cache(1).spec.bytes_per_slot
    state = 4 * net.num_value_heads * net.key_head_dim * net.value_head_dim
    return 2.0 * num_requests * (state + (whole - state) * num_records / _num_records())


def _flops(num_rows: int) -> float:
    """Products with the state: of keys, of queries, and the fold."""
    net = SETTING.delta_net
    return 6.0 * num_rows * net.num_value_heads * net.key_head_dim * net.value_head_dim


def _verify_blocks(num_requests: int, width: int) -> Kernel:
    """Every call folds a whole block: a step that runs again would fold none, so positions are set back before it."""

    def make() -> Call:
        cache, step = _step(num_requests, width, context_len=1024)
        position = cache.tensors["position"]

        def call() -> object:
            position.fill_(1024 - width)
            return step()

        return call

    def reset() -> Call:
        position = _cache(num_requests).tensors["position"]
        return lambda: position.fill_(1024 - width)

    return Kernel(
        kernel="gated delta net",
        shape=f"{num_requests} blocks of {width}",
        num_bytes=_state_bytes(num_requests, width) + _row_bytes(num_requests * width),
        flops=_flops(num_requests * width),
        make=make,
        torch_kernels={"the reset of positions in it": reset},
    )


def _prompt(length: int) -> Kernel:
    return Kernel(
        kernel="gated delta net",
        shape=f"prompt of {length}",
        num_bytes=_row_bytes(length) + _state_bytes(1, 0) / 2,
        flops=_flops(length),
        make=lambda: _step(1, length, context_len=0)[1],
    )


def _copy() -> Kernel:
    """Of one layer, as a snapshot is filled."""

    def make() -> Call:
        slots = list(_cache(2).tensors.values())
        copies = RowCopies(slots, slots, device=slots[0].device)
        return lambda: copies.copy(0, 1)

    return Kernel(kernel="copy of a slot", shape="one layer", num_bytes=2.0 * _cache(1).spec.bytes_per_slot, make=make)
