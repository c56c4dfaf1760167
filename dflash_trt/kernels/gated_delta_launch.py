"""Launches of the kernels of gated delta nets. Allocates outputs; nothing depends on tensor contents."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.state_spec import Recurrent
from dflash_trt.kernels.gated_delta import delta_prompt_kernel, delta_verify_kernel
from dflash_trt.kernels.gated_delta_ends import convolve_kernel, finish_kernel
from dflash_trt.kernels.gated_delta_in_order import delta_in_order_kernel
from dflash_trt.kernels.launching import FLOATS, check_tensor, next_power_of_2, request_capacity

MIN_BLOCK: Final = 16  # rows, and features: the least that a tensor core takes
CHUNK: Final = 32  # rows of a prompt in one block
VERIFY_COLUMNS: Final = 32  # columns of a state, per program
PROMPT_COLUMNS: Final = 32
PART: Final = 16  # rows of a state in registers at once
CHANNELS: Final = 1024  # per program
HEADS: Final = 8
VERIFY_WARPS: Final = 2
PROMPT_WARPS: Final = 4
IN_ORDER_WARPS: Final = 4
END_WARPS: Final = 4
NUM_STAGES: Final = 3  # parts of a state on their way


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRows:
    """The rows of a step by request. A request with more rows than records is a prompt: none is rejected."""

    slot_ids: Tensor  # int64 [R]
    token_offsets: Tensor  # int32 [R + 1]
    context_lens: Tensor  # int32 [R]
    has_prompts: bool  # False: no request has more rows than records


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaWeights:
    conv: Tensor  # F [channels, conv_size]
    log_rate: Tensor  # float32 [hv]
    dt_bias: Tensor  # float32 [hv]
    norm: Tensor  # F [value_head_dim]


def run_gated_delta(
    qkvz: Tensor,  # F [N, channels + v_size], contiguous
    ba: Tensor,  # F [N, 2 * hv], contiguous
    weights: DeltaWeights,
    rows: DeltaRows,
    state: Mapping[str, Tensor],  # [slots, *shape] of `spec.tensors()`, written
    spec: Recurrent,
    eps: float,
    *,
    is_in_order: bool = False,
) -> Tensor:  # F [N, v_size]
    """See `Ops.gated_delta`. Three launches, four with possible prompts. Rows of no request get zeros.

    `is_in_order`: token by token, so that a row's bits depend on the tokens before it alone. All steps of a state must
    be of one kind, because the keys of their records are.

    Raises ValueError for tensors that the kernels would misread.
    """
    v_size = spec.num_value_heads * spec.value_head_dim
    call = _Call(
        qkvz=qkvz,
        ba=ba,
        weights=weights,
        rows=rows,
        state=state,
        spec=spec,
        is_in_order=is_in_order,
        mixed=qkvz.new_empty((len(qkvz), spec.num_channels)),
        num_folded=torch.empty_like(rows.context_lens),
        attended=torch.empty((len(qkvz), v_size), dtype=torch.float32, device=qkvz.device),
    )
    call.check()
    out = qkvz.new_empty((len(qkvz), v_size))
    if len(qkvz):
        call.convolve()
        call.recur()
        call.finish(out, eps)
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """Tensors of one layer in one step; the last three live from launch to launch."""

    qkvz: Tensor
    ba: Tensor
    weights: DeltaWeights
    rows: DeltaRows
    state: Mapping[str, Tensor]
    spec: Recurrent
    is_in_order: bool
    mixed: Tensor  # F [N, channels]
    num_folded: Tensor  # int32 [R]
    attended: Tensor  # float32 [N, v_size]

    def convolve(self) -> None:
        rows, num_requests = self.rows, len(self.rows.slot_ids)
        convolve_kernel[(len(self.qkvz), -(-self.spec.num_channels // CHANNELS))](
            self.qkvz,
            self.weights.conv,
            rows.slot_ids,
            rows.token_offsets,
            rows.context_lens,
            self.state["window"],
            self.state["position"],
            rows.slot_ids,  # not read: the state is given
            self.mixed,
            self.num_folded,
            num_requests,
            0,
            **convolve_constants(self.spec, num_requests),
            POOLED=False,
            num_warps=END_WARPS,
            enable_fp_fusion=True,
        )

    def recur(self) -> None:
        rows, spec, state = self.rows, self.spec, self.state
        arguments = (
            self.mixed,
            self.ba,
            self.weights.log_rate,
            self.weights.dt_bias,
            rows.slot_ids,
            rows.token_offsets,
            self.num_folded,
            *(state[name] for name in ("state", "keys", "deltas", "decays")),
            rows.slot_ids,  # not read: the state is given
            self.attended,
            0,
        )
        for kernel, constants, num_warps in self._recurrences():
            grid = (len(rows.slot_ids), spec.num_value_heads, -(-spec.value_head_dim // constants["BLOCK_V"]))
            kernel[grid](
                *arguments, **constants, POOLED=False, num_warps=num_warps, num_stages=NUM_STAGES, enable_fp_fusion=True
            )

    def _recurrences(self) -> Iterator[tuple[Any, dict[str, int], int]]:
        if self.is_in_order:
            yield delta_in_order_kernel, in_order_constants(self.spec), IN_ORDER_WARPS
            return
        yield delta_verify_kernel, verify_constants(self.spec), VERIFY_WARPS
        if self.rows.has_prompts:
            yield delta_prompt_kernel, prompt_constants(self.spec), PROMPT_WARPS

    def finish(self, out: Tensor, eps: float) -> None:
        rows, spec, state, num_requests = self.rows, self.spec, self.state, len(self.rows.slot_ids)
        blocks = max(-(-spec.num_value_heads // HEADS), -(-spec.num_channels // CHANNELS))
        finish_kernel[(len(out) + num_requests, blocks)](
            self.attended,
            self.qkvz,
            self.mixed,
            self.ba,
            self.weights.norm,
            self.weights.log_rate,
            self.weights.dt_bias,
            rows.slot_ids,
            rows.token_offsets,
            rows.context_lens,
            self.num_folded,
            *(state[name] for name in ("keys", "decays", "window", "position")),
            rows.slot_ids,  # not read: the state is given
            out,
            eps,
            len(out),
            num_requests,
            0,
            **finish_constants(spec, num_requests, is_in_order=self.is_in_order),
            POOLED=False,
            num_warps=END_WARPS,
            enable_fp_fusion=True,
        )

    def check(self) -> None:
        spec, dtype, weights, rows = self.spec, self.qkvz.dtype, self.weights, self.rows
        heads, num_requests = spec.num_value_heads, len(rows.slot_ids)
        check_tensor("qkvz", self.qkvz, dtype=FLOATS, shape=[None, spec.num_channels + heads * spec.value_head_dim])
        check_tensor("ba", self.ba, dtype=dtype, shape=[len(self.qkvz), 2 * heads])
        check_tensor("conv", weights.conv, dtype=dtype, shape=[spec.num_channels, spec.conv_size])
        for name in ("log_rate", "dt_bias"):
            check_tensor(name, getattr(weights, name), dtype=torch.float32, shape=[heads])
        check_tensor("norm", weights.norm, dtype=dtype, shape=[spec.value_head_dim])
        check_tensor("slot_ids", rows.slot_ids, dtype=torch.int64, shape=[num_requests])
        check_tensor("token_offsets", rows.token_offsets, dtype=torch.int32, shape=[num_requests + 1])
        check_tensor("context_lens", rows.context_lens, dtype=torch.int32, shape=[num_requests])
        for name, (shape, of) in spec.tensors().items():
            check_tensor(name, self.state[name], dtype=torch_dtype(of), shape=[None, *shape])


def convolve_constants(spec: Recurrent, num_requests: int) -> dict[str, int]:
    return {
        "CHANNELS": spec.num_channels,
        "GATES": spec.num_value_heads * spec.value_head_dim,
        "TAPS": spec.conv_size,
        "RECORDS": spec.num_records,
        "BLOCK": CHANNELS,
        "REQUESTS": request_capacity(num_requests),
    }


def verify_constants(spec: Recurrent) -> dict[str, int]:
    return _head_constants(spec) | {
        "PART": min(PART, _block(spec.key_head_dim)),
        "BLOCK_V": min(VERIFY_COLUMNS, _block(spec.value_head_dim)),
        "BLOCK": _block(spec.num_records),
    }


def prompt_constants(spec: Recurrent) -> dict[str, int]:
    return _head_constants(spec) | {
        "PART": min(PART, _block(spec.key_head_dim)),
        "BLOCK_V": min(PROMPT_COLUMNS, _block(spec.value_head_dim)),
        "BLOCK": CHUNK,
        "FOLDED": _block(spec.num_records),
    }


def in_order_constants(spec: Recurrent) -> dict[str, int]:
    return _head_constants(spec) | {"BLOCK_V": min(VERIFY_COLUMNS, _block(spec.value_head_dim))}


def finish_constants(spec: Recurrent, num_requests: int, *, is_in_order: bool = False) -> dict[str, int]:
    return _head_constants(spec) | {
        "TAPS": spec.conv_size,
        "BLOCK_V": next_power_of_2(spec.value_head_dim),
        "BLOCK_HEADS": HEADS,
        "BLOCK": CHANNELS,
        "REQUESTS": request_capacity(num_requests),
        "HAS_UNIT_KEYS": not is_in_order,
    }


def _head_constants(spec: Recurrent) -> dict[str, int]:
    return {
        "KEY_HEADS": spec.num_key_heads,
        "HEADS": spec.num_value_heads,
        "KEY_DIM": spec.key_head_dim,
        "VALUE_DIM": spec.value_head_dim,
        "RECORDS": spec.num_records,
        "BLOCK_K": _block(spec.key_head_dim),
    }


def _block(size: int) -> int:
    return max(MIN_BLOCK, next_power_of_2(size))
