"""Launches of the kernels of `experts.py`. Allocates outputs; nothing depends on a tensor's content."""

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from dflash_trt.kernels.experts import (
    CLAMPED_SWIGLU,
    GELU_TANH,
    HIDDEN_AS_IT_IS,
    HIDDEN_FP8,
    HIDDEN_NVFP4,
    SILU,
    expert_down_kernel,
    expert_gate_up_kernel,
    expert_sum_kernel,
)
from dflash_trt.kernels.int8_linear_launch import entry_codes, token_codes
from dflash_trt.kernels.launch_rules import FP8, INT8, PLAIN
from dflash_trt.kernels.launching import check_tensor, next_power_of_2
from dflash_trt.kernels.packed_matrix import BLOCK_IN, PackedMatrix
from dflash_trt.kernels.packed_product import AS_THEY_ARE, CODES, ROUNDED_HERE
from dflash_trt.kernels.routing_launch import Routing

ACTIVATIONS: Final = {"silu": SILU, "clamped_swiglu": CLAMPED_SWIGLU, "gelu_tanh": GELU_TANH}
GATE_OUT: Final = 64  # features of a program, with their gate and their up row
DOWN_OUT: Final = 128
NUM_STAGES: Final = 3
SUM_BLOCK: Final = 1024
_PLAIN_BLOCK_IN: Final = 64  # as many bytes of 16-bit weights as of FP8


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedExperts:
    """The experts of a layer. gate_up has gate rows above up rows."""

    gate_up: PackedMatrix  # [E, 2F, H]
    down: PackedMatrix  # [E, H, F]
    activation: Literal["silu", "clamped_swiglu", "gelu_tanh"] = "silu"
    limit: float = 0.0  # clamped_swiglu
    alpha: float = 0.0  # clamped_swiglu
    scales_inputs: bool = False  # the router's weights multiply what an expert reads, not its results

    def check(self) -> None:
        """Raises ValueError for tensors that the kernels would misread."""
        self.gate_up.check()
        self.down.check()
        assert self.gate_up.out_size == 2 * self.down.in_size and self.gate_up.in_size == self.down.out_size
        assert not self.down.splits_input, "down is one segment"


def run_experts(x: Tensor, experts: PackedExperts, routing: Routing) -> Tensor:  # F [N, H] -> [N, H]
    """Three launches, and one more before each product in INT8, for the codes of its rows."""
    hidden, hidden_block_scale = _gate_up(x, experts, routing)
    if experts.down.form == INT8:
        hidden, hidden_block_scale = token_codes(hidden)
    results = _down(hidden, hidden_block_scale, experts, routing, x.dtype)
    hidden_size = experts.down.out_size
    out = torch.empty_like(x)
    expert_sum_kernel[(len(x), -(-hidden_size // SUM_BLOCK))](
        results,
        routing.expert_ids,
        out,
        routing.router.first_expert,
        len(experts.down.codes),
        routing.num_chosen,
        hidden_size,
        FEW=routing.router.num_here is not None,
        BLOCK=min(SUM_BLOCK, next_power_of_2(hidden_size)),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


def _gate_up(x: Tensor, experts: PackedExperts, routing: Routing) -> tuple[Tensor, Tensor]:
    gate_up, down = experts.gate_up, experts.down
    check_tensor("x", x, dtype=x.dtype, shape=[len(routing.expert_ids), gate_up.in_size])
    hidden, hidden_block_scale = _new_hidden(x, down, routing.order.numel())
    rows, input_scale = x, _or(gate_up.input_scale, x)
    if gate_up.form == INT8:
        rows, input_scale = entry_codes(x, routing.weights) if experts.scales_inputs else token_codes(x)
    expert_gate_up_kernel[(routing.num_tiles, -(-down.in_size // GATE_OUT))](
        rows,
        gate_up.codes_argument,
        gate_up.block_scale_argument,
        _or(gate_up.block_rows, x),
        _or(gate_up.row_scale, x),
        _or(gate_up.bias, x),
        input_scale,
        routing.order,
        routing.tiles,
        routing.weights,
        hidden,
        hidden_block_scale,
        _or(down.input_scale, x),
        routing.num_tiles,
        gate_up.num_block_rows,
        routing.num_chosen,
        experts.limit,
        experts.alpha,
        **gate_up_constants(experts, tokens=routing.tokens),
        num_warps=product_warps(routing.tokens),
        num_stages=product_stages(experts, x.dtype),
        enable_fp_fusion=has_fp_fusion(gate_up),
    )
    return hidden, hidden_block_scale


def _down(
    hidden: Tensor, hidden_block_scale: Tensor, experts: PackedExperts, routing: Routing, dtype: torch.dtype
) -> Tensor:
    down = experts.down
    results = torch.empty((routing.order.numel(), down.out_size), dtype=dtype, device=hidden.device)
    expert_down_kernel[(routing.num_tiles, -(-down.out_size // DOWN_OUT))](
        hidden,
        hidden_block_scale,
        down.codes_argument,
        down.block_scale_argument,
        _or(down.block_rows, results),
        _or(down.row_scale, results),
        _or(down.bias, results),
        routing.order,
        routing.tiles,
        routing.weights,
        results,
        routing.num_tiles,
        down.num_block_rows,
        **down_constants(experts, tokens=routing.tokens),
        num_warps=product_warps(routing.tokens),
        num_stages=product_stages(experts, dtype),
        enable_fp_fusion=has_fp_fusion(down),
    )
    return results


def gate_up_constants(experts: PackedExperts, *, tokens: int) -> dict[str, int | bool]:
    gate_up, down = experts.gate_up, experts.down
    return {
        "IN": gate_up.in_size,
        "FFN": down.in_size,
        "FORM": gate_up.form,
        "INPUT": CODES if gate_up.form == INT8 else AS_THEY_ARE if gate_up.input_scale is None else ROUNDED_HERE,
        "SPLITS_INPUT": gate_up.splits_input,
        "HIDDEN": hidden_form(down),
        "ACTIVATION": ACTIVATIONS[experts.activation],
        "HAS_ROW_SCALE": gate_up.row_scale is not None,
        "HAS_BIAS": gate_up.bias is not None,
        "SCALES_INPUTS": experts.scales_inputs,
        "TOKENS": tokens,
        "OUT": GATE_OUT,
        "BLOCK_IN": block_in(gate_up),
    }


def down_constants(experts: PackedExperts, *, tokens: int) -> dict[str, int | bool]:
    down = experts.down
    return {
        "FFN": down.in_size,
        "HIDDEN_SIZE": down.out_size,
        "FORM": down.form,
        "INPUT": CODES if down.form == INT8 or down.input_scale is not None else AS_THEY_ARE,
        "HAS_ROW_SCALE": down.row_scale is not None,
        "HAS_BIAS": down.bias is not None,
        "SCALES_INPUTS": experts.scales_inputs,
        "TOKENS": tokens,
        "OUT": DOWN_OUT,
        "BLOCK_IN": block_in(down),
    }


def product_warps(tokens: int) -> int:
    """Two warpgroups where one would not have the registers for its sums."""
    return 8 if tokens == 64 else 4


def widens_weights(experts: PackedExperts, dtype: torch.dtype) -> bool:
    """True if packed weights become float32, of which shared memory holds few."""
    return dtype == torch.float32 and not {experts.gate_up.form, experts.down.form} <= {PLAIN, INT8}


def product_stages(experts: PackedExperts, dtype: torch.dtype) -> int:
    """Rounds of the loop whose operands are in shared memory."""
    return 1 if widens_weights(experts, dtype) else NUM_STAGES


def has_fp_fusion(matrix: PackedMatrix) -> bool:
    """False for INT8, whose format says where each step rounds."""
    return matrix.form != INT8


def block_in(matrix: PackedMatrix) -> int:
    return _PLAIN_BLOCK_IN if matrix.form == PLAIN else BLOCK_IN


def hidden_form(down: PackedMatrix) -> int:
    """As which the activations between the two products are stored."""
    if down.input_scale is None:
        return HIDDEN_AS_IT_IS
    return HIDDEN_FP8 if down.form == FP8 else HIDDEN_NVFP4


def _new_hidden(x: Tensor, down: PackedMatrix, num_entries: int) -> tuple[Tensor, Tensor]:
    def new(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((num_entries, columns), dtype=dtype, device=x.device)

    form, ffn = hidden_form(down), down.in_size
    if form == HIDDEN_NVFP4:
        return new(ffn // 2, torch.uint8), new(ffn // 16, torch.float8_e4m3fn)
    hidden = new(ffn, torch.float8_e4m3fn if form == HIDDEN_FP8 else x.dtype)
    return hidden, hidden


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """An argument that the kernel does not read."""
    return stand_in if tensor is None else tensor
