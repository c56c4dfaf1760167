"""Variants of the kernels of experts to compile ahead of time, as their launchers in `kernels/` pass them.

Sizes of a model are compiled in, so that a library has the experts of the engines that it is made for alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch

from dflash_trt.core.dtype import FloatDType, torch_dtype
from dflash_trt.kernels import int8_linear_launch
from dflash_trt.kernels.experts import expert_down_kernel, expert_gate_up_kernel, expert_sum_kernel
from dflash_trt.kernels.experts_launch import (
    DOWN_OUT,
    GATE_OUT,
    SUM_BLOCK,
    PackedExperts,
    down_constants,
    gate_up_constants,
    has_fp_fusion,
    product_stages,
    product_warps,
    widens_weights,
)
from dflash_trt.kernels.int8_linear import entry_codes_kernel, token_codes_kernel
from dflash_trt.kernels.launch_rules import FP8, FP8_BLOCK, INT4, INT8, MXFP4, NVFP4, PLAIN, tile_tokens
from dflash_trt.kernels.launching import next_power_of_2
from dflash_trt.kernels.packed_matrix import PackedMatrix
from dflash_trt.kernels.routing import reset_ticket_kernel, routing_kernel
from dflash_trt.kernels.routing_launch import TOKEN_TILES, Router, RouterKind, routing_constants, routing_warps
from plugins.aot.variant import KernelVariant, pointer

FLOATS: Final = pointer(torch.float32)
INTS: Final = pointer(torch.int32)
BYTES: Final = pointer(torch.uint8)
INT8_CODES: Final = pointer(torch.int8)
E4M3: Final = pointer(torch.float8_e4m3fn)
_PACKED: Final = (MXFP4, NVFP4, INT4)  # two codes a byte
_FORM_NAMES: Final = {
    PLAIN: "plain",
    FP8: "fp8",
    FP8_BLOCK: "fp8_block",
    MXFP4: "mxfp4",
    NVFP4: "nvfp4",
    INT4: "int4",
    INT8: "int8",
}


@dataclass(frozen=True, kw_only=True, order=True)
class MatrixKernels:
    """One weight of all experts. `num_input_scales` of each expert: 0, 1, or 2 where gate and up have one each."""

    form: int
    has_row_scale: bool = False
    num_input_scales: int = 0
    has_bias: bool = False

    @property
    def name(self) -> str:
        flags = {"rows": self.has_row_scale, f"in{self.num_input_scales}": self.num_input_scales, "bias": self.has_bias}
        return "_".join([_FORM_NAMES[self.form], *(word for word, is_on in flags.items() if is_on)])

    def matrix(self, out_size: int, in_size: int) -> PackedMatrix:
        """What decides constants, without memory."""
        columns = in_size // 2 if self.form in _PACKED else in_size
        scales = [torch.empty((1, size), device="meta") for size in (1, max(1, self.num_input_scales))]
        return PackedMatrix(
            form=self.form,
            codes=torch.empty((1, out_size, columns), device="meta"),
            row_scale=scales[0] if self.has_row_scale else None,
            input_scale=scales[1] if self.num_input_scales else None,
            bias=scales[0] if self.has_bias else None,
        )

    def types(self, dtype: torch.dtype) -> dict[str, str]:
        """Of a kernel's arguments; anything stands for a tensor that is not read."""
        of_f, is_quantized = pointer(dtype), self.num_input_scales > 0
        codes = {PLAIN: of_f, INT8: INT8_CODES}.get(self.form, E4M3 if is_quantized and self.form == FP8 else BYTES)
        block_scale = {FP8_BLOCK: FLOATS, INT4: pointer(torch.bfloat16), NVFP4: E4M3 if is_quantized else BYTES}
        return {
            "codes": codes,
            "block_scale": block_scale.get(self.form, codes),
            "block_rows": INTS,
            "row_scale": FLOATS,
            "bias": of_f,
        }


@dataclass(frozen=True, kw_only=True, order=True)
class ExpertsKernels:
    """The experts of one kind of layer, of one rank, for steps of at most `max_rows` rows."""

    num_experts: int
    num_here: int
    num_chosen: int
    hidden_size: int
    ffn_size: int
    routing: RouterKind
    normalizes: bool
    has_choice_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    activation: Literal["silu", "clamped_swiglu", "gelu_tanh"]
    scales_inputs: bool = False
    gate_up: MatrixKernels
    down: MatrixKernels
    max_rows: int

    def variants(self, dtype_name: FloatDType) -> Iterator[KernelVariant]:
        dtype = torch_dtype(dtype_name)
        most = tile_tokens(
            num_entries=self.max_rows * self.num_chosen,
            num_experts=self.num_experts,
            widens_weights=int(widens_weights(self._packed, dtype)),
        )
        yield _reset_ticket()
        yield self._sum(dtype)
        yield from self._codes(dtype)
        for tokens in TOKEN_TILES:
            if tokens <= most:
                yield self._routing(dtype, tokens)
                yield self._gate_up(dtype, tokens)
                yield self._down(dtype, tokens)

    def _routing(self, dtype: torch.dtype, tokens: int) -> KernelVariant:
        bias = torch.empty(self.num_experts, device="meta") if self.has_choice_bias else None
        router = Router(
            kind=self.routing,
            num_chosen=self.num_chosen,
            normalizes=self.normalizes,
            choice_bias=bias,
            num_groups=self.num_groups,
            num_chosen_groups=self.num_chosen_groups,
        )
        constants = routing_constants(router, num_experts=self.num_experts, tokens=tokens)
        parts = ["routing", _name(dtype), self.routing, *(["normalized"] if self.normalizes else [])]
        parts += ["biased"] if self.has_choice_bias else []
        parts += [f"g{self.num_chosen_groups}of{self.num_groups}"] if self.num_groups > 1 else []
        return KernelVariant(
            name="_".join([*parts, f"e{self.num_experts}", f"k{self.num_chosen}", f"t{tokens}"]),
            kernel=routing_kernel,
            signature={
                "logits": pointer(dtype),
                "choice_bias": FLOATS,
                "expert_ids": INTS,
                "weights": FLOATS,
                **dict.fromkeys(("order", "tiles", "ranks", "counts", "ticket"), INTS),
                **dict.fromkeys(("num_rows", "num_tiles", "first_expert", "num_here"), "i32"),
                "factor": "fp32",
            },
            constexprs=constants,
            num_warps=routing_warps(router),
            num_stages=1,
            grid=(f"(num_rows + {constants['ROWS'] - 1}) / {constants['ROWS']}", "1", "1"),
        )

    def _codes(self, dtype: torch.dtype) -> Iterator[KernelVariant]:
        """Of the rows that products in INT8 read."""
        weighed = self.scales_inputs and self.gate_up.form == INT8
        if self.down.form == INT8 or (self.gate_up.form == INT8 and not weighed):
            yield token_codes(dtype)
        if weighed:
            plain = token_codes(dtype)
            yield replace(
                plain,
                name=f"entry_codes_{_name(dtype)}_k{self.num_chosen}",
                kernel=entry_codes_kernel,
                signature={"x": pointer(dtype), "weights": FLOATS, **plain.signature},
                constexprs={"num_chosen": self.num_chosen, **plain.constexprs},
                grid=("entries", "1", "1"),
            )

    def _gate_up(self, dtype: torch.dtype, tokens: int) -> KernelVariant:
        constants = {"num_chosen": self.num_chosen, **gate_up_constants(self._packed, tokens=tokens)}
        parts = ["expert_gate_up", _name(dtype), self.gate_up.name, self.activation, *self._scaled]
        parts += [f"h{constants['HIDDEN']}", f"{self.hidden_size}x{self.ffn_size}", f"k{self.num_chosen}", f"t{tokens}"]
        return KernelVariant(
            name="_".join(parts),
            kernel=expert_gate_up_kernel,
            signature={
                "x": INT8_CODES if self.gate_up.form == INT8 else pointer(dtype),
                **self.gate_up.types(dtype),
                "input_scale": FLOATS,
                "order": INTS,
                "tiles": INTS,
                "weights": FLOATS,
                **_hidden_types(self.down, dtype),
                "hidden_scale": FLOATS,
                **dict.fromkeys(("num_tiles", "num_block_rows"), "i32"),
                **dict.fromkeys(("limit", "alpha"), "fp32"),
            },
            constexprs=constants,
            num_warps=product_warps(tokens),
            num_stages=product_stages(self._packed, dtype),
            has_fp_fusion=has_fp_fusion(self._packed.gate_up),
            grid=("num_tiles", str(-(-self.ffn_size // GATE_OUT)), "1"),
        )

    def _down(self, dtype: torch.dtype, tokens: int) -> KernelVariant:
        parts = ["expert_down", _name(dtype), self.down.name, *self._scaled]
        parts += [f"{self.ffn_size}x{self.hidden_size}", f"t{tokens}"]
        return KernelVariant(
            name="_".join(parts),
            kernel=expert_down_kernel,
            signature={
                **(_INT8_HIDDEN if self.down.form == INT8 else _hidden_types(self.down, dtype)),
                **self.down.types(dtype),
                "order": INTS,
                "tiles": INTS,
                "weights": FLOATS,
                "results": pointer(dtype),
                **dict.fromkeys(("num_tiles", "num_block_rows"), "i32"),
            },
            constexprs=down_constants(self._packed, tokens=tokens),
            num_warps=product_warps(tokens),
            num_stages=product_stages(self._packed, dtype),
            has_fp_fusion=has_fp_fusion(self._packed.down),
            grid=("num_tiles", str(-(-self.hidden_size // DOWN_OUT)), "1"),
        )

    @property
    def _packed(self) -> PackedExperts:
        """What decides constants."""
        return PackedExperts(
            gate_up=self.gate_up.matrix(2 * self.ffn_size, self.hidden_size),
            down=self.down.matrix(self.hidden_size, self.ffn_size),
            activation=self.activation,
            scales_inputs=self.scales_inputs,
        )

    @property
    def _scaled(self) -> list[str]:
        """Of a name."""
        return ["scaled"] if self.scales_inputs else []

    def _sum(self, dtype: torch.dtype) -> KernelVariant:
        is_few = self.num_here != self.num_experts
        block = min(SUM_BLOCK, next_power_of_2(self.hidden_size))
        parts = [
            "expert_sum",
            _name(dtype),
            *(["few"] if is_few else []),
            f"h{self.hidden_size}",
            f"k{self.num_chosen}",
        ]
        return KernelVariant(
            name="_".join(parts),
            kernel=expert_sum_kernel,
            signature={
                "results": pointer(dtype),
                "expert_ids": INTS,
                "out": pointer(dtype),
                "first_expert": "i32",
                "num_experts": "i32",
            },
            constexprs={"num_chosen": self.num_chosen, "HIDDEN_SIZE": self.hidden_size, "FEW": is_few, "BLOCK": block},
            num_warps=4,
            num_stages=1,
            grid=("num_rows", str(-(-self.hidden_size // block)), "1"),
        )


def matrix_choices(matrix: MatrixKernels, *, splits_input: bool, is_bias_of_one: bool) -> Iterator[MatrixKernels]:
    """What a weight may turn out to be: calibration decides whether gate and up share an input scale, and of ranks
    that add up their results one has the bias.
    """
    scales = [1, 2] if matrix.num_input_scales and splits_input else [matrix.num_input_scales]
    biases = [True, False] if matrix.has_bias and is_bias_of_one else [matrix.has_bias]
    for num_input_scales in scales:
        for has_bias in biases:
            yield replace(matrix, num_input_scales=num_input_scales, has_bias=has_bias)


def token_codes(dtype: torch.dtype) -> KernelVariant:
    """The kernel that makes rows of integers of any rows; its grid uses num_rows."""
    return KernelVariant(
        name=f"token_codes_{_name(dtype)}",
        kernel=token_codes_kernel,
        signature={"x": pointer(dtype), "codes": INT8_CODES, "scales": FLOATS, "num_columns": "i32"},
        constexprs={"BLOCK": int8_linear_launch.BLOCK},
        num_warps=4,
        num_stages=1,
        has_fp_fusion=False,
        grid=("num_rows", "1", "1"),
    )


def _reset_ticket() -> KernelVariant:
    return KernelVariant(
        name="reset_ticket",
        kernel=reset_ticket_kernel,
        signature={"ticket": INTS},
        constexprs={},
        num_warps=1,
        num_stages=1,
        grid=("1", "1", "1"),
    )


_INT8_HIDDEN: Final = {"hidden": INT8_CODES, "hidden_block_scale": FLOATS}  # which another kernel makes


def _hidden_types(down: MatrixKernels, dtype: torch.dtype) -> dict[str, str]:
    if down.num_input_scales == 0:
        return {"hidden": pointer(dtype), "hidden_block_scale": pointer(dtype)}
    return {"hidden": E4M3 if down.form == FP8 else BYTES, "hidden_block_scale": E4M3}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
